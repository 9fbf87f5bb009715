"""REAP: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import dataclasses

import torch

from moebudget.methods.registry import parse
from tests.conftest import make_problem, over_kinds
from tests.methods.steps import (
    members,
    with_stats,
)


def test_reap_static_protects_super_experts() -> None:
    problem = make_problem("softmax_renorm", 4, 8, 2)
    value = torch.tensor([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    problem = with_stats(problem, output_norm_weighted=value, super_expert=torch.eye(8)[7] + torch.eye(8)[5])
    assert members("reap_static:budget=3", problem) == {0, 5, 7}
    assert members("reap_static:budget=1", problem) == {5}
    assert members("reap_static:budget=3,protect=no", problem) == {0, 1, 2}
    assert "super_expert" not in parse("reap_static:budget=3,protect=no").needs


@over_kinds
def test_static_pools_do_not_depend_on_the_batch(kind: str) -> None:
    first, other = (make_problem(kind, 5, 64, 4, seed=seed) for seed in (0, 1))
    for text in ("reap_static:budget=9", "exfold_static:budget=9"):
        assert members(text, first) == members(text, dataclasses.replace(other, stats=first.stats))
