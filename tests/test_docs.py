"""What README and docs tell people to type must exist."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
import typer.main

from moebudget.cli import app
from moebudget.presets import PRESETS, parse
from moebudget.router import RouterSpec
from moebudget.types import LayerStats

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            joined = block.replace("\\\n", " ")
            found += [(page.name, line.split("#")[0]) for line in joined.splitlines() if line.startswith("moebudget ")]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_documented_command_has_these_options(page: str, line: str) -> None:
    words = line.split()
    group = typer.main.get_command(app)
    command = group.commands[words[1]]  # type: ignore[attr-defined]
    if hasattr(command, "commands"):
        command = command.commands[words[2]]
    known = {name for parameter in command.params for name in parameter.opts}
    used = {word for word in words if word.startswith("-")}
    assert used <= known, f"{page}: {used - known}"
    for policy in re.findall(r"--policy (\S+)", line):
        parse(policy)


def test_every_preset_stands_in_readme_and_methods() -> None:
    for page in (ROOT / "README.md", ROOT / "docs/methods.md"):
        text = page.read_text(encoding="utf-8")
        missing = [name for name in PRESETS if f"`{name}" not in text and name != "dense"]
        assert not missing, f"{page.name}: {missing}"


def test_method_example_runs_as_printed() -> None:
    page = (ROOT / "docs/add-a-method.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "add-a-method.md", "exec"), names)
    policy = names["worst_row"]
    torch.manual_seed(0)
    batch = RouterSpec(32, 4)(torch.randn(8, 16), torch.randn(8, 32))
    stats = LayerStats({"predictor_weight": torch.randn(32, 16), "predictor_bias": torch.randn(32)})
    routing = policy(batch, stats)  # type: ignore[operator]
    assert len(set(routing.ids.flatten().tolist())) == 10


def test_relative_links_of_the_readme_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def test_rows_of_two_gpus_change_the_tables_of_one() -> None:
    script = runpy.run_path(str(ROOT / "scripts/update_tables.py"))
    quality, analysis, routing, decode, checks = (
        script["rows_of"](name) for name in ("quality", "analysis", "routing", "decode", "vllm_check")
    )
    place = ("docs/vllm.md", "ranks-table")
    one = [row for row in decode if row.get("tp", 1) == 1]
    own = {"tp": 2, "ep": 2, "max_fetched_per_rank": 7.89, "off_same_tokens": True, "spread": 0.021, "a_ms": 88.0}
    two = [{**row, **own, "tpot_ms": 77.77, "off_tpot_ms": 155.54} for row in one]
    before, after = (script["blocks"](quality, analysis, routing, rows, checks) for rows in (one, [*one, *two]))
    assert {key for key in before if before[key] != after[key]} == {place}
    assert "No rows yet" in before[place]
    assert "No rows yet" in before["README.md", "ranks"]
    line = next(line for line in after[place].splitlines() if "qwen3-30b" in line and "M = 10 |" in line)
    for cell in ("EP = 2", "7.9", "77.77", "2.1", "2.00 (155.54 ms)", "yes"):
        assert f"| {cell} |" in line
    each = [{**row, **own, "policy": "base_ep:budget=8", "tpot_ms": 7.75, "off_tpot_ms": 9.25} for row in one]
    changed = script["blocks"](quality, analysis, routing, [*one, *each], checks)
    assert "2 of these GPUs with expert parallelism: 9.2 ms without the plugin, " in changed["README.md", "ranks"]
    assert " and 7.8 at 10 experts on each ([ranks]" in changed["README.md", "ranks"]


def test_tables_say_what_the_rows_say() -> None:
    """`scripts/update_tables.py` was run after the last benchmark row was added."""
    script = runpy.run_path(str(ROOT / "scripts/update_tables.py"))
    rows = (script["rows_of"](name) for name in ("quality", "analysis", "routing", "decode", "vllm_check"))
    for (page, name), text in script["blocks"](*rows).items():
        assert text in (ROOT / page).read_text(encoding="utf-8"), name
    for (page, name), text in script["offload_tables"].blocks(script["rows_of"]("offload")).items():
        assert text in (ROOT / page).read_text(encoding="utf-8"), name
    quality = script["quality_table"](script["newest"](script["rows_of"]("quality")))
    assert quality in (ROOT / "README.md").read_text(encoding="utf-8")
    assert script["contrast"](script["rows_of"]("quality")) in (ROOT / "README.md").read_text(encoding="utf-8")
    calibration = script["calibration_table"](script["rows_of"]("calibration"))
    assert calibration in (ROOT / "docs/calibration.md").read_text(encoding="utf-8")
