"""Scores of the other papers' methods; BASE's and its ablations' are in `score`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget.score import on_all, on_routes, until_share
from moebudget.select import rank
from moebudget.types import LayerStats, RouterBatch


def _by_weight(batch: RouterBatch) -> Tensor:
    """[T, K] int64: 0 for a row's heaviest route; a selection bias can put it in another slot than the first."""
    return rank(batch.probs.gather(-1, batch.ids), torch.ones_like(batch.ids, dtype=torch.bool))


@dataclass(frozen=True, slots=True)
class GateMass:
    """The router's score of every expert, routed to or not, g_tu = p_tu: XShare's and MoE-Spec's proxy.

    XShare, https://arxiv.org/abs/2602.07265, algorithm 1 (which kind of score is not stated; we take the softmax or
    sigmoid without the selection bias, because logits do not add up to masses). MoE-Spec,
    https://arxiv.org/abs/2602.16052.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        return on_all(batch, batch.probs)


@dataclass(frozen=True, slots=True)
class AcceptedMass:
    """GateMass times the probability that the row's draft token is accepted, P(accept t) p_tu.

    AcceptMoE, https://arxiv.org/abs/2608.02989; its estimator of the probability is not public, the edge gives
    `batch.accept`. Without it every row counts as accepted, which is plain decoding.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        chance = 1.0 if batch.accept is None else batch.accept.float()[..., None]
        return on_all(batch, batch.probs * chance)


@dataclass(frozen=True, slots=True)
class RouteScore:
    """The router's unscaled, not renormalised score on the model's own routes: CAEE's G(t)_u.

    CAEE, https://arxiv.org/abs/2606.29982; that G is the raw score is our reading, the only one that agrees with the
    paper's effect sizes.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        return on_routes(batch, batch.probs.gather(-1, batch.ids))


@dataclass(frozen=True, slots=True)
class NormMass:
    """w_tu n_u with n_u = E |E_u(z)| over calibration tokens routed to u: ExFold's importance, REAP's criterion.

    ExFold, https://arxiv.org/abs/2608.24938 (linear in w, static norm). REAP, https://arxiv.org/abs/2510.13999, takes
    the mean of w |E_u(z)| over a calibration set; here the batch takes the calibration set's place.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"output_norm"})
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_routes(batch, batch.weights * stats["output_norm"].float()[batch.ids])


@dataclass(frozen=True, slots=True)
class Profile:
    """A calibrated number an expert, the same in every row: a static pool that does not look at the batch.

    With `protect`, REAP's super experts (very large activations, statistic `super_expert`) come before all others.
    """

    statistic: str
    protect: bool = False
    needs_energy: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.statistic, *(["super_expert"] if self.protect else [])})

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        value = stats[self.statistic].float()  # [N]
        if self.protect:
            value = torch.where(stats["super_expert"] > 0, value + value.amax() + 1, value)
        return torch.where(batch.live[..., None], value.expand_as(batch.probs), 0.0)


@dataclass(frozen=True, slots=True)
class HeaviestRoutes:
    """1 for the p heaviest routes of a row: what ExFold's prefill rule keeps (by weight, as the authors do)."""

    p: int
    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        return on_routes(batch, _by_weight(batch) < self.p)


@dataclass(frozen=True, slots=True)
class KeptRatio:
    """1 for the routes that dynamic skipping keeps: w_tj >= scale beta_j w_t1, and the heaviest always.

    beta_j is the median over calibration tokens of the j-th route's weight over the heaviest's (`route_ratio` [K]). Lu
    et al., https://arxiv.org/abs/2402.14800, section 3.3, have K = 2 and scale = 1; one median a rank is our
    extension to more routes.
    """

    scale: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"route_ratio"})
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        heaviest = batch.weights.amax(-1, keepdim=True)
        least = self.scale * stats["route_ratio"].float()[_by_weight(batch)] * heaviest  # [T, K]
        return on_routes(batch, (batch.weights >= least) | (batch.weights == heaviest))


@dataclass(frozen=True, slots=True)
class RouteShare:
    """1 for a row's m heaviest routes, m the least number with theta of all K's score (CAEE's offload rule, CIR)."""

    theta: float
    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        own = batch.probs.gather(-1, batch.ids).sort(dim=-1, descending=True, stable=True).values
        first = until_share(own, self.theta, own.double().sum(-1, keepdim=True))
        return on_routes(batch, first.gather(-1, _by_weight(batch)))


@dataclass(frozen=True, slots=True)
class AffinityBins:
    """1 for a row's K experts by coarse preference, then by what the rest of the batch prefers: Lynx.

    q = max(ceil(alpha (l - max l)), -beta), h = B^q, rank by q + (sum_t h - h) / B, with B the voting rows. Lynx,
    https://arxiv.org/abs/2411.08982 v3, and the authors' plugin. beta = 0 stands for their None: no lower bound.
    At B = 1 all h are equal and the rule would pick by index, so a batch of one keeps its own routes (our guard).
    Routers with a selection bias, which the authors leave out, are binned by what they rank by.
    """

    alpha: float
    beta: int = 0
    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        voters = batch.live.sum(-1)[..., None, None].clamp_min(1).double()  # B
        behind = batch.logits.double() - batch.logits.double().amax(-1, keepdim=True)
        bins = (self.alpha * behind).ceil()
        bins = bins.clamp_min(-self.beta) if self.beta else bins
        allowed = batch.live[..., None] & (batch.choice > -torch.inf)
        popular = torch.where(allowed, voters**bins, 0.0)
        # Rounded, so that equal sums in another order of the rows still tie.
        others = ((popular.sum(-2, keepdim=True) - popular) / voters).float()
        modified = torch.where(allowed, bins + others, -torch.inf)
        first = modified.sort(dim=-1, descending=True, stable=True).indices[..., : batch.ids.shape[-1]]
        votes = torch.zeros_like(batch.probs).scatter(-1, first, 1.0)
        alone = batch.live.sum(-1)[..., None, None] < 2
        own = on_routes(batch, torch.ones_like(batch.weights))
        return torch.where(alone, own, torch.where(allowed, votes, 0.0))
