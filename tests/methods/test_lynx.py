"""Lynx and LYNX-Lat: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from moebudget.core.router import RouterSpec
from tests.conftest import make_problem, over_kinds
from tests.methods.steps import (
    is_native,
    members,
    run,
    sized,
    union_of,
)


@over_kinds
def test_lynx_at_the_finest_bins_is_native(kind: str) -> None:
    for problem in sized(kind):
        assert is_native("lynx:alpha=1e9", problem), problem.shape


@over_kinds
@pytest.mark.parametrize("text", ["lynx:alpha=0.5,beta=1", "lynx:alpha=3,beta=2"])
def test_lynx_is_native_in_a_batch_of_one(text: str, kind: str) -> None:
    problem = make_problem(kind, 1, 64, 8)
    assert is_native(text, problem)
    pads = make_problem(kind, 5, 64, 8)
    alone = dataclasses.replace(pads, kind=torch.arange(5) == 3)
    assert torch.equal(run(text, alone).ids[3], alone.batch.ids[3])


def test_lynx_at_the_coarsest_bins_agrees_on_k_experts() -> None:
    """One bin for all: every row's K are those that the batch as a whole prefers, so the set has K experts."""
    problem = make_problem("softmax_renorm", 16, 64, 8)
    assert members("lynx:alpha=1e-9,beta=1", problem) == set(range(8))


def test_lynx_follows_the_rest_of_the_batch_inside_a_bin() -> None:
    """Bins of 1 nat: experts 1 and 2 share one in row 0; rows 1 and 2 prefer 2, so row 0 takes 2 for its own 1."""
    logits = torch.tensor([[3.0, 1.9, 1.8, -9.0], [-9.0, -9.0, 3.0, 2.9], [-9.0, -9.0, 3.0, 2.9]])
    problem = make_problem("softmax_renorm", 3, 4, 2)
    problem = dataclasses.replace(problem, logits=logits, bias=None, spec=RouterSpec(4, 2))
    assert problem.batch.ids[0].tolist() == [0, 1]
    assert members("lynx:alpha=1,beta=3", problem) == {0, 2, 3}
    routing = run("lynx:alpha=1,beta=3", problem)
    assert routing.ids[0].tolist() == [0, 2]
    assert torch.equal(routing.ids[1:], problem.batch.ids[1:])


@over_kinds
@pytest.mark.parametrize("drop", [0, 1, 7, 500])
def test_lynx_lat_drops_the_least_used_experts(kind: str, drop: int) -> None:
    for problem in sized(kind):
        kept, union = members(f"lynx_lat:drop={drop}", problem), union_of(problem)
        assert len(kept) == max(1, len(union) - drop)
        votes = {u: sum(u in row.ids for row in problem.reference) for u in union}
        assert all(votes[u] >= votes[v] for u in kept for v in union - kept)
