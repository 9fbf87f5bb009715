"""Lynx: experts that the batch agrees on, by preference bins; and LYNX-Lat, without the least used ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moebudget.core.ops import (
    demand,
    on_routes,
    rank,
)
from moebudget.core.policy import Policy, Score, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.common import RouteRank, Voted
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import Natural, Positive, Tunable, register


@dataclass(frozen=True, slots=True)
class AffinityBins(Score):
    """1 for a row's K experts by coarse preference, then by what the rest of the batch prefers: Lynx.

    q = max(ceil(alpha (l - max l)), -beta), h = B^q, rank by q + (sum_t h - h) / B, with B the voting rows. Lynx,
    https://arxiv.org/abs/2411.08982 v3, and the authors' plugin. beta = 0 is their None: no lower bound.
    At B = 1 all h are equal and the rule would pick by index, so a batch of one keeps its native routes (our guard).
    Routers with a selection bias, which the authors leave out, are binned by what they rank by.
    """

    alpha: float
    beta: int = 0

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        voters = batch.decode.sum(-1)[..., None, None].clamp_min(1).double()  # B
        behind = batch.logits.double() - batch.logits.double().amax(-1, keepdim=True)
        bins = (self.alpha * behind).ceil()
        bins = bins.clamp_min(-self.beta) if self.beta else bins
        allowed = batch.decode[..., None] & (batch.choice > -torch.inf)
        popular = torch.where(allowed, voters**bins, 0.0)
        # Rounded, so that equal sums in another order of the rows still tie.
        others = ((popular.sum(-2, keepdim=True) - popular) / voters).float()
        modified = torch.where(allowed, bins + others, -torch.inf)
        first = modified.sort(dim=-1, descending=True, stable=True).indices[..., : batch.ids.shape[-1]]
        votes = torch.zeros_like(batch.probs).scatter(-1, first, 1.0)
        alone = batch.decode.sum(-1)[..., None, None] < 2
        native = on_routes(batch, torch.ones_like(batch.weights))
        return torch.where(alone, native, torch.where(allowed, votes, 0.0))


@dataclass(frozen=True, slots=True)
class AllBut(Select):
    """Every routed expert but the `drop` with the least total; one always stays (LYNX-Lat).

    Lynx v1, https://arxiv.org/abs/2411.08982v1: with one vote a route, the experts that fewest rows use are left out.
    """

    drop: int

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        left = (candidate.sum(-1, keepdim=True) - self.drop).clamp_min(1)
        return Active(candidate & (rank(total, candidate) < left))


@register(
    source="https://arxiv.org/abs/2411.08982 v3",
    example="lynx:alpha=1,beta=1",
    label="Lynx",
    tune=Tunable("alpha", 0.05, 8.0),
    variants={"Lynx": tuple(f"lynx:alpha={{}},beta={beta}" for beta in (1, 2, 4, 0))},
)
def lynx(alpha: Positive, beta: Natural = 0) -> Policy:
    """Lynx: rows pick K experts by coarse preference bins, then by the batch's preference; each runs its best of them.

    1/alpha is a bin's width in nats, beta the bins below the top one (0: no end).
    """
    return Policy(AffinityBins(alpha, beta), Voted(), Backfill("preserved"))


@register(
    source="https://arxiv.org/abs/2411.08982v1",
    example="lynx_lat:drop=8",
    label="LYNX-Lat",
    tune=Tunable("drop", 0, "N", rises=False),
)
def lynx_lat(drop: Natural) -> Policy:
    """LYNX-Lat: without the `drop` experts that fewest rows route to; each row runs its best of the others."""
    return Policy(RouteRank(2**31), AllBut(drop), Backfill("executed"))
