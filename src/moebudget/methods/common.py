"""Scores and selections that several methods share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget.core.ops import (
    demand,
    on_all,
    on_routes,
    rank,
    until_share,
)
from moebudget.core.policy import Score, Select
from moebudget.core.types import Active, LayerStats, RouterBatch


@dataclass(frozen=True, slots=True)
class RouterMass(Score):
    """The native weight, w_tu: BASE's ablation "weight sum" (section 5, table 2)."""

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_routes(batch, batch.weights)


@dataclass(frozen=True, slots=True)
class RouteRank(Score):
    """1 for the first n_t routes of a row: membership of its top-k0. Read by `Voted`, it gives OEA's base set.

    n_t = min(k0, least rank at which the row's scores add up to p of their sum over all N). OEA,
    https://arxiv.org/abs/2511.02237, phase 1; p = 1 is the simplified form. A k0 above K means K.
    """

    k0: int
    p: float = 1.0

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        first = torch.arange(batch.ids.shape[-1], device=batch.ids.device) < self.k0
        first = first.expand_as(batch.weights)
        if self.p < 1:
            scores = batch.probs.gather(-1, batch.ids)
            first = first & until_share(scores, self.p, batch.probs.double().sum(-1, keepdim=True))
        return on_routes(batch, first)


@dataclass(frozen=True, slots=True)
class GateMass(Score):
    """The router's score of every expert, routed to or not, g_tu = p_tu: XShare's and MoE-Spec's proxy.

    XShare, https://arxiv.org/abs/2602.07265, algorithm 1 (which kind of score is not stated; we take the softmax or
    sigmoid without the selection bias, because logits do not add up to masses). MoE-Spec,
    https://arxiv.org/abs/2602.16052.
    """

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_all(batch, batch.probs)


@dataclass(frozen=True, slots=True)
class NormMass(Score):
    """w_tu n_u with n_u = E |E_u(z)| over calibration tokens routed to u: ExFold's importance, REAP's criterion.

    ExFold, https://arxiv.org/abs/2608.24938 (linear in w, static norm). REAP, https://arxiv.org/abs/2510.13999, takes
    the mean of w |E_u(z)| over a calibration set; here the batch takes the calibration set's place.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"output_norm"})

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_routes(batch, batch.weights * stats["output_norm"].float()[batch.ids])


@dataclass(frozen=True, slots=True)
class Profile(Score):
    """A calibrated number per expert, the same in every row: a static pool that does not look at the batch.

    With `protect`, REAP's super experts (very large activations, statistic `super_expert`) come before all others.
    """

    statistic: str
    protect: bool = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.statistic, *(["super_expert"] if self.protect else [])})

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        value = stats[self.statistic].float()  # [N]
        if self.protect:
            value = torch.where(stats["super_expert"] > 0, value + value.amax() + 1, value)
        return torch.where(batch.decode[..., None], value.expand_as(batch.probs), 0.0)


@dataclass(frozen=True, slots=True)
class Voted(Select):
    """Every expert with a positive score in some row: with `RouteRank(k0)` the union of the rows' top-k0."""

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        return Active((scores > 0).any(-2))


@dataclass(frozen=True, slots=True)
class TopBudget(Select):
    """The `budget` experts with the largest sum over rows, min_A sum_{u not in A} D_u s.t. |A| <= M (BASE, eq. 4).

    Only candidates (routed to by a voting row, or with a positive sum) are ever in the set, so the step fetches
    min(M, candidates) experts. `budget` may be an integer tensor on the device: then it can change between replays
    of a CUDA graph.
    """

    budget: int | Tensor
    caps: ClassVar[bool] = True

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        return Active(candidate & (rank(total, candidate) < self.budget))
