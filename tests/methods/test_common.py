"""Scores and selections that several methods share."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moebudget.core.ops import native_union
from moebudget.core.types import NO_STATS, RouterBatch
from moebudget.methods.common import RouteRank, TopBudget, Voted
from moebudget.methods.native import NativeUnion
from tests.conftest import make_problem, over_kinds, problems
from tests.methods import reference


def active_set(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero()[:, 0].tolist())


def batch_of(ids: list[list[int]], n: int) -> RouterBatch:
    """A batch whose rows route to these experts, best first."""
    problem = make_problem("softmax_renorm", len(ids), n, len(ids[0]))
    return dataclasses.replace(problem.batch, ids=torch.tensor(ids))


@over_kinds
def test_native_union_and_first_routes_agree_with_a_loop(kind: str) -> None:
    for problem in problems(kind):
        batch, rows, k = problem.batch, problem.reference, problem.spec.top_k
        assert active_set(native_union(batch)) == reference.first_union(rows, k), problem.shape
        assert active_set(NativeUnion()(batch.probs, batch, NO_STATS).mask) == reference.first_union(rows, k)
        for k0 in (1, 2, k):
            scores = RouteRank(k0)(batch, NO_STATS)
            assert active_set(Voted()(scores, batch, NO_STATS).mask) == reference.first_union(rows, k0)


@over_kinds
@pytest.mark.parametrize("budget", [1, 3, 10, 1000])
def test_budget_keeps_the_largest_sums(kind: str, budget: int) -> None:
    for problem in problems(kind):
        rows, n = problem.reference, problem.spec.num_experts
        scores = torch.zeros(problem.rows, n)
        for t, row in enumerate(rows):
            for expert, weight in row.routes:
                scores[t, expert] = weight
        wanted = reference.top_budget(rows, reference.demand(rows, n, reference.mass_cost), budget)
        found = TopBudget(budget)(scores, problem.batch, NO_STATS).mask
        assert active_set(found) == wanted, problem.shape
        tensor = TopBudget(torch.tensor(budget))(scores, problem.batch, NO_STATS).mask
        assert torch.equal(found, tensor), problem.shape


def test_equal_sums_keep_the_lowest_experts() -> None:
    batch = batch_of([[7, 2], [5, 3], [6, 4]], 8)
    scores = torch.zeros(3, 8).scatter(-1, batch.ids, 0.25)
    assert active_set(TopBudget(3)(scores, batch, NO_STATS).mask) == {2, 3, 4}


def test_sums_of_the_same_numbers_in_another_row_order_tie() -> None:
    """Experts 0 and 1 get the same sixteen numbers from other rows, in float32 with sums that differ in rounding."""
    different = 0
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        values = torch.rand(16, generator=g)
        scores = torch.stack([values[torch.randperm(16, generator=g)], values], -1)
        different += int(scores[:, 0].sum() != scores[:, 1].sum())
        batch = batch_of([[0, 1]] * 16, 2)
        assert active_set(TopBudget(1)(scores, batch, NO_STATS).mask) == {0}, f"seed {seed}"
    assert different, "float32 sums never differed, so this test shows nothing"


def test_budget_above_the_union_adds_no_expert() -> None:
    batch = batch_of([[7, 2], [7, 3]], 8)
    scores = torch.zeros(2, 8).scatter(-1, batch.ids, 0.5)
    assert active_set(TopBudget(6)(scores, batch, NO_STATS).mask) == {2, 3, 7}


def test_routes_whose_score_underflows_are_candidates() -> None:
    """w^2 of a tiny weight is 0 in float32; the route is still one that the model fetches."""
    batch = batch_of([[7, 2], [6, 3]], 8)
    assert active_set(TopBudget(3)(torch.zeros(2, 8), batch, NO_STATS).mask) == {2, 3, 6}


def test_negative_biased_scores_choose_inside_the_set() -> None:
    """Masking with 0 would put every expert outside the set above those inside."""
    problem = make_problem("sigmoid_bias", 5, 8, 2)
    bias = torch.full((8,), -5.0)
    batch = problem.spec(problem.hidden, problem.logits, bias=bias)
    assert (batch.choice < 0).all()
    for budget in (1, 2, 3):
        policy = problem.policy(f"squared:budget={budget}")
        active, routing = policy.active(batch, problem.stats), policy(batch, problem.stats)
        assert active.mask.sum() == budget
        assert active.mask[routing.ids].all()
        assert (routing.weights >= 0).all()


def test_rows_that_do_not_vote_stay_out_of_the_union() -> None:
    batch = batch_of([[7, 2], [6, 3], [0, 1]], 8)
    voting = dataclasses.replace(batch, kind=torch.tensor([True, False, True]))
    assert active_set(native_union(voting)) == {0, 1, 2, 7}
    nobody = dataclasses.replace(batch, kind=torch.zeros(3, dtype=torch.bool))
    assert active_set(native_union(nobody)) == set()
    assert active_set(TopBudget(4)(torch.zeros(3, 8), nobody, NO_STATS).mask) == set()
