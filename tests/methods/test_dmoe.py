"""dMoE: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

from tests.conftest import over_kinds
from tests.methods.steps import (
    members,
    sized,
    union_of,
)


@over_kinds
def test_dmoe_set_is_the_smallest_with_its_share(kind: str) -> None:
    for problem in sized(kind):
        total = problem.policy("dmoe").score(problem.batch, problem.stats).double().sum(0)
        sizes = []
        for share in (0.01, 0.3, 0.6, 0.95, 1.0):
            kept = sorted(members(f"dmoe:share={share}", problem))
            held = total[kept].sum() / total.sum()
            assert held >= share - 1e-9
            assert held - total[kept].min() / total.sum() < share or len(kept) == len(union_of(problem))
            sizes.append(len(kept))
        assert sizes == sorted(sizes)
        assert sizes[0] == 1
        assert sizes[-1] == len(union_of(problem))
