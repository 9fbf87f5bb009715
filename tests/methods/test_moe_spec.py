"""MoE-Spec: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

from tests.conftest import assert_same, over_kinds, used_slots
from tests.methods.steps import (
    members,
    run,
    sized,
)


@over_kinds
def test_moe_spec_equals_xshare_without_a_warm_up(kind: str) -> None:
    for problem in sized(kind):
        assert_same(run("moe_spec:budget=6", problem), run("xshare:k0=0,m=6", problem))
        truncated = used_slots(run("moe_spec:budget=6,fill=drop", problem))
        kept = members("moe_spec:budget=6", problem)
        for row, routes in zip(problem.reference, truncated, strict=True):
            own = [u for u in row.ids if u in kept]
            assert [u for u, _ in routes] == own or (not own and len(routes) == 1)
