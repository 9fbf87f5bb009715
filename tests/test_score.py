from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moebudget.score import (
    NonlinearEnergy,
    PredictedEnergy,
    RouteRank,
    RouterMass,
    Score,
    SquaredWeight,
    StaticEnergy,
    TrueEnergy,
)
from moebudget.types import NO_STATS, LayerStats, MissingStatisticError
from tests import reference
from tests.conftest import HIDDEN, Problem, make_problem, over_kinds, problems

SCORES: dict[str, Score] = {
    "router_mass": RouterMass(),
    "squared": SquaredWeight(),
    "static": StaticEnergy(),
    "base": PredictedEnergy(),
    "nonlinear": NonlinearEnergy(),
    "oracle": TrueEnergy(),
}
over_scores = pytest.mark.parametrize("name", SCORES)


def cost_of(name: str, problem: Problem) -> reference.Cost:
    stats = problem.plain_stats
    return {
        "router_mass": reference.mass_cost,
        "squared": reference.squared_cost,
        "static": reference.static_cost(stats["energy_mean"]),
        "base": reference.base_cost(problem.hidden.tolist(), stats["predictor_weight"], stats["predictor_bias"]),
        "nonlinear": reference.nonlinear_cost(problem.hidden.tolist(), stats),
        "oracle": reference.oracle_cost(problem.energies.tolist()),
    }[name]


@over_kinds
@over_scores
def test_demand_differs_from_the_specification(name: str, kind: str) -> None:
    for problem in problems(kind):
        scores = SCORES[name](problem.batch, problem.stats)
        n = problem.spec.num_experts
        wanted = reference.demand(problem.reference, n, cost_of(name, problem))
        assert scores.shape == (problem.rows, n)
        assert scores.dtype is torch.float32
        assert scores.sum(0).tolist() == pytest.approx(wanted, rel=1e-5), problem.shape


@over_kinds
@over_scores
def test_expert_that_is_no_route_scores_above_zero(name: str, kind: str) -> None:
    for problem in problems(kind):
        scores = SCORES[name](problem.batch, problem.stats)
        positive = [set(row.nonzero()[:, 0].tolist()) for row in scores]
        assert positive == [set(row.ids) for row in problem.reference], problem.shape


@pytest.mark.parametrize("k0", [1, 2, 3, 9])
def test_rank_score_marks_other_than_the_first_routes(k0: int) -> None:
    problem = make_problem("sigmoid_bias", 5, 8, 3)
    scores = RouteRank(k0)(problem.batch, NO_STATS)
    for row, own in zip(scores.tolist(), problem.reference, strict=True):
        assert row == [float(u in own.ids[:k0]) for u in range(8)]


def test_predicted_energy_depends_on_the_length_of_the_hidden_state() -> None:
    problem = make_problem("softmax_renorm", 5, 8, 2)
    longer = dataclasses.replace(problem.batch, hidden=problem.hidden * 1000)
    torch.testing.assert_close(
        PredictedEnergy()(longer, problem.stats), PredictedEnergy()(problem.batch, problem.stats), rtol=1e-4, atol=0
    )


def test_hidden_state_of_zeros_has_no_finite_energy() -> None:
    problem = make_problem("softmax_renorm", 1, 8, 2)
    scores = PredictedEnergy()(dataclasses.replace(problem.batch, hidden=torch.zeros(1, HIDDEN)), problem.stats)
    for expert, weight in problem.reference[0].routes:
        bias = problem.stats["predictor_bias"][expert].item()
        assert scores[0, expert].item() == pytest.approx(weight**2 * math.exp(bias), rel=1e-5)


@over_scores
def test_statistics_in_bfloat16_make_a_bfloat16_score(name: str) -> None:
    problem = make_problem("softmax_renorm", 5, 8, 2)
    half = LayerStats({key: tensor.bfloat16() for key, tensor in problem.stats.items()})
    exact = LayerStats({key: tensor.float() for key, tensor in half.items()})
    scores = SCORES[name](problem.batch, half)
    assert scores.dtype is torch.float32
    torch.testing.assert_close(scores, SCORES[name](problem.batch, exact))


@over_scores
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1.0, 1e30])
def test_row_that_does_not_vote_scores(name: str, garbage: Any) -> None:
    problem = make_problem("softmax_renorm", 3, 8, 2)
    batch = problem.batch
    parts = {key: getattr(batch, key).clone() for key in ("hidden", "weights", "energy", "probs")}
    for part in parts.values():
        part[1] = garbage
    dead = dataclasses.replace(batch, live=torch.tensor([True, False, True]), **parts)
    scores = SCORES[name](dead, problem.stats)
    assert not scores[1].any()
    kept = torch.tensor([0, 2])
    assert torch.equal(scores[kept], SCORES[name](batch, problem.stats)[kept])


@over_scores
def test_score_reads_other_statistics_than_it_needs(name: str) -> None:
    problem = make_problem("softmax", 2, 8, 2)
    rule = SCORES[name]
    only = LayerStats({key: problem.stats[key] for key in rule.needs})
    assert torch.equal(rule(problem.batch, only), rule(problem.batch, problem.stats))
    for needed in rule.needs:
        short = LayerStats({key: tensor for key, tensor in only.items() if key != needed})
        with pytest.raises(MissingStatisticError, match=f"{needed!r}.*moebudget calibrate"):
            rule(problem.batch, short)


def test_oracle_without_energies_scores_silently() -> None:
    batch = dataclasses.replace(make_problem("softmax", 2, 8, 2).batch, energy=None)
    assert [name for name, rule in SCORES.items() if rule.needs_energy] == ["oracle"]
    with pytest.raises(ValueError, match=r"oracle.*energies.*base\(budget=\.\.\.\)"):
        TrueEnergy()(batch, NO_STATS)


@pytest.mark.parametrize("name", ["energy_mean", "other"])
def test_asking_for_a_statistic_without_reading_it_raises(name: str) -> None:
    stats = LayerStats({"energy_mean": torch.ones(2)})
    assert (name in stats) == (name == "energy_mean")
    assert name not in NO_STATS


def test_statistics_stay_behind_when_moved() -> None:
    stats = make_problem("softmax", 1, 8, 2).stats
    moved = stats.to("meta")
    assert set(moved) == set(stats)
    assert len(moved) == len(stats) > 3
    assert all(tensor.device.type == "meta" for tensor in moved.values())
