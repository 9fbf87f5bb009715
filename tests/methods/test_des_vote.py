"""DES-Vote: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import pytest

from tests.conftest import over_kinds
from tests.methods.steps import (
    members,
    sized,
    union_of,
)


@over_kinds
@pytest.mark.parametrize("beta", [0.01, 0.15, 0.3, 1.0])
def test_des_vote_core_has_its_size(kind: str, beta: float) -> None:
    for problem in sized(kind):
        size = max(problem.spec.top_k, round(beta * problem.spec.num_experts))
        assert len(members(f"des_vote:beta={beta}", problem)) == min(size, len(union_of(problem)))
