"""`experiments/studies/coverage.py`: the greedy selection, its ties and its budget."""

from __future__ import annotations

import pytest
import torch

from experiments.studies.coverage import Coverage
from moebudget.core.policy import Policy
from moebudget.core.types import NO_STATS
from moebudget.methods.common import RouterMass, TopBudget
from moebudget.methods.fills import Backfill
from tests.conftest import make_problem, problems
from tests.methods.test_common import active_set, batch_of


@pytest.mark.parametrize("exponent", [1.0, 2.0])
@pytest.mark.parametrize("kind", ["softmax_renorm", "groups_top2"])
def test_coverage_adds_the_expert_that_helps_most(kind: str, exponent: float) -> None:
    for problem in list(problems(kind))[::4]:
        batch, n = problem.batch, problem.spec.num_experts
        scores = RouterMass()(batch, NO_STATS)
        plain, kept = scores.double().tolist(), set[int]()
        routed = {u for row in problem.reference for u in row.ids}

        def worth(chosen: set[int], plain: list[list[float]] = plain) -> float:
            shares = [(sum(row), sum(row[u] for u in chosen) / sum(row)) for row in plain]
            return sum(total * (1 - max(0.0, 1 - share) ** exponent) for total, share in shares)

        for m in range(1, 5):
            active = active_set(Coverage(m, exponent)(scores, batch, NO_STATS).mask)
            assert active_set(Coverage(torch.tensor(m), exponent)(scores, batch, NO_STATS).mask) == active
            assert kept < active or active == routed or not routed
            assert len(active) == min(m, len(routed))
            best = max((worth(kept | {u}) for u in routed - kept), default=0.0)
            if active != kept:
                assert worth(active) == pytest.approx(best, rel=1e-5)
            kept = active
        assert active_set(Coverage(n, exponent)(scores, batch, NO_STATS).mask) == routed


def test_coverage_of_exponent_one_keeps_the_largest_sums() -> None:
    problem = make_problem("sigmoid_bias", 16, 60, 8)
    scores = torch.rand(16, 60, generator=torch.Generator().manual_seed(0))
    for m in (1, 5, 20):
        mask = Coverage(m, 1.0)(scores, problem.batch, NO_STATS).mask
        assert torch.equal(mask, TopBudget(m)(scores, problem.batch, NO_STATS).mask)


def test_coverage_serves_rows_without_anything_left_first() -> None:
    """Expert 1 is worth more to the row that keeps expert 0 than expert 2 is to the other row, which has no other."""
    scores = torch.tensor([[6.0, 3.0, 0.0], [0.0, 0.0, 2.5]])
    batch = batch_of([[0, 1], [2, 0]], 3)
    assert active_set(TopBudget(2)(scores, batch, NO_STATS).mask) == {0, 1}
    assert active_set(Coverage(2)(scores, batch, NO_STATS).mask) == {0, 2}


def test_coverage_has_a_budget_through_the_base_class() -> None:
    policy = Policy(RouterMass(), Coverage(3), Backfill())
    assert policy.budget == 3
    assert policy.with_budget(5).select == Coverage(5)
    with pytest.raises(ValueError, match="budget=0 must be a whole number of at least 1"):
        policy.with_budget(0)
