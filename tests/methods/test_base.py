from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moebudget.core.policy import Policy, Score
from moebudget.core.types import NO_STATS, LayerStats, MissingStatisticError
from moebudget.methods.base import NonlinearEnergy, PredictedEnergy, SquaredWeight, StaticEnergy, TrueEnergy, UnionSize
from moebudget.methods.common import RouteRank, RouterMass
from moebudget.methods.devices import CostInvariant
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import parse
from tests.conftest import HIDDEN, make_problem, over_kinds, problems
from tests.methods import reference, reference_published
from tests.methods.steps import (
    cost_of,
    loads,
    members,
    sized,
    step_of,
    union_of,
    with_stats,
)

SCORES: dict[str, Score] = {
    "router_mass": RouterMass(),
    "squared": SquaredWeight(),
    "static": StaticEnergy(),
    "base": PredictedEnergy(),
    "nonlinear": NonlinearEnergy(),
    "oracle": TrueEnergy(),
}
over_scores = pytest.mark.parametrize("name", SCORES)


@over_kinds
@over_scores
def test_demand_agrees_with_the_specification(name: str, kind: str) -> None:
    for problem in problems(kind):
        scores = SCORES[name](problem.batch, problem.stats)
        n = problem.spec.num_experts
        wanted = reference.demand(problem.reference, n, cost_of(name, problem))
        assert scores.shape == (problem.rows, n)
        assert scores.dtype is torch.float32
        assert scores.sum(0).tolist() == pytest.approx(wanted, rel=1e-5), problem.shape


@over_kinds
@over_scores
def test_only_native_routes_score_above_zero(name: str, kind: str) -> None:
    for problem in problems(kind):
        scores = SCORES[name](problem.batch, problem.stats)
        positive = [set(row.nonzero()[:, 0].tolist()) for row in scores]
        assert positive == [set(row.ids) for row in problem.reference], problem.shape


@pytest.mark.parametrize("k0", [1, 2, 3, 9])
def test_rank_score_marks_the_first_routes(k0: int) -> None:
    problem = make_problem("sigmoid_bias", 5, 8, 3)
    scores = RouteRank(k0)(problem.batch, NO_STATS)
    for row, own in zip(scores.tolist(), problem.reference, strict=True):
        assert row == [float(u in own.ids[:k0]) for u in range(8)]


def test_predicted_energy_ignores_the_length_of_the_hidden_state() -> None:
    problem = make_problem("softmax_renorm", 5, 8, 2)
    longer = dataclasses.replace(problem.batch, hidden=problem.hidden * 1000)
    torch.testing.assert_close(
        PredictedEnergy()(longer, problem.stats), PredictedEnergy()(problem.batch, problem.stats), rtol=1e-4, atol=0
    )


def test_hidden_state_of_zeros_has_the_bias_as_its_log_energy() -> None:
    problem = make_problem("softmax_renorm", 1, 8, 2)
    scores = PredictedEnergy()(dataclasses.replace(problem.batch, hidden=torch.zeros(1, HIDDEN)), problem.stats)
    for expert, weight in problem.reference[0].routes:
        bias = problem.stats["predictor_bias"][expert].item()
        assert scores[0, expert].item() == pytest.approx(weight**2 * math.exp(bias), rel=1e-5)


@over_scores
def test_bfloat16_statistics_make_float32_scores(name: str) -> None:
    problem = make_problem("softmax_renorm", 5, 8, 2)
    half = LayerStats({key: tensor.bfloat16() for key, tensor in problem.stats.items()})
    exact = LayerStats({key: tensor.float() for key, tensor in half.items()})
    scores = SCORES[name](problem.batch, half)
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores, SCORES[name](problem.batch, exact))


@over_scores
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1.0, 1e30])
def test_rows_that_do_not_vote_score_zero(name: str, garbage: Any) -> None:
    problem = make_problem("softmax_renorm", 3, 8, 2)
    batch = problem.batch
    parts = {key: getattr(batch, key).clone() for key in ("hidden", "weights", "energy", "probs")}
    for part in parts.values():
        part[1] = garbage
    dead = dataclasses.replace(batch, kind=torch.tensor([True, False, True]), **parts)
    scores = SCORES[name](dead, problem.stats)
    assert not scores[1].any()
    kept = torch.tensor([0, 2])
    assert torch.equal(scores[kept], SCORES[name](batch, problem.stats)[kept])


@over_scores
def test_scores_read_exactly_the_statistics_they_need(name: str) -> None:
    problem = make_problem("softmax", 2, 8, 2)
    rule = SCORES[name]
    only = LayerStats({key: problem.stats[key] for key in rule.needs})
    assert torch.equal(rule(problem.batch, only), rule(problem.batch, problem.stats))
    for needed in rule.needs:
        short = LayerStats({key: tensor for key, tensor in only.items() if key != needed})
        with pytest.raises(MissingStatisticError, match=f"{needed!r}.*moebudget calibrate"):
            rule(problem.batch, short)


def test_oracle_without_energies_is_refused() -> None:
    batch = dataclasses.replace(make_problem("softmax", 2, 8, 2).batch, energy=None)
    assert [name for name, rule in SCORES.items() if rule.needs_energy] == ["oracle"]
    with pytest.raises(ValueError, match=r"oracle.*energies.*base\(budget=\.\.\.\)"):
        TrueEnergy()(batch, NO_STATS)


@pytest.mark.parametrize("name", ["energy_mean", "other"])
def test_asking_whether_a_statistic_is_there_raises_nothing(name: str) -> None:
    stats = LayerStats({"energy_mean": torch.ones(2)})
    assert (name in stats) == (name == "energy_mean")
    assert name not in NO_STATS


def test_statistics_move_to_another_device() -> None:
    stats = make_problem("softmax", 1, 8, 2).stats
    moved = stats.to("meta")
    assert set(moved) == set(stats)
    assert len(moved) == len(stats) > 3
    assert all(tensor.device.type == "meta" for tensor in moved.values())


@over_kinds
def test_selection_ablation_has_the_size_of_the_first_routes(kind: str) -> None:
    """BASE's table 2: every score gets as many experts as the top-1 union has."""
    for problem in sized(kind):
        policy = Policy(RouterMass(), UnionSize(), Backfill())
        kept = members(policy, problem)
        total = reference_published.weight_sums(step_of(problem))
        assert kept == reference_published.best_of_union(step_of(problem), total, len(union_of(problem, 1)))


@over_kinds
def test_every_device_fetches_its_budget_if_it_can(kind: str) -> None:
    for seed in range(6):
        problem = make_problem(kind, 8, 64, 8, seed=seed)
        for budget in (1, 3, 64):
            policy = parse(f"base_ep:budget={budget}")
            native = loads(union_of(problem), problem)
            wanted = [min(budget, load) for load in native]
            assert loads(members(policy, problem), problem) == wanted
            at_run_time = parse("base_ep:budget=9").with_budget(torch.tensor(budget))
            assert members(at_run_time, problem) == members(policy, problem)


@pytest.mark.parametrize("text", ["base:budget=6", "price:budget=6", "spread:budget=6", "base:budget=9,relative=1"])
@over_kinds
def test_leveling_is_caees_with_the_scores_of_the_policy(text: str, kind: str) -> None:
    """Against `CostInvariant`, whose loop goes from expert to expert, at a cost of 1 each."""
    for seed in range(4):
        problem = make_problem(kind, 8, 64, 8, seed=seed)
        problem = with_stats(problem, placement_cost=torch.ones(64))
        policy, leveled = parse(text), parse(f"{text},level=yes")
        must = members(policy, problem)
        looped = dataclasses.replace(policy, select=CostInvariant(policy.select))
        found = members(leveled, problem)
        assert found == members(looped, problem)
        assert max(loads(found, problem)) == max(loads(must, problem))
        assert must < found
        assert leveled.with_budget(6).name == f"{text},level=yes".replace("9", "6")
        assert members(leveled.with_budget(2), problem) == members(parse(leveled.with_budget(2).name), problem)
