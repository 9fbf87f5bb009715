"""Allocation on a tiny model: measured losses, stored budgets, and the policies that read them."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebudget import attach, parse
from moebudget.calibrate.allocation import allocate
from moebudget.calibrate.allocation.measure import Trials
from moebudget.calibrate.allocation.run import checked, threshold
from moebudget.core.stats import Stats, StatsError, layer_budgets, load_stats
from moebudget.core.types import MissingStatisticError
from moebudget.evaluate import evaluate_text
from moebudget.methods.base import base
from tests.calibrate.fitted import built, usual_stats
from tests.engines.transformers import tiny

NAME = "qwen3_moe"
WINDOWS = tiny.prompts(6, 14, seed=5)
BATCH = 3
N = tiny.EXPERTS


@functools.cache
def allocated() -> Stats:
    return allocate(built(NAME), usual_stats(NAME), WINDOWS, averages=(2, 3), batch=BATCH, quiet=True)


def trials() -> Trials:
    return Trials(built(NAME), base(1, "geometric"), usual_stats(NAME), WINDOWS, batch=BATCH)


def test_joint_loss_equals_that_of_an_evaluation() -> None:
    (restricted, native) = trials().measure([[3, 3], [N, N]])
    results = evaluate_text(
        built(NAME),
        [parse("base:budget=3,fill=geometric"), parse("native")],
        usual_stats(NAME),
        WINDOWS,
        batch=BATCH,
        quiet=True,
    )
    for measured, result in zip((restricted, native), results, strict=True):
        torch.testing.assert_close(measured.loss, result.nll, rtol=0, atol=0)
        assert float(measured.fetched.mean()) == pytest.approx(result.counters.fetched)


def test_restricting_a_layer_leaves_the_others_native() -> None:
    (restricted, native) = trials().measure([[N, 2], [N, N]])
    assert restricted.fetched.tolist() == pytest.approx([float(native.fetched[0]), 2.0])
    assert not torch.equal(restricted.loss, native.loss)


def test_recorded_costs_cover_the_native_union_of_every_step() -> None:
    costs = trials().costs([3, N])
    steps = 2 * (WINDOWS.shape[1] - 2)
    assert [c.shape for c in costs] == [(steps, N)] * 2
    (native,) = trials().measure([[N, N]])
    assert float((costs[0] > -torch.inf).sum(-1).double().mean()) == pytest.approx(float(native.fetched[0]))


def test_threshold_is_exceeded_by_budget_experts_on_average() -> None:
    costs = torch.rand(50, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for m in (1, 4, 7):
        assert float((costs > threshold(costs, m)).sum(-1).double().mean()) == m


def test_stored_budgets_sum_to_the_average_and_are_used(tmp_path: Path) -> None:
    allocated().save(tmp_path / "stats.safetensors")
    stats = load_stats(tmp_path / "stats.safetensors")
    for average in (1, 2, 3):
        budgets = layer_budgets(stats, average)
        assert sum(budgets) == 2 * average
        (result,) = evaluate_text(
            built(NAME), [parse(f"spread:budget={average}")], stats, WINDOWS, batch=BATCH, quiet=True
        )
        assert result.counters.fetched <= average
        (measured,) = trials().measure([budgets])
        torch.testing.assert_close(result.nll, measured.loss, rtol=0, atol=0)
    assert layer_budgets(stats, N) == (N, N)


def test_refined_budgets_lose_no_more_than_equal_ones_on_the_fitted_text() -> None:
    for report in allocated().info["allocation"]["averages"].values():
        assert report["loss_over_native"] <= min(report["equal_loss"], report["one_layer_solution_loss"])


@pytest.mark.parametrize(
    ("top_k", "averages", "least"), [(8, (10, 4), 4), (8, (3,), 3), (1, (2,), 1), (5, (6,), 2)], ids=str
)
def test_default_least_budget_is_half_of_top_k(top_k: int, averages: tuple[int, ...], least: int) -> None:
    facts = replace(usual_stats(NAME).facts, top_k=top_k)
    assert checked(averages, facts, None) == (sorted(averages), least)
    assert allocated().info["allocation"]["least"] == tiny.TOP_K // 2


def test_price_fetches_the_average_it_was_set_to() -> None:
    for average in (2, 3):
        (result,) = evaluate_text(
            built(NAME), [parse(f"price:budget={average}")], allocated(), WINDOWS, batch=BATCH, quiet=True
        )
        recorded = allocated().info["allocation"]["averages"][str(average)]["price_fetches"]
        assert result.counters.fetched == pytest.approx(recorded, abs=0.001)
        assert abs(result.counters.fetched - average) < 0.25


@pytest.mark.parametrize("text", ["spread:budget=12", "price:budget=12", "spread:budget=40"])
def test_average_of_all_experts_keeps_native_routing(text: str) -> None:
    allocated_result, native = evaluate_text(
        built(NAME), [parse(text), parse("native")], allocated(), WINDOWS, batch=BATCH, quiet=True
    )
    assert torch.equal(allocated_result.nll, native.nll)


def test_average_changed_while_running_reads_its_budgets() -> None:
    model, stats = built(NAME), allocated()
    with attach(model, "spread:budget=2", stats) as run:
        run.set_budget(3)
        changed = tiny.generate(model, tiny.prompts(4, 5), 4)[1]
    with attach(model, "spread:budget=3", stats):
        wanted = tiny.generate(model, tiny.prompts(4, 5), 4)[1]
    assert torch.equal(changed, wanted)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"averages": ()}, r"averages=\[\] must be between 1 and the model's 12"),
        ({"averages": (0, 3)}, r"averages=\[0, 3\] must be between"),
        ({"averages": (13,)}, r"averages=\[13\] must be between"),
        ({"batch": 7}, "6 windows of text for a batch of 7: give more text or a smaller batch"),
        ({"rounds": -1}, "rounds=-1 must be at least 0"),
        ({"averages": (3, 5), "least": 4}, "least=4 experts per layer must be between 1 and the smallest average, 3"),
        ({"least": 0}, "least=0 experts per layer must be between 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        allocate(built(NAME), usual_stats(NAME), WINDOWS, **{"averages": (2,), "batch": BATCH, **settings})  # type: ignore[arg-type]


def test_missing_allocation_and_impossible_average_are_refused() -> None:
    with pytest.raises(MissingStatisticError, match=r"'layer_budget'.*moebudget allocate MODEL"):
        layer_budgets(usual_stats(NAME), 3)
    for average in (0, 13):
        with pytest.raises(ValueError, match=f"average={average} must be between 1 and the model's 12 experts"):
            layer_budgets(allocated(), average)


def test_allocation_with_a_wrong_number_of_layers_is_refused(tmp_path: Path) -> None:
    stats = allocated()
    wrong = Stats(stats.facts, {**stats.tensors, "layer_budget": stats.tensors["layer_budget"][:1]})
    wrong.save(tmp_path / "wrong.safetensors")
    with pytest.raises(StatsError, match=r"layer_budget has shape \(1, 12\)"):
        load_stats(tmp_path / "wrong.safetensors")
