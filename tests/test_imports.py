"""Who may import what (docs/design.md), read from the syntax trees, and what importing costs."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import moebudget

SRC = Path(moebudget.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
CORE = (
    "types", "cache", "placement", "router", "score", "select", "fill", "gain_fills", "policy", "spelling", "presets",
    "stats", "runtime", "rivals", "rival_scores", "rival_selects", "device_selects", "settings",
)  # fmt: skip
EDGES = {"integrations", "allocate", "evaluate", "analyse", "demo", "cli", "bench", "diagnose", "report"}
EDGE_ONLY = {"transformers", "vllm", "lm_eval", "matplotlib", "datasets"}
PLUGIN_ONLY = {"vllm", "fastapi", "prometheus_client"}
MOST_LINES = 260


def imported(source: str) -> set[str]:
    """Every module that a source names in an import, at any depth; relative imports as '.'."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            inside = {f"{module}.{alias.name}" for alias in node.names}
            found.update(inside if module == "moebudget" else {module})
    return found


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def test_import_inside_a_function_is_overlooked() -> None:
    source = "import a.b, c\nfrom d.e import f\ndef g():\n    from moebudget import h\n    from . import i\n"
    assert imported(source) == {"a.b", "c", "d.e", "moebudget.h", "."}
    assert {f"{name}.py" for name in CORE} <= {name_of(path) for path in FILES}


@pytest.mark.parametrize("name", CORE)
def test_core_module_imports_more_than_torch_and_core(name: str) -> None:
    allowed = {"torch", *sys.stdlib_module_names} | ({"safetensors"} if name == "stats" else set())
    core = {f"moebudget.{other}" for other in CORE}
    source = (SRC / f"{name}.py").read_text()
    wrong = {module for module in imported(source) if module.split(".")[0] not in allowed and module not in core}
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_framework_is_imported_away_from_the_edge(path: Path) -> None:
    allowed = EDGE_ONLY if room_of(path) in EDGES else {"datasets"} if name_of(path) == "calibrate/data.py" else set()
    modules = {module.split(".")[0] for module in imported(path.read_text())}
    assert not modules & (EDGE_ONLY - allowed)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_vllm_is_imported_away_from_its_plugin(path: Path) -> None:
    modules = imported(path.read_text())
    if not name_of(path).startswith("integrations/vllm/"):
        drives = {"vllm"} if name_of(path) == "bench/engine.py" else set()
        assert not {m for m in modules if m.startswith("moebudget.integrations.vllm")}
        assert not {module.split(".")[0] for module in modules} & (PLUGIN_ONLY - drives)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_cli_or_relative_module_is_imported(path: Path) -> None:
    modules = imported(path.read_text())
    assert not {module for module in modules if module.startswith(".")}, "imports are absolute"
    if room_of(path) not in {"cli", "__main__"}:
        assert not {module for module in modules if f"{module}.".startswith("moebudget.cli.")}


def test_file_is_too_long() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert not {name: lines for name, lines in lengths.items() if lines > MOST_LINES}


PROBE = """
import json, sys
before = set(sys.modules)
import moebudget
listed = dir(moebudget)
loaded = sorted(name.split(".")[0] for name in set(sys.modules) - before)
import torch
print(json.dumps({"loaded": loaded, "listed": listed, "cuda": torch.cuda.is_initialized()}))
"""


def test_importing_moebudget_loads_torch_or_touches_cuda() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert set(found["loaded"]) <= {"moebudget", *sys.stdlib_module_names}
    assert set(moebudget.__all__) <= set(found["listed"])
    assert not found["cuda"]


@pytest.mark.parametrize("name", moebudget.__all__)
def test_public_name_does_not_resolve(name: str) -> None:
    value = getattr(moebudget, name)
    where = getattr(value, "__module__", None) or value.__name__
    assert where.startswith("moebudget.")
    assert getattr(value, "__name__", "").rsplit(".")[-1] == name


def test_unknown_name_is_not_explained() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'budget'; public names: Policy, .*attach"):
        _ = moebudget.budget
    assert moebudget.__all__ == sorted(moebudget.__all__)
    assert isinstance(moebudget.__version__, str)
