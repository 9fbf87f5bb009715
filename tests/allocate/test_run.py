"""An allocation on a tiny model: what is measured, what is stored, and what the policies make of it."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moebudget import attach, parse
from moebudget.allocate import allocate
from moebudget.allocate.measure import Trials
from moebudget.allocate.run import checked, threshold
from moebudget.evaluate import evaluate_text
from moebudget.presets import base
from moebudget.stats import Stats, StatsError, layer_budgets, load_stats
from moebudget.types import MissingStatisticError
from tests.calibrate.fitted import built, usual_stats
from tests.integrations import tiny

NAME = "qwen3_moe"
WINDOWS = tiny.prompts(6, 14, seed=5)
BATCH = 3
N = tiny.EXPERTS


@functools.cache
def allocated() -> Stats:
    return allocate(built(NAME), usual_stats(NAME), WINDOWS, averages=(2, 3), batch=BATCH, quiet=True)


def trials() -> Trials:
    return Trials(built(NAME), base(1, "half"), usual_stats(NAME), WINDOWS, batch=BATCH)


def test_joint_loss_differs_from_that_of_an_evaluation() -> None:
    (found, free) = trials().measure([[3, 3], [N, N]])
    results = evaluate_text(
        built(NAME),
        [parse("base:budget=3,fill=half"), parse("dense")],
        usual_stats(NAME),
        WINDOWS,
        batch=BATCH,
        quiet=True,
    )
    for measured, result in zip((found, free), results, strict=True):
        torch.testing.assert_close(measured.loss, result.nll, rtol=0, atol=0)
        assert float(measured.fetched.mean()) == pytest.approx(result.counters.fetched)


def test_restricting_one_layer_restricts_another() -> None:
    (found, free) = trials().measure([[N, 2], [N, N]])
    assert found.fetched.tolist() == pytest.approx([float(free.fetched[0]), 2.0])
    assert not torch.equal(found.loss, free.loss)


def test_recorded_costs_are_not_those_the_set_was_chosen_by() -> None:
    costs = trials().costs([3, N])
    steps = 2 * (WINDOWS.shape[1] - 2)
    assert [c.shape for c in costs] == [(steps, N)] * 2
    (free,) = trials().measure([[N, N]])
    assert float((costs[0] > -torch.inf).sum(-1).double().mean()) == pytest.approx(float(free.fetched[0]))


def test_threshold_is_exceeded_by_other_than_the_budget() -> None:
    costs = torch.rand(50, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for m in (1, 4, 7):
        assert float((costs > threshold(costs, m)).sum(-1).double().mean()) == m


def test_stored_budgets_sum_to_another_average_or_are_not_what_is_fetched(tmp_path: Path) -> None:
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


def test_refined_budgets_lose_more_than_equal_ones_where_they_were_measured() -> None:
    for report in allocated().info["allocation"]["averages"].values():
        assert report["loss_above_dense"] <= min(report["equal_loss"], report["one_layer_solution_loss"])


@pytest.mark.parametrize(
    ("top_k", "averages", "least"), [(8, (10, 4), 4), (8, (3,), 3), (1, (2,), 1), (5, (6,), 2)], ids=str
)
def test_layers_may_starve_unless_a_least_budget_is_asked_for(
    top_k: int, averages: tuple[int, ...], least: int
) -> None:
    facts = replace(usual_stats(NAME).facts, top_k=top_k)
    assert checked(averages, facts, None) == (sorted(averages), least)
    assert allocated().info["allocation"]["least"] == tiny.TOP_K // 2


def test_price_fetches_another_average_than_it_was_set_to() -> None:
    for average in (2, 3):
        (result,) = evaluate_text(
            built(NAME), [parse(f"price:budget={average}")], allocated(), WINDOWS, batch=BATCH, quiet=True
        )
        recorded = allocated().info["allocation"]["averages"][str(average)]["price_fetches"]
        assert result.counters.fetched == pytest.approx(recorded, abs=0.001)
        assert abs(result.counters.fetched - average) < 0.25


@pytest.mark.parametrize("text", ["spread:budget=12", "price:budget=12", "spread:budget=40"])
def test_average_of_all_experts_changes_the_model(text: str) -> None:
    changed, free = evaluate_text(
        built(NAME), [parse(text), parse("dense")], allocated(), WINDOWS, batch=BATCH, quiet=True
    )
    assert torch.equal(changed.nll, free.nll)


def test_average_changed_while_running_reads_the_old_budgets() -> None:
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
        ({"averages": ()}, r"averages=\[\] must lie between 1 and the model's 12"),
        ({"averages": (0, 3)}, r"averages=\[0, 3\] must lie between"),
        ({"averages": (13,)}, r"averages=\[13\] must lie between"),
        ({"batch": 7}, "6 windows of text for a batch of 7: give more text or a smaller batch"),
        ({"rounds": -1}, "rounds=-1 must be at least 0"),
        ({"averages": (3, 5), "least": 4}, "least=4 experts a layer must lie between 1 and the smallest average, 3"),
        ({"least": 0}, "least=0 experts a layer must lie between 1"),
    ],
)
def test_impossible_setting_is_measured(settings: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        allocate(built(NAME), usual_stats(NAME), WINDOWS, **{"averages": (2,), "batch": BATCH, **settings})  # type: ignore[arg-type]


def test_budgets_without_an_allocation_or_of_an_impossible_average_are_read() -> None:
    with pytest.raises(MissingStatisticError, match=r"'layer_budget'.*moebudget allocate MODEL"):
        layer_budgets(usual_stats(NAME), 3)
    for average in (0, 13):
        with pytest.raises(ValueError, match=f"average={average} must lie between 1 and the model's 12 experts"):
            layer_budgets(allocated(), average)


def test_allocation_of_another_number_of_layers_is_loaded(tmp_path: Path) -> None:
    stats = allocated()
    wrong = Stats(stats.facts, {**stats.tensors, "layer_budget": stats.tensors["layer_budget"][:1]})
    wrong.save(tmp_path / "wrong.safetensors")
    with pytest.raises(StatsError, match=r"layer_budget has shape \(1, 12\)"):
        load_stats(tmp_path / "wrong.safetensors")
