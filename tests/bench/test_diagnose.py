"""Estimates against published sizes, verdicts on made-up machines, and the command from end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moebudget.bench.diagnose import run
from moebudget.bench.diagnose.roofline import Roofline, roofline
from moebudget.bench.diagnose.run import estimate, measure
from moebudget.bench.diagnose.verdict import judge, window
from moebudget.bench.line import fit
from moebudget.bench.sizes import SIZES, read_config
from moebudget.cli import app

DEMO = Path(__file__).resolve().parents[2] / "src/moebudget/demo"
PARAMETERS = {"qwen3-30b": 30.53e9, "qwen1.5-moe": 14.32e9, "deepseek-v2-lite": 15.71e9}  # of the published models
SHAPE = Roofline(layers=10, experts=128, top_k=8, expert_bytes=10**7, other_bytes=10**9, cache_bytes=10**5)
PRICE = 0.1  # ms per expert at 1,000 GB/s


@pytest.mark.parametrize("name", SIZES)
def test_bytes_are_those_of_the_published_model(name: str) -> None:
    config, shape = SIZES[name], roofline(SIZES[name])
    embedding = 2 * config["vocab_size"] * config["hidden_size"]
    total = shape.other_bytes + shape.layers * shape.experts * shape.expert_bytes + embedding
    assert total / 2 == pytest.approx(PARAMETERS[name], rel=0.01)


def test_union_of_equal_loads_and_step_time_follow_their_formulas() -> None:
    assert SHAPE.union(1) == pytest.approx(8)
    assert SHAPE.union(16) == pytest.approx(128 * (1 - (120 / 128) ** 16))
    assert SHAPE.step_ms(10, 2, 5, 1000) == pytest.approx((10**9 + 10 * 10 * 10**7 + 10 * 10**5) / 1e9)


def machine(a: float, b: float, noise: float = 0.0) -> list[tuple[float, float]]:
    """Step times of a machine on which an expert costs b."""
    wobble = (1, -1, -1, 1, 1, -1, 1)
    return [(float(x), a + b * x + noise * w) for x, w in zip((80, 64, 48, 32, 16, 10, 8), wobble, strict=True)]


@pytest.mark.parametrize(
    ("times", "batch", "union", "budget", "answer", "says"),
    [
        (
            machine(2, PRICE),
            16,
            80,
            16,
            "will help",
            r"16 instead of 80.0 experts per layer .* 2.78 ± 0.00 times faster",
        ),
        (machine(2, PRICE, 0.1), 16, 80, 16, "will help", r"2\.\d\d ± 0\.[1-9]"),
        (machine(5, 0.0), 16, 80, 16, "will not help", "bound by something else"),
        (machine(5, 0.0, 0.01), 16, 80, 16, "will not help", "bound by something else"),
        (machine(5, PRICE / 5), 16, 80, 16, "will not help", "bound by something else"),
        (machine(5, PRICE, 9.0), 16, 80, 16, "cannot tell", "scatter too much"),
        (machine(900, PRICE), 16, 80, 16, "will not help", "do not depend on experts: at most 1.01 times"),
        (machine(900, PRICE), 16, 80, 16, "will not help", "no budget helps"),
        (machine(100, PRICE), 16, 80, 76, "will not help", "a budget of at most 28 would be 1.05 times faster"),
        (machine(2, PRICE), 16, 80, 16, "will help", "with budgets up to 75 at least 1.05 times"),
        (machine(400, 0.05, 3.0), 16, 80, 60, "will not help", "no measurable difference, at most 1.0. times"),
        (machine(2, PRICE), 16, 8.2, 4, "will not help", "hardly more than the 8 .* no budget helps"),
        (machine(2, PRICE), 1, 8, 4, "will not help", "one row fetches only its 8"),
        (machine(2, PRICE), 16, 15, 16, "will not help", "the budget of 16 does not limit"),
        (
            machine(2, PRICE),
            256,
            128,
            16,
            "will not help",
            "the batch is too large: .* 16 times .* a budget of 16 keeps 12%",
        ),
        (machine(2, PRICE), 256, 128, 96, "will help", "96 instead of 128.0 experts per layer"),
        (machine(900, PRICE), 256, 128, 16, "will not help", "do not depend on experts"),
        (machine(9000, 0, 30), 16, 80, 16, "will not help", "no measurable difference, at most 1.00 times"),
    ],
)
def test_verdict_follows_from_the_line_and_the_shape(
    times: list[tuple[float, float]], batch: int, union: float, budget: int, answer: str, says: str
) -> None:
    verdict = judge(fit(times), SHAPE, batch=batch, union=union, budget=budget, gb_s=1000)
    assert verdict.answer == answer
    assert re.search(says, verdict.reason), verdict.reason


@pytest.mark.parametrize(("a", "b", "union"), [(2, 0.1, 80), (100, 0.1, 80), (900, 0.1, 80), (1, 0.5, 30)])
def test_window_equals_the_largest_budget_that_helps(a: float, b: float, union: float) -> None:
    helps = [m for m in range(1, int(union)) if (a + b * union) / (a + b * m) >= 1.05]
    assert window(fit(machine(a, b)), union) == max(helps, default=None)


def test_interval_of_the_slope_is_that_of_regression() -> None:
    """Compared with the textbook formula."""
    points = machine(2, 0.1, 0.3)
    line, n = fit(points), len(points)
    x_mean = sum(x for x, _ in points) / n
    rest = sum((y - line.a - line.b * x) ** 2 for x, y in points)
    error = (rest / (n - 2) / sum((x - x_mean) ** 2 for x, _ in points)) ** 0.5
    assert line.b_half == pytest.approx(2.571 * error)
    assert line.at(x_mean, 5.0) == pytest.approx(line.at(x_mean))
    for wrong in (points[:3], [(8.0, 1.0)] * 5):
        with pytest.raises(ValueError, match="at least 4 points"):
            fit(wrong)


def test_estimate_says_that_it_is_not_a_measurement() -> None:
    row = estimate(SIZES["qwen3-30b"], batch=16, budget=16, union=48.8, context=0, gpu="H200", bandwidth=None)
    assert (row["answer"], "not a measurement" in row["title"]) == ("cannot tell", True)
    assert row["price_ms"] == pytest.approx(48 * 3 * 2048 * 768 * 2 / 4800e6)
    assert [p[0] for p in row["points"]] == sorted({48.8, 48.0, 32.0, 16.0, 8.0}, reverse=True)


class ConstantEngine:
    """Replaces an engine; its step time is constant."""

    def __call__(
        self, model: str, config: dict[str, Any], budgets: dict[int, list[int]], **_: Any
    ) -> dict[int, tuple[list[tuple[float, float]], float]]:
        self.call = (model, config, budgets)
        return {
            batch: ([(min(b, 80.0), 5.0 + 0.001 * (i % 2)) for i, b in enumerate(marks)], 80.0)
            for batch, marks in budgets.items()
        }


def test_budget_does_not_help_an_engine_with_constant_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ConstantEngine()
    monkeypatch.setattr(run, "_vllm", engine)
    monkeypatch.setattr(run, "copy_bandwidth", lambda _: 4800.0)
    single, row = measure("m", SIZES["qwen3-30b"], "vllm", batches=[1, 16], budget=10, device="cpu")
    assert (row["answer"], row["union"], row["B"]) == ("will not help", 80.0, 16)
    assert row["b_over_price"] == pytest.approx(row["b_ms"] / (48 * 3 * 2048 * 768 * 2 / 4800e6))
    assert {128, 10} <= set(engine.call[2][16])
    assert engine.call[2][1] == [128, 10, 4, 3, 2, 1]  # some below the 8 routes of one row, which a line needs
    assert (single["B"], single["answer"]) == (1, "will not help")
    with pytest.raises(ValueError, match="union=48 belongs to one batch size, but there are 2"):
        measure("m", SIZES["qwen3-30b"], "vllm", batches=[1, 16], budget=10, union=48)


def test_no_engine_starts_if_the_verdict_follows_from_the_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_vllm", None)
    [early] = measure("m", SIZES["qwen3-30b"], "vllm", batches=[1], budget=10, device="cpu")
    assert (early["answer"], early["points"]) == ("will not help", [])


def test_model_larger_than_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory holds half of the 61 GB of weights; the error comes before vLLM is imported."""
    pages = {"SC_PHYS_PAGES": 3_000_000, "SC_PAGE_SIZE": 10_000}
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    monkeypatch.setattr(run, "copy_bandwidth", lambda _: 4800.0)
    with pytest.raises(MemoryError, match=r"qwen3-30b in bf16 does not fit: its weights take 60\.\d GB, cpu has 30.0"):
        measure("qwen3-30b", SIZES["qwen3-30b"], "vllm", batches=[16], budget=10, device="cpu")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothere"], "is not a folder with a config.json"),
        (["qwen3-30b"], "needs a memory bandwidth"),
        (["qwen3-30b", "--gpu", "H20"], "did you mean 'H200'"),
        (["qwen3-30b", "--bandwidth", "-1"], "must be above 0"),
        (["qwen3-30b", "--engine", "tgi"], "unknown engine 'tgi'"),
        (["qwen3-30b", "--engine", "hf"], "needs a text"),
        (["qwen3-30b", "--engine", "vllm", "--vllm", "{"], "is not JSON"),
        (["qwen3-30b", "--engine", "vllm", "--vllm", "[1]"], "must be an object"),
    ],
)
def test_wrong_option_is_refused(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["diagnose", *arguments])
    assert says in str(result.exception)


def test_config_without_experts_is_refused(tmp_path: Path) -> None:
    Path(tmp_path, "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="has no number of experts"):
        roofline(read_config(str(tmp_path)))


def test_demo_model_is_timed_at_several_batch_sizes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = ["--budget", "10", "--batch", "4", "--batch", "2", "--steps", "2"]
    result = CliRunner().invoke(app, ["diagnose", "demo", *options, "--results", str(rows)])
    assert result.exception is None, result.output
    row, second = map(json.loads, rows.read_text().splitlines())
    assert (row["B"], second["B"]) == (4, 2)
    assert row["answer"] in result.output
    assert (row["model"], row["engine"]) == ("moebudget-demo-8m", "hf")
    fetched = {budget: x for budget, (x, _, _) in zip((64, 16, 12, 10, 8, 4, 2), row["points"], strict=True)}
    assert fetched[4] == 4
    assert fetched[8] == pytest.approx(8)
    assert fetched[64] == pytest.approx(row["native_union"])
    assert all(ms > 0 for _, ms, _ in row["points"])
