"""The examples run as they are, and a method from outside the package goes everywhere that the package's own go."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moebudget import attach, parse
from moebudget.cli import main
from moebudget.core.counters import Counter
from moebudget.core.router import RouterSpec
from moebudget.core.types import NO_STATS, RowKind
from moebudget.demo.run import MODEL
from moebudget.engines.transformers.loading import load_model
from moebudget.engines.vllm.route import Step, make_router
from moebudget.kernels import NotFusedError, lower
from moebudget.methods import METHODS

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ("--windows", "64", "--length", "12", "--items", "0")


@pytest.fixture(scope="module")
def worst_row() -> Iterator[str]:
    """The name of the example's method, registered for these tests."""
    before = dict(METHODS)
    runpy.run_path(str(EXAMPLES / "new_method.py"))
    yield "worst_row"
    METHODS.clear()
    METHODS.update(before)


def example(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=EXAMPLES.parent, check=True)
    return done.stdout


def command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: Any) -> list[str]:
    """Run a command of moebudget in this process, where the method is registered -> its printed lines."""
    monkeypatch.setattr("sys.argv", ["moebudget", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    printed = capsys.readouterr()
    assert not end.value.code, printed.err
    return printed.out.splitlines()


def test_attach_example_runs_and_caps() -> None:
    lines = example("examples/attach.py", "--tokens", "4").splitlines()
    assert lines[0].startswith("native: ")
    assert lines[2] == "squared:budget=10: 10.0 experts fetched per layer per step"


def test_new_method_example_runs_by_itself() -> None:
    assert example("examples/new_method.py") == "worst_row:budget=10,routes=1: 10 of 26 experts fetched\n"


def test_outside_method_is_parsed_and_has_a_budget(worst_row: str) -> None:
    policy = parse(f"{worst_row}:budget=6,fill=drop")
    assert (policy.name, policy.budget) == ("worst_row:budget=6,fill=drop", 6)
    assert policy.with_budget(9) == parse("worst_row:budget=9,fill=drop")
    with pytest.raises(ValueError, match=r"^worst_row: budget=0 must be at least 1"):
        parse("worst_row:budget=0")
    with pytest.raises(NotFusedError, match="no kernel for the score WorstRow"):
        lower(policy)


def test_outside_method_attaches_to_a_model_and_changes_its_budget(worst_row: str) -> None:
    model, _ = load_model(str(MODEL), device="cpu", dtype="float32")
    prompts = torch.arange(48).view(8, 6) + 300
    with attach(model, f"{worst_row}:budget=9") as run:
        model.generate(prompts, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert run.counters.fetched == 9
        run.set_budget(5)
        run.reset()
        model.generate(prompts, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert run.counters.fetched == 5


def test_outside_method_is_evaluated_compared_and_tuned(
    worst_row: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows, out = tmp_path / "rows.jsonl", ("--out", tmp_path)
    command_line(
        monkeypatch, capsys, "eval", "demo", "--policy", f"{worst_row}:budget=7", "--no-noise", *SMALL,
        "--results", rows,
    )  # fmt: skip
    (row,) = (r for r in map(json.loads, rows.read_text().splitlines()) if r["policy"] != "native")
    assert (row["policy"], row["fetched"]) == ("worst_row:budget=7", 7.0)
    shown = command_line(
        monkeypatch, capsys, "compare", "demo", "--experts", 8, "--policies", f"{worst_row},squared", *SMALL, *out
    )
    assert any("worst_row:budget=8" in line for line in shown)
    answer = json.loads(
        command_line(monkeypatch, capsys, "tune", "demo", "--experts", 9, "--policies", worst_row, *SMALL, *out)[-1]
    )
    assert answer["policy"] == "worst_row:budget=9"
    assert "worst_row" in "".join(command_line(monkeypatch, capsys, "policies"))


def test_outside_method_runs_in_vllms_torch_path(worst_row: str) -> None:
    torch.manual_seed(0)
    spec, hidden, logits = RouterSpec(32, 4), torch.randn(8, 16), torch.randn(8, 32)
    native = spec(hidden, logits)
    kind = torch.tensor([RowKind.DECODE] * 5 + [RowKind.NATIVE] * 2 + [RowKind.PAD], dtype=torch.int8)
    policy = parse(f"{worst_row}:budget=6")
    router = make_router(policy, spec, NO_STATS, hidden=16, max_rows=8, device=torch.device("cpu"))
    step = Step(hidden, logits, native.ids, native.weights, kind, torch.arange(8), None)
    ids, weights = router(step)
    assert ids[:5].unique().numel() == 6
    assert torch.equal(ids[5:7], native.ids[5:7])
    assert torch.equal(weights[5:7], native.weights[5:7])
    assert set(ids[7].tolist()) <= set(ids[:5].flatten().tolist())
    router.set_budget(3)
    assert router(step)[0][:5].unique().numel() == 3
    assert router.totals[Counter.STEPS] == 2
    assert router.totals[Counter.FETCHED] == 9
