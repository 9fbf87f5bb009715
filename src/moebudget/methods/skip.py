"""Dynamic skipping: a token leaves out routes that are much lighter than its heaviest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moebudget.core.ops import (
    by_weight,
    on_routes,
)
from moebudget.core.policy import Policy, Score
from moebudget.core.types import LayerStats, RouterBatch
from moebudget.methods.common import Voted
from moebudget.methods.fills import NativeRoutes
from moebudget.methods.registry import Positive, Tunable, register


@dataclass(frozen=True, slots=True)
class KeptRatio(Score):
    """1 for the routes that dynamic skipping keeps: w_tj >= scale beta_j w_t1, and the heaviest always.

    beta_j is the median over calibration tokens of the j-th route's weight over the heaviest's (`route_ratio` [K]). Lu
    et al., https://arxiv.org/abs/2402.14800, section 3.3, have K = 2 and scale = 1; one median a rank is our
    extension to more routes.
    """

    scale: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset({"route_ratio"})

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        heaviest = batch.weights.amax(-1, keepdim=True)
        least = self.scale * stats["route_ratio"].float()[by_weight(batch)] * heaviest  # [T, K]
        return on_routes(batch, (batch.weights >= least) | (batch.weights == heaviest))


@register(
    source="Lu et al., https://arxiv.org/abs/2402.14800, section 3.3",
    example="skip:scale=1",
    label="dynamic skipping",
    tune=Tunable("scale", 0.1, 6.0),
)
def skip(scale: Positive = 1.0) -> Policy:
    """Dynamic skipping: a route much lighter than the row's heaviest is left out, the rest renormalised.

    The threshold is the median ratio on calibration tokens, here times `scale`.
    """
    return Policy(KeptRatio(scale), Voted(), NativeRoutes())
