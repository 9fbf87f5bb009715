"""Who may import what (docs/design.md), read from the syntax trees, and what importing costs."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import moebudget

SRC = Path(moebudget.__file__).parent
FILES = sorted(SRC.rglob("*.py"))
# Rooms by level: a room imports rooms of lower levels and itself, never its neighbours.
LEVELS: tuple[frozenset[str], ...] = tuple(
    frozenset(rooms.split())
    for rooms in (
        "core",
        "methods",
        "kernels presets",
        "engines",
        "calibrate",
        "evaluate",
        "bench",
        "tune analyse report demo",
        "cli",
    )
)
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
EDGE_ONLY = {"transformers", "vllm", "lm_eval", "matplotlib", "datasets", "fastapi", "prometheus_client", "triton"}
# Where each framework may be named: folders (with a slash at the end) or files.
FRAMEWORKS: dict[str, tuple[str, ...]] = {
    "transformers": ("engines/transformers/", "evaluate/", "bench/diagnose/hf.py"),
    "vllm": ("engines/vllm/", "bench/engine.py"),
    "fastapi": ("engines/vllm/",),
    "prometheus_client": ("engines/vllm/",),
    "lm_eval": ("evaluate/lm_eval/",),
    "datasets": ("calibrate/data.py", "evaluate/lm_eval/"),
    "matplotlib": ("evaluate/plot.py", "report/"),
    "triton": ("kernels/",),
}


def imported(source: str) -> set[str]:
    """Every module that a source names in an import, at any depth; relative imports as '.'."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            inside = {f"{module}.{alias.name}" for alias in node.names}
            modules.update(inside if module.partition(".")[0] == "moebudget" else {module})
    return modules


def name_of(path: Path) -> str:
    return path.relative_to(SRC).as_posix()


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@functools.cache
def module_names() -> dict[str, Path]:
    """Every module of the package by its dotted name; a package is its __init__."""
    names = {}
    for path in FILES:
        parts = ("moebudget", *path.relative_to(SRC).with_suffix("").parts)
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def modules_imported(path: Path) -> set[Path]:
    """The package's own files that a file imports; a name inside a module counts as the module."""
    files = set()
    for name in imported(path.read_text()):
        while name.startswith("moebudget") and name not in module_names():
            name = name.rpartition(".")[0]
        if name in module_names():
            files.add(module_names()[name])
    return files - {path}


def test_imports_inside_functions_are_seen() -> None:
    source = "import a.b, c\nfrom d.e import f\ndef g():\n    from moebudget import h\n    from . import i\n"
    assert imported(source) == {"a.b", "c", "d.e", "moebudget.h", "."}
    rooms = {room_of(path) for path in FILES} - {"__init__", "__main__"}
    assert rooms == set(LEVEL_OF), "every room has a level, and every level's room exists"
    assert len(LEVELS) <= 9


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_run_from_higher_levels_to_lower_ones(path: Path) -> None:
    room = room_of(path)
    if room in ("__init__", "__main__"):
        return
    rooms = {room_of(other) for other in modules_imported(path)} - {room, "__init__"}
    wrong = {other for other in rooms if LEVEL_OF[other] >= LEVEL_OF[room]}
    assert not wrong, f"{name_of(path)} (level {LEVEL_OF[room]}) imports {wrong}"


def test_no_file_imports_itself_through_others() -> None:
    graph = {path: modules_imported(path) for path in FILES if path.name != "__init__.py"}
    done: set[Path] = set()
    trail: list[Path] = []

    def visit(path: Path) -> None:
        assert path not in trail, " -> ".join(map(name_of, [*trail[trail.index(path) :], path]))
        if path in done or path not in graph:
            return
        trail.append(path)
        for other in sorted(graph[path]):
            visit(other)
        done.add(trail.pop())

    for path in graph:
        visit(path)


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "core"], ids=name_of)
def test_core_imports_torch_and_the_standard_library_alone(path: Path) -> None:
    allowed = {"moebudget", "torch", *sys.stdlib_module_names}
    allowed |= {"safetensors"} if name_of(path) == "core/stats.py" else set()
    assert {module.split(".")[0] for module in imported(path.read_text())} <= allowed


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_frameworks_are_imported_at_their_edge_alone(path: Path) -> None:
    assert set(FRAMEWORKS) == EDGE_ONLY
    for framework in EDGE_ONLY & {module.split(".")[0] for module in imported(path.read_text())}:
        assert name_of(path).startswith(FRAMEWORKS[framework]), f"{name_of(path)} imports {framework}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_vllm_plugin_is_imported_by_itself_alone(path: Path) -> None:
    if not name_of(path).startswith("engines/vllm/"):
        assert not {m for m in imported(path.read_text()) if m.startswith("moebudget.engines.vllm")}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_are_absolute(path: Path) -> None:
    assert not {module for module in imported(path.read_text()) if module.startswith(".")}


PROBE = """
import json, sys
before = set(sys.modules)
import moebudget
listed = dir(moebudget)
loaded = sorted(name.split(".")[0] for name in set(sys.modules) - before)
import torch
print(json.dumps({"loaded": loaded, "listed": listed, "cuda": torch.cuda.is_initialized()}))
"""


def test_importing_moebudget_loads_nothing_and_leaves_cuda_alone() -> None:
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True)
    probe = json.loads(done.stdout)
    assert set(probe["loaded"]) <= {"moebudget", *sys.stdlib_module_names}
    assert set(moebudget.__all__) <= set(probe["listed"])
    assert not probe["cuda"]


@pytest.mark.parametrize("name", moebudget.__all__)
def test_public_names_resolve(name: str) -> None:
    value = getattr(moebudget, name)
    where = getattr(value, "__module__", None) or value.__name__
    assert where.startswith("moebudget.")
    assert getattr(value, "__name__", "").rsplit(".")[-1] == name


def test_unknown_public_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'budget'; public names: Policy, .*attach"):
        _ = moebudget.budget
    assert moebudget.__all__ == sorted(moebudget.__all__)
    assert isinstance(moebudget.__version__, str)
