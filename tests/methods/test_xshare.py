"""XShare: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from moebudget.core.types import RouterBatch
from tests.conftest import Problem, make_problem, over_kinds
from tests.methods import reference_published
from tests.methods.steps import (
    loads,
    members,
    sized,
    step_of,
    union_of,
    with_stats,
)


@over_kinds
def test_xshare_set_has_the_size_of_warm_up_and_budget(kind: str) -> None:
    for problem in sized(kind):
        opened = {u for row in problem.reference for u, c in enumerate(row.choice) if c > -math.inf}
        for k0, m in ((0, 1), (1, 5), (2, 12), (1, 100)):
            warm = union_of(problem, k0) if k0 else set()
            on_top, capped = (members(f"xshare:k0={k0},m={m},additive={word}", problem) for word in ("yes", "no"))
            assert len(on_top) == min(len(warm) + m, len(opened)), problem.shape
            assert len(capped) == max(len(warm), min(m, len(opened)))
            assert warm <= capped <= on_top


def verification(kind: str) -> tuple[Problem, RouterBatch]:
    """Two requests of three and four rows, mixed, a request of one row, and a padding row of the first request."""
    problem = make_problem(kind, 9, 64, 4)
    request = torch.tensor([0, 1, 0, 1, 0, 1, 1, 7, 0])
    spec, decode = problem.spec, torch.arange(9) < 8
    return problem, spec(problem.hidden, problem.logits, bias=problem.bias, kind=decode, request=request)


@over_kinds
@pytest.mark.parametrize("fields", [(1, 0, 3), (0, 0, 2), (2, 5, 1), (0, 16, 4)])
def test_xshare_of_several_requests_agrees_with_the_specification(kind: str, fields: tuple[int, int, int]) -> None:
    problem, batch = verification(kind)
    k0, m, m_request = fields
    step = step_of(problem)
    step = dataclasses.replace(step, rows=step.rows[:8], request=batch.request.tolist()[:8])  # type: ignore[union-attr]
    for additive in (True, False):
        word = "yes" if additive else "no"
        found = members(f"xshare:k0={k0},m={m},m_request={m_request},additive={word}", problem, batch)
        assert found == reference_published.xshare_set(step, k0, m, m_request, additive)


def test_xshare_takes_every_row_for_its_own_request() -> None:
    """Three experts per request, three requests: more than a single request would get, fewer than three per row."""
    problem, batch = verification("softmax_renorm")
    assert len(members("xshare:k0=0,m=0,m_request=3", problem, batch)) <= 9
    rows = dataclasses.replace(batch, request=None)
    assert len(members("xshare:k0=0,m=0,m_request=3", problem, rows)) > 9
    one = dataclasses.replace(batch, request=torch.zeros(9, dtype=torch.int64))
    found = members("xshare:k0=0,m=0,m_request=3", problem, one)
    assert found == members("xshare:k0=0,m=3", problem, one)


@over_kinds
def test_xshare_balanced_load_is_within_its_bound(kind: str) -> None:
    """ceil(m / devices) while no device runs out."""
    problem = make_problem(kind, 16, 64, 4)
    problem = with_stats(problem, placement_device=torch.arange(64) % 4)
    for m in (1, 3, 4, 7, 16, 30):
        load = loads(members(f"xshare_balanced:m={m}", problem), problem)
        assert sum(load) == m
        assert max(load) == math.ceil(m / 4)
        assert load == sorted(load, reverse=True)  # the first devices take the rest


def test_xshare_balanced_passes_over_a_device_that_has_run_out() -> None:
    problem = make_problem("softmax_renorm", 16, 8, 2)
    problem = with_stats(problem, placement_device=torch.tensor([0, 1, 1, 1, 1, 1, 1, 1]))
    assert loads(members("xshare_balanced:m=6", problem), problem) == [1, 5]


def test_xshare_balanced_takes_turns_by_device() -> None:
    """More devices than experts: device 9 takes its first turn before device 0 its second."""
    problem = make_problem("softmax_renorm", 4, 4, 2)
    problem = with_stats(problem, placement_device=torch.tensor([0, 0, 0, 9]))
    assert 3 in members("xshare_balanced:m=2", problem)


@over_kinds
def test_xshare_ep_peak_is_the_warm_up_and_its_share(kind: str) -> None:
    for problem in sized(kind):
        warm = loads(union_of(problem, 1), problem)
        everything = loads(members(f"xshare:k0=0,m={problem.spec.num_experts}", problem), problem)
        for m in (1, 3):
            load = loads(members(f"xshare_ep:k0=1,m_device={m}", problem), problem)
            room = [everything[d] if d < len(everything) else 0 for d in range(len(load))]
            assert load == [min(w + m, r) for w, r in zip(warm, room, strict=True)]
            if all(w + m <= r for w, r in zip(warm, room, strict=True)):
                assert max(load) == max(warm) + m
            capped = loads(members(f"xshare_ep:k0=1,m_device={m},additive=no", problem), problem)
            assert capped == [max(w, min(m, r)) for w, r in zip(warm, room, strict=True)]
