"""SERE: routes outside the batch's first experts go to the most similar one inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moebudget.core.ops import (
    native_union,
)
from moebudget.core.policy import Policy, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.common import RouteRank
from moebudget.methods.fills import Substitute
from moebudget.methods.registry import (
    Count,
    NonNegative,
    Tunable,
    register,
)


@dataclass(frozen=True, slots=True)
class Critical(Select):
    """The voted experts, and routed ones that none of them resembles: SERE.

    An expert u outside the voted set stays if max_v sim[u, v] < rho over the voted v; the voted ones alone
    replace others. SERE, https://arxiv.org/abs/2602.07616, and the authors' code. rho = 0 keeps none, rho > 1 all.
    """

    statistic: str
    rho: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.statistic})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        voted = (scores > 0).any(-2)
        alike = torch.where(voted[..., None, :], stats[self.statistic].float(), -torch.inf).amax(-1)  # [N]
        return Active(voted | (native_union(batch) & (alike < self.rho)), voted)


Metric = Literal["frobenius", "cosine", "cka"]
METRICS: tuple[str, ...] = get_args(Metric)


@register(
    source="https://arxiv.org/abs/2602.07616",
    example="sere:s=2",
    label="SERE",
    tune=(Tunable("s", 1, "K"), Tunable("rho", 0.02, 1.0)),
    variants={"SERE": tuple(f"sere:s={s},rho={{}},metric={metric}" for s in (1, 2) for metric in METRICS)},
)
def sere(s: Count, rho: NonNegative = 0.0, metric: Metric = "frobenius") -> Policy:
    """SERE: a row's routes beyond its first s go to the most similar of the batch's first-s experts, weights kept.

    An expert that resembles none of them by rho or more stays. An expert may come twice in a row.
    """
    statistic = f"similarity_{metric}"
    return Policy(RouteRank(s), Critical(statistic, rho), Substitute(statistic))
