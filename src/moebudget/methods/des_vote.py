"""DES-Vote: a fixed share of the experts, by summed weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moebudget.core.ops import (
    demand,
    rank,
)
from moebudget.core.policy import Policy, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.common import RouterMass
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import Share, Tunable, register


@dataclass(frozen=True, slots=True)
class ShareOfExperts(Select):
    """The max(K, round(beta N)) experts with the largest total: DES-Vote's core set.

    DES, https://arxiv.org/abs/2602.00879 (known to us from summaries).
    """

    beta: float

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        size = max(batch.ids.shape[-1], round(self.beta * total.shape[-1]))
        return Active(candidate & (rank(total, candidate) < size))


@register(
    source="https://arxiv.org/abs/2602.00879",
    example="des_vote:beta=0.15",
    label="DES-Vote",
    tune=Tunable("beta", 0.12, 0.5),
)
def des_vote(beta: Share = 0.15) -> Policy:
    """DES-Vote: the max(K, beta N) experts with the largest sum of weights over the routes, renormalised.

    Made for blocks of a diffusion model. DES-Seq is `oea`.
    """
    return Policy(RouterMass(), ShareOfExperts(beta), Backfill("executed"))
