"""CAEE: the experts that matter, and all others that make no device slower."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moebudget.core.ops import (
    by_weight,
    demand,
    first_routes,
    native_union,
    on_routes,
    rank,
    until_share,
)
from moebudget.core.policy import Policy, Score, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.devices import CostInvariant
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import Positive, Share, Tunable, register


@dataclass(frozen=True, slots=True)
class RouteScore(Score):
    """The router's unscaled, not renormalised score on the native routes: CAEE's G(t)_u.

    CAEE, https://arxiv.org/abs/2606.29982; that G is the raw score is our reading, the only one that agrees with the
    paper's effect sizes.
    """

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_routes(batch, batch.probs.gather(-1, batch.ids))


@dataclass(frozen=True, slots=True)
class RouteShare(Score):
    """1 for a row's m heaviest routes, m the least number with theta of all K's score (CAEE's offload rule, CIR)."""

    theta: float

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        scores = batch.probs.gather(-1, batch.ids).sort(dim=-1, descending=True, stable=True).values
        first = until_share(scores, self.theta, scores.double().sum(-1, keepdim=True))
        return on_routes(batch, first.gather(-1, by_weight(batch)))


@dataclass(frozen=True, slots=True)
class Threshold(Select):
    """Experts whose total reaches theta; with `guard` also every row's first route.

    CAEE on the device, https://arxiv.org/abs/2606.29982. theta bounds a sum over rows, so it scales with the batch: in
    a small one no expert may reach it, which the guard (ours) is for; without it the one with the largest total stays.
    """

    theta: float
    guard: bool = True

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, _ = demand(scores, batch)
        routed = native_union(batch)
        reached = routed & (total >= self.theta)
        if self.guard:
            return Active(reached | first_routes(batch, 1))
        alone = routed & (rank(total, routed) == 0) & ~reached.any(-1, keepdim=True)
        return Active(reached | alone)


@dataclass(frozen=True, slots=True)
class VotedBy(Select):
    """Every expert with a positive score under another rule than the policy's score, which then only ranks."""

    rule: Score

    @property
    def needs(self) -> frozenset[str]:
        return self.rule.needs

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        return Active((self.rule(batch, stats) > 0).any(-2))


FILL = Backfill("executed", everywhere=True)


@register(
    source="https://arxiv.org/abs/2606.29982, on the device",
    example="caee:theta=0.6",
    label="CAEE, device",
    tune=Tunable("theta", 0.02, 8.0),
    variants={"CAEE, device": ("caee:theta={},guard=yes", "caee:theta={},guard=no")},
)
def caee(theta: Positive, guard: bool = True) -> Policy:
    """CAEE on the device: experts with a summed score of theta, and others that make no device slower.

    `guard` adds every row's first route (ours: without it a small batch may keep nothing). Reads a placement.
    """
    return Policy(RouteScore(), CostInvariant(Threshold(theta, guard)), FILL)


@register(
    source="https://arxiv.org/abs/2606.29982, with offloaded experts",
    example="caee_offload:theta=0.8",
    label="CAEE, offload",
    tune=Tunable("theta", 0.02, 1.0),
)
def caee_offload(theta: Share) -> Policy:
    """CAEE with offloaded experts: each row's first routes up to a share theta, and others that cost no more time.

    Resident experts cost nothing. Reads a placement.
    """
    return Policy(RouteScore(), CostInvariant(VotedBy(RouteShare(theta))), FILL)
