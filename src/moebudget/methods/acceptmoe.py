"""AcceptMoE: as many experts as the entropy of the batch's demand suggests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moebudget.core.ops import (
    demand,
    on_all,
    rank,
)
from moebudget.core.policy import Policy, Score, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import Positive, Tunable, register


@dataclass(frozen=True, slots=True)
class AcceptedMass(Score):
    """GateMass times the probability that the row's draft token is accepted, P(accept t) p_tu.

    AcceptMoE, https://arxiv.org/abs/2608.02989; its estimator of the probability is not public, the edge gives
    `batch.accept`. Without it every row counts as accepted, which is plain decoding.
    """

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        chance = 1.0 if batch.accept is None else batch.accept.float()[..., None]
        return on_all(batch, batch.probs * chance)


@dataclass(frozen=True, slots=True)
class EffectiveRank(Select):
    """The ceil(scale exp H(q)) experts with the largest total, q the totals as shares: AcceptMoE's set size.

    exp(entropy) is the number of equally wanted experts that would be as spread out. AcceptMoE,
    https://arxiv.org/abs/2608.02989; the paper's clamps are not public, ours are 1 and the candidates; `scale` is
    ours.
    """

    scale: float = 1.0

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        q = total / total.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        size = (self.scale * torch.special.entr(q).sum(-1, keepdim=True).exp()).float().ceil().clamp_min(1)
        return Active(candidate & (rank(total, candidate) < size))


@register(
    source="https://arxiv.org/abs/2608.02989",
    example="acceptmoe:scale=0.5",
    label="AcceptMoE rank",
    tune=Tunable("scale", 0.05, 2.0),
)
def acceptmoe(scale: Positive = 1.0) -> Policy:
    """AcceptMoE: as many experts as the entropy of the batch's demand suggests, times `scale` (ours).

    Demand is weighted by the acceptance probability of draft tokens.
    """
    return Policy(AcceptedMass(), EffectiveRank(scale), Backfill("executed"))
