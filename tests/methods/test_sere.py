"""SERE: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import itertools

import pytest
import torch

from moebudget import presets
from tests.conftest import make_problem, over_kinds
from tests.methods.steps import (
    fetched,
    is_native,
    run,
    sized,
    union_of,
    with_stats,
)


@over_kinds
@pytest.mark.parametrize("s", [1, 2])
def test_sere_fetches_the_first_routes_and_keeps_all_weights(kind: str, s: int) -> None:
    for problem in sized(kind):
        assert fetched(f"sere:s={s}", problem) == union_of(problem, s), problem.shape
        for rho in (0.0, 0.4, 2.0):
            routing = run(presets.parse(f"sere:s={s},rho={rho}"), problem)
            assert torch.equal(routing.weights, problem.batch.weights)


@over_kinds
@pytest.mark.parametrize("metric", ["frobenius", "cosine", "cka"])
def test_sere_keeps_more_experts_at_a_higher_threshold(kind: str, metric: str) -> None:
    for problem in sized(kind):
        sets = [fetched(f"sere:s=1,rho={rho},metric={metric}", problem) for rho in (0, 0.3, 0.6, 0.9, 1.01)]
        assert all(less <= more for less, more in itertools.pairwise(sets)), problem.shape
        assert sets[-1] == union_of(problem)
        assert is_native(f"sere:s=1,rho=1.01,metric={metric}", problem)


def test_sere_reroutes_to_first_routes_alone() -> None:
    """Only the first routes stand in for others; an expert kept because nothing resembles it does not."""
    problem = make_problem("softmax_renorm", 1, 8, 4)
    first, second, third, fourth = problem.reference[0].ids
    similar = torch.full((8, 8), 0.1)
    similar[third, first], similar[third, second], similar[fourth, first] = 0.5, 0.9, 0.6
    routing = run("sere:s=1,rho=0.3", with_stats(problem, similarity_frobenius=similar))
    assert routing.ids.tolist() == [[first, second, first, first]]
