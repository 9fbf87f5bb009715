"""Plain top-k reduction."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import over_kinds, used_slots
from tests.methods.steps import fetched, is_native, run, sized, union_of


@over_kinds
@pytest.mark.parametrize("k", [1, 2, 3])
def test_topk_runs_the_first_k_routes_and_renormalises_where_the_model_does(kind: str, k: int) -> None:
    for problem in sized(kind):
        routing = run(f"topk:k={k}", problem)
        for row, routes in zip(problem.reference, used_slots(routing), strict=True):
            assert [u for u, _ in routes] == row.ids[: min(k, problem.spec.top_k)]
        if problem.spec.renormalize:
            torch.testing.assert_close(routing.weights.sum(-1), problem.batch.weights.sum(-1))
        assert fetched(f"topk:k={k}", problem) == union_of(problem, k)


@over_kinds
def test_topk_of_all_routes_is_native(kind: str) -> None:
    for problem in sized(kind):
        assert is_native(f"topk:k={problem.spec.top_k}", problem)
        assert is_native("topk:k=99", problem)
