"""The README and docs: commands, links and examples work, and generated blocks equal the rows and the registry."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import typer.main

from experiments.studies.compare_methods import sweeps
from experiments.tables import speed_tables, update_tables
from moebudget.calibrate.run import KNOWN
from moebudget.cli import app
from moebudget.core.counters import COUNTERS
from moebudget.core.router import RouterSpec
from moebudget.core.stats import ModelFacts, Stats
from moebudget.core.types import PLACEMENT, LayerStats
from moebudget.methods.registry import METHODS, parse

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "experiments/README.md",
    ROOT / "benchmarks/results/README.md",
]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict[str, object]]]:
    return update_tables.read_rows()


def shell_lines() -> list[tuple[str, str]]:
    lines = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            joined = block.replace("\\\n", " ")
            lines += [(page.relative_to(ROOT).as_posix(), line.split("#")[0]) for line in joined.splitlines()]
    return lines


@pytest.mark.parametrize(("page", "line"), [pair for pair in shell_lines() if pair[1].startswith("moebudget ")])
def test_documented_command_has_these_options(page: str, line: str) -> None:
    words = line.split()
    group = typer.main.get_command(app)
    command = group.commands[words[1]]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):
        command = command.commands[words[2]]
    options = {name for parameter in command.params for name in parameter.opts}
    used = {word for word in words if word.startswith("-")}
    assert used <= options, f"{page}: {used - options}"
    for policy in re.findall(r"--policy (\S+)", line):
        parse(policy)


@pytest.mark.parametrize(("page", "line"), [pair for pair in shell_lines() if pair[1].startswith("python -m ")])
def test_documented_module_exists(page: str, line: str) -> None:
    module = line.split()[2]
    assert importlib.util.find_spec(module) is not None, f"{page}: {module}"
    source = (ROOT / module.replace(".", "/")).with_suffix(".py")
    if source.is_file():  # a program of experiments
        text = source.read_text(encoding="utf-8")
        text += (ROOT / "experiments/studies/study_spread.py").read_text(encoding="utf-8")  # shared arguments
        for option in {*re.findall(r"(?<=\s)--[a-z-]+", line)} - {"--help"}:
            assert f'"{option}"' in text, f"{page}: {module} has no option {option}"


def test_experiments_readme_lists_every_module() -> None:
    text = (ROOT / "experiments/README.md").read_text(encoding="utf-8")
    modules = [path.stem for path in (ROOT / "experiments").rglob("*.py") if path.stem != "__init__"]
    assert not [name for name in modules if f"`{name}`" not in text and name != "update_tables"]
    assert "experiments.tables.update_tables" in text


def test_rows_readme_lists_every_file_and_bench(rows: dict[str, list[dict[str, object]]]) -> None:
    text = (ROOT / "benchmarks/results/README.md").read_text(encoding="utf-8")
    files = [path.name for path in (ROOT / "benchmarks/results").glob("*.jsonl")]
    assert not [name for name in files if f"`{name}`" not in text]
    benches = {str(row["bench"]) for of_file in rows.values() for row in of_file}
    assert not [name for name in benches if f"`{name}`" not in text]


def test_every_method_is_in_the_table_and_has_a_page() -> None:
    text = (ROOT / "docs/methods.md").read_text(encoding="utf-8")
    for method in METHODS.values():
        assert f"`{method.signature}`" in text, method.name
        page = ROOT / "docs" / method.page
        assert page.is_file(), method.page
        assert method.name in page.read_text(encoding="utf-8"), f"{method.page} does not name {method.name}"
        assert f"]({method.page})" in text


def test_every_counter_is_in_the_vllm_page() -> None:
    text = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")
    assert not [name for name in COUNTERS if f"| `{name}` |" not in text]


def test_comparison_searches_every_registered_method(rows: dict[str, list[dict[str, object]]]) -> None:
    tensors = {name: torch.zeros(1) for name in KNOWN | PLACEMENT}
    stats = Stats(ModelFacts("qwen3_moe", (0,), 64, 8, 160, ""), tensors)
    searches = sweeps(stats)
    for sweep in (sweep for of_label in searches.values() for sweep in of_label):
        sweep.policy(sweep.low)
        sweep.policy(sweep.high)
    allocated = {"spread", "price"}
    assert searches.keys() == {label for method in METHODS.values() for label in method.variants} - allocated
    compared = {str(row["method"]) for row in rows["quality"] if row["bench"] == "methods"}
    assert compared - {"native"} <= searches.keys()


def test_method_example_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/add-a-method.md").read_text(encoding="utf-8")
    code = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "@register" in block)
    (tmp_path / "printed_method.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    registered = set(METHODS)
    try:
        policy = importlib.import_module("printed_method").worst_row
        torch.manual_seed(0)
        batch = RouterSpec(32, 4)(torch.randn(8, 16), torch.randn(8, 32))
        stats = LayerStats({"predictor_weight": torch.randn(32, 16), "predictor_bias": torch.randn(32)})
        routing = policy(batch, stats)
        assert len(set(routing.ids.flatten().tolist())) == policy.budget
    finally:
        sys.modules.pop("printed_method", None)
        for name in set(METHODS) - registered:
            del METHODS[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_exist(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)[^)]*\)", text):
        assert (page.parent / link).exists(), link


def test_rows_of_two_gpus_change_the_table_of_ranks_alone(rows: dict[str, list[dict[str, object]]]) -> None:
    place = ("docs/vllm.md", "ranks-table")
    one = [row for row in rows["decode"] if row.get("tp", 1) == 1]
    two_gpus = {"tp": 2, "ep": 2, "max_fetched_per_rank": 7.89, "baseline_same_tokens": True}
    two_gpus |= {"spread": 0.021, "a_ms": 88.0}
    two = [{**row, **two_gpus, "tpot_ms": 77.77, "baseline_tpot_ms": 155.54} for row in one]
    before, after = (update_tables.blocks({**rows, "decode": decode}) for decode in (one, [*one, *two]))
    assert {key for key in before if before[key] != after[key]} == {place}
    assert before[place] == speed_tables.NONE_YET
    assert after[place].startswith(speed_tables.NONE_YET)  # no row has a budget per rank
    line = next(line for line in after[place].splitlines() if "qwen3-30b" in line and "M = 10 |" in line)
    for cell in ("EP = 2", "7.9", "77.77", "2.1", "2.00 (155.54 ms)", "yes"):
        assert f"| {cell} |" in line
    by_rank = {"policy": "base_ep:budget=8", "tpot_ms": 7.75, "baseline_tpot_ms": 9.25}
    each = [{**row, **two_gpus, **by_rank} for row in one]
    text = update_tables.blocks({**rows, "decode": [*one, *each]})[place]
    assert "over 2 GPUs with expert parallelism: a step takes 9.2 ms without the plugin, " in text
    assert " and 7.8 ms with 10 experts per rank.\n" in text


def test_generated_blocks_equal_the_rows(rows: dict[str, list[dict[str, object]]]) -> None:
    """`experiments/tables/update_tables.py` was run after the last row was added."""
    blocks = update_tables.blocks(rows)
    for (page, name), text in blocks.items():
        block = f"<!-- {name} -->\n\n{text}\n\n<!-- /{name} -->"
        assert block in (ROOT / page).read_text(encoding="utf-8"), f"{page}: {name}; run `make tables`"
    for page in PAGES:
        path = page.relative_to(ROOT).as_posix()
        names = re.findall(r"<!-- ([\w-]+) -->", page.read_text(encoding="utf-8"))
        unknown = {name for name in names if (path, name) not in blocks} - {"name"}
        assert not unknown, f"{path} has places that nothing writes: {unknown}"


def test_readme_table_has_native_routing_and_two_budgets(rows: dict[str, list[dict[str, object]]]) -> None:
    lines = update_tables.blocks(rows)["README.md", "speed"].splitlines()
    native, *budgets = [line for line in lines if line.startswith("| ")][2:]
    assert native.startswith("| native routing | 81.3 | 12.3 | 1.00 | 1.00 | measured with random routers")
    assert [line[:11] for line in budgets] == ["| budget 16", "| budget 10"]
    assert all("from 48.8 by the fitted line" in line for line in budgets)
