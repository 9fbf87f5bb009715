"""Coverage of paired intervals, verdicts in words, and the noise of the batch composition."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from moebudget import parse
from moebudget.core.counters import COUNTERS, Counters
from moebudget.evaluate import evaluate, evaluate_tasks, evaluate_text
from moebudget.evaluate.noise import band, other_order, task_noise, text_noise
from moebudget.evaluate.paired import TASKS, TEXT, Paired, item_weights, paired, paired_hits, verdict
from moebudget.evaluate.tasks import TaskResult
from moebudget.evaluate.verdicts import verdict_table
from tests.calibrate.fitted import built, usual_stats
from tests.engines.transformers import tiny
from tests.evaluate.test_tasks import Letters, questions

NAME = "qwen3_moe"
WINDOWS = tiny.prompts(32, 9, seed=6)


def random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_interval_covers_the_true_mean() -> None:
    hits = 0
    for seed in range(120):
        gap = paired(0.3 + torch.randn(48, generator=random(seed)))
        hits += gap.low <= 0.3 <= gap.high
    assert 0.89 <= hits / 120 <= 0.99
    assert gap.half == pytest.approx(1.96 * 48**-0.5, rel=0.25)


def test_interval_covers_rare_changes_of_answers() -> None:
    """One answer in a hundred is lost, none won. Without the added items, the interval is often a point at 0."""
    inside = 0
    for seed in range(80):
        lost = torch.rand(120, generator=random(seed)) < 0.01
        gap = paired_hits(~lost, torch.ones(120, dtype=torch.bool), ["a"] * 120)
        inside += gap.low <= 1.0 <= gap.high
    assert inside / 80 >= 0.95


@pytest.mark.parametrize("n", [50, 400])
def test_interval_without_changed_answers_is_not_empty(n: int) -> None:
    """The exact bound for 0 of n is 1 - 0.025^(1/n)."""
    same = torch.ones(n, dtype=torch.bool)
    gap = paired_hits(same, same, ["a"] * n)
    assert gap.mean == 0
    assert 0.6 * 100 * (1 - 0.025 ** (1 / n)) <= gap.high <= 100 * (1 - 0.025 ** (1 / n))


def test_tasks_weigh_the_same() -> None:
    tasks = ["a"] * 6 + ["b"] * 2
    native, hits = torch.tensor([1] * 8).bool(), torch.tensor([1, 1, 1, 0, 0, 0, 1, 0]).bool()
    counters = Counters(1, dict.fromkeys(COUNTERS, 1.0))
    accuracy = [TaskResult(parse("native"), h, tuple(tasks), counters).average for h in (native, hits)]
    assert paired_hits(hits, native, tasks).mean == pytest.approx(accuracy[0] - accuracy[1])
    assert item_weights(tasks).mean() == pytest.approx(1)


@pytest.mark.parametrize(
    ("gap", "scale", "says"),
    [
        (Paired(5.0, 1.0, 9.0, 50), TASKS, "no verdict on 50 items: at least 200 are needed"),
        (paired(torch.ones(29)), TEXT, "no verdict on 29 windows: at least 30 are needed"),
        (Paired(0.5, 0.4, 0.6, 48), TEXT, "loses 0.500 ± 0.100 nats"),
        (Paired(-2.0, -3.0, -1.0, 300), TASKS, "gains 2.0 ± 1.0 points"),
        (Paired(0.4, -1.0, 2.0, 300), TASKS, "no loss found: at most 2.0 points at 95 %"),
        (Paired(1.0, -4.0, 6.0, 300), TASKS, "cannot tell: up to 6.0 points; 840 items would tell"),
        (Paired(2.9, -0.1, 5.9, 300), TASKS, "cannot tell: up to 5.9 points; 600 items would tell"),
    ],
)
def test_verdict_in_words(gap: Paired, scale: Any, says: str) -> None:
    assert verdict(gap, scale) == says


def test_other_order_separates_batch_mates() -> None:
    order = other_order(48, 8)
    assert order is not None
    assert sorted(order.tolist()) == list(range(48))
    for batch in order.split(8):
        assert max(torch.bincount(batch // 8).tolist()) <= 2
    assert other_order(40, 40) is None
    assert other_order(29, 4) is None


def test_band_equals_known_noise() -> None:
    before, after = (torch.randn(4000, generator=random(s)) * 0.2 for s in (1, 2))
    assert band(before, after, 100) == pytest.approx(1.96 * 0.2 / 10, rel=0.05)


def test_only_policies_that_read_the_batch_have_noise() -> None:
    model, stats = built(NAME), usual_stats(NAME)
    policies = [parse(p) for p in ("native", "topk:k=1", "base:budget=2")]
    results = evaluate_text(model, policies, stats, WINDOWS, batch=4, quiet=True)
    native, by_row, by_batch = text_noise(model, results, stats, WINDOWS, batch=4, prefill=1, quiet=True)
    assert native == 0
    assert by_row == pytest.approx(0, abs=1e-6)
    assert by_batch is not None
    assert by_batch > 1e-4
    assert text_noise(model, results, stats, WINDOWS[:4], batch=4, prefill=1, quiet=True) == [0, None, None]
    items, _ = questions(NAME, (1, 2, 3, 1, 2, 3) * 6)
    answered = evaluate_tasks(model, policies, stats, items, Letters(), batch=2, quiet=True)
    noise = task_noise(model, answered, stats, items, Letters(), batch=2, start_id=None, quiet=True)
    assert noise[0] == noise[1] == 0
    assert noise[2] is not None


def test_gaps_quarters_and_batching_equal_those_of_the_parts() -> None:
    model, stats, policies = built(NAME), usual_stats(NAME), [parse("native"), parse("base:budget=2")]
    items, _ = questions(NAME, (1, 2, 3, 1))
    options: dict[str, Any] = {
        "items": items,
        "tokenizer": Letters(),
        "batch": 4,
        "retained_windows": 0,
        "quiet": True,
    }
    native, budgeted = evaluate(model, policies, stats, WINDOWS, noise=True, **options)
    text = evaluate_text(model, policies, stats, WINDOWS, batch=4, quiet=True)
    assert budgeted.loss_gap == paired(text[1].nll - text[0].nll)
    assert budgeted.loss_gap is not None
    assert (budgeted.loss_gap.mean, budgeted.loss_gap.n) == (pytest.approx(budgeted.delta), 32)
    assert sum(budgeted.by_quarter) / 4 == pytest.approx(budgeted.agreement, rel=0.1)
    assert budgeted.task_gap is not None
    assert budgeted.task_gap.mean == pytest.approx((native.task_avg or 0) - (budgeted.task_avg or 0))
    assert (native.loss_gap, native.task_gap, budgeted.batching) == (None, None, "constant")
    row = budgeted.as_row("tiny")
    assert row["verdict"] == verdict(budgeted.loss_gap, TEXT)
    assert row["task_verdict"] == "no verdict on 4 items: at least 200 are needed"
    assert row["retained_energy"] is None
    _, drained = evaluate(model, policies, stats, WINDOWS[:8], refill=False, **{**options, "batch": 3})
    row = drained.as_row("tiny")
    assert (row["batching"], row["nll_delta_low"], row["nll_n"]) == ("draining", None, 8)
    assert row["nll_delta"] == pytest.approx(drained.delta, abs=1e-5)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(verdict_table([native, budgeted]))
    shown = console.export_text()
    assert f"[{budgeted.loss_gap.low:+.3f}, {budgeted.loss_gap.high:+.3f}]" in shown
    assert "constant batch" in shown
    assert "[low, high]" in shown


def test_agreement_by_position_averages_to_the_agreement() -> None:
    _, budgeted = evaluate_text(
        built(NAME), [parse("native"), parse("base:budget=2")], usual_stats(NAME), WINDOWS, batch=4, quiet=True
    )
    assert budgeted.by_position.shape == (WINDOWS.shape[1] - 2,)
    assert budgeted.by_position.mean() == pytest.approx(float(budgeted.agreement.mean()))
    assert ((budgeted.by_position * len(WINDOWS)).round() / len(WINDOWS)).tolist() == pytest.approx(
        budgeted.by_position.tolist()
    )
