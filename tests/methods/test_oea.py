"""OEA: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

from moebudget.core.layer_router import LayerRouter
from tests.conftest import assert_routes, make_problem, over_kinds, used_slots
from tests.methods import reference_published
from tests.methods.steps import (
    fetched,
    members,
    run,
    sized,
    step_of,
    union_of,
)


@over_kinds
@pytest.mark.parametrize("k0", [1, 2, 3])
def test_oea_equals_xshare_without_further_experts(kind: str, k0: int) -> None:
    for problem in sized(kind):
        oea, xshare = run(f"oea:k0={k0}", problem), run(f"xshare:k0={k0},m=0", problem)
        assert torch.equal(oea.ids, xshare.ids)
        assert torch.equal(oea.weights, xshare.weights)


@over_kinds
@pytest.mark.parametrize("k0", [1, 3, 8])
def test_oea_base_set_grows_with_the_share(kind: str, k0: int) -> None:
    for problem in sized(kind):
        sets = [members(f"oea:k0={k0},p={p}", problem) for p in (0.01, 0.2, 0.5, 0.9, 1.0)]
        assert all(less <= more for less, more in itertools.pairwise(sets)), problem.shape
        assert sets[0] == union_of(problem, 1)  # every share is reached by the first route, or never below it
        assert sets[-1] == union_of(problem, k0)


@over_kinds
@pytest.mark.parametrize("k_max", [2, 4, 10, 100])
def test_oea_gives_every_row_k_max_experts_if_it_can(kind: str, k_max: int) -> None:
    """More than K slots where k_max is above K: the rows are wider than the model's own."""
    for problem in sized(kind):
        text = f"oea:k0=2,k_max={k_max}"
        routing, base = run(text, problem), union_of(problem, 2)
        n, k = problem.spec.num_experts, problem.spec.top_k
        assert routing.ids.shape == routing.weights.shape == (problem.rows, max(k, min(k_max, n)))
        opened = [sum(row.choice[u] > -math.inf for u in base) for row in problem.reference]
        assert [len(routes) for routes in used_slots(routing)] == [min(k_max, open_) for open_ in opened]
        assert_routes(routing, reference_published.oea(step_of(problem), 2, k_max=k_max), problem.shape)
        assert fetched(text, problem) == base
        LayerRouter(problem.policy(text), problem.stats)(problem.batch)


def test_oea_with_more_slots_keeps_padding_empty_and_nan_visible() -> None:
    problem = make_problem("softmax_renorm", 4, 64, 4)
    logits = problem.logits.clone()
    logits[2] = math.nan
    step = dataclasses.replace(problem, logits=logits, kind=torch.tensor([True, False, True, True]))
    routing, alone = run("oea:k0=2,k_max=6", step), run("oea:k0=2,k_max=6", problem.take(torch.tensor([0, 3])))
    assert torch.equal(routing.ids[[0, 3]], alone.ids)
    torch.testing.assert_close(routing.weights[[0, 3]], alone.weights)
    assert routing.weights[1].tolist() == [0.0] * 6
    assert routing.weights[2].isnan().all()
    assert step.policy("oea:k0=2,k_max=6").active(step.batch, step.stats).mask[routing.ids].all()


@over_kinds
@pytest.mark.parametrize("max_rank", [2, 3, 9])
def test_oea_fills_up_to_max_rank_alone(kind: str, max_rank: int) -> None:
    for problem in sized(kind):
        routing = run(f"oea:k0=2,max_rank={max_rank}", problem)
        for row, routes in zip(problem.reference, used_slots(routing), strict=True):
            order = sorted(range(problem.spec.num_experts), key=lambda u, row=row: (-row.choice[u], u))
            assert {u for u, _ in routes} <= set(order[:max_rank])
            assert {u for u, _ in routes} >= set(row.ids[:2])
