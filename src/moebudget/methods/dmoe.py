"""dMoE: the fewest experts that hold a share of the batch's demand."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moebudget.core.ops import (
    demand,
    largest_first,
    rank,
)
from moebudget.core.policy import Policy, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.common import RouterMass
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import Share, Tunable, register


@dataclass(frozen=True, slots=True)
class RetainedShare(Select):
    """The fewest experts that together hold `share` of the total: the set's size follows the batch.

    dMoE, https://arxiv.org/abs/2605.30876 (known to us from summaries). `share` = 1 keeps every candidate.
    """

    share: float

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        if self.share >= 1:
            return Active(candidate)
        sums = largest_first(total, candidate).values.clamp_min(0).cumsum(-1)
        size = (sums < self.share * sums[..., -1:]).sum(-1, keepdim=True) + 1
        return Active(candidate & (rank(total, candidate) < size))


@register(
    source="https://arxiv.org/abs/2605.30876",
    example="dmoe:share=0.6",
    label="dMoE share",
    tune=Tunable("share", 0.05, 0.99),
)
def dmoe(share: Share = 0.6) -> Policy:
    """dMoE: the fewest experts with `share` of the batch's summed weights; the set's size follows the batch.

    The paper also trains the model for it.
    """
    return Policy(RouterMass(), RetainedShare(share), Backfill("executed"))
