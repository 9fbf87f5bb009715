"""Worth fetching: what is at hand, and missing experts that carry their cost."""

from __future__ import annotations

import pytest
import torch

from moebudget.methods import parse
from moebudget.methods.worth import WorthFetching
from tests.conftest import make_problem, over_kinds
from tests.methods.steps import members, sized, union_of, with_stats


@over_kinds
@pytest.mark.parametrize("cost", ["base", "static", "squared", "router_mass"])
def test_worth_keeps_what_is_at_hand_and_what_pays_for_its_fetch(kind: str, cost: str) -> None:
    for problem in sized(kind):
        policy = parse(f"worth:least=0.7,cost={cost}")
        scores = policy.score(problem.batch, problem.stats)
        total, union, price = scores.double().sum(0), union_of(problem), problem.plain_stats["placement_cost"]
        mean = float(total.sum()) / len(union)
        wanted = {u for u in union if float(total[u]) >= 0.7 * mean * price[u] / max(price)}
        wanted.add(max(sorted(union), key=lambda u: float(total[u])))
        must = WorthFetching(0.7)(scores, problem.batch, problem.stats).mask.nonzero()[:, 0].tolist()
        assert set(must) == wanted
        assert wanted <= members(policy, problem) <= union


def test_worth_at_no_cost_keeps_the_native_union() -> None:
    problem = make_problem("softmax_renorm", 16, 64, 4)
    free = with_stats(problem, placement_cost=torch.zeros(64))
    assert members("worth:least=8", free) == union_of(problem)
    assert len(members("worth:least=8", with_stats(problem, placement_cost=torch.ones(64)))) < len(union_of(problem))
