"""ExFold: lost routes fold into the closest expert of a pool, scaled by a calibrated number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget.core.ops import (
    by_weight,
    kept_routes,
    on_routes,
)
from moebudget.core.policy import Fill, Policy, Score
from moebudget.core.types import Active, LayerStats, RouterBatch, Routing
from moebudget.methods.common import NormMass, Profile, TopBudget, Voted
from moebudget.methods.fills import finish
from moebudget.methods.registry import Count, Tunable, register

PAPER = "https://arxiv.org/abs/2608.24938"
UNSEEN = 1e30  # fold_loss of a pair that was never routed together


@dataclass(frozen=True, slots=True)
class HeaviestRoutes(Score):
    """1 for the p heaviest routes of a row: what ExFold's prefill rule keeps (by weight, as the authors do)."""

    p: int

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_routes(batch, by_weight(batch) < self.p)


@dataclass(frozen=True, slots=True)
class Fold(Fill):
    """Each route u outside the set goes to v = argmin_{v in A} loss[u, v] with weight w s[u, v]; no renormalisation.

    ExFold, https://arxiv.org/abs/2608.24938: `fold_scale` [N, N] is the s that brings s E_v(z) closest to E_u(z),
    `fold_loss` [N, N] what remains. A pair never routed together (loss 1e30) is left out. An expert may come twice in
    a row; weights add and may be negative. With `by_row`, the routes with a score of 0 are folded into the row's
    other ones instead (their prefill rule).
    """

    by_row: bool = False
    needs: ClassVar[frozenset[str]] = frozenset({"fold_scale", "fold_loss"})

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        loss, scale = stats["fold_loss"].float(), stats["fold_scale"].float()
        kept = kept_routes(active, batch)
        if not self.by_row:
            best = torch.where(active.mask[..., None, :], loss, UNSEEN).min(-1)  # [N]
            remains, target = (x[..., None, :].expand(batch.probs.shape).gather(-1, batch.ids) for x in best)
        else:
            kept = kept & (scores.gather(-1, batch.ids) > 0)
            by_id = batch.ids.sort(-1)  # so that ties go to the lower expert, not to the lower slot
            pair = loss[batch.ids[..., :, None], by_id.values[..., None, :]]  # [T, K, K]
            best = torch.where(kept.gather(-1, by_id.indices)[..., None, :], pair, UNSEEN).min(-1)
            target, remains = by_id.values.gather(-1, best.indices), best.values
        used = kept | (remains < UNSEEN)
        ids = torch.where(kept, batch.ids, target)
        weights = torch.where(kept, batch.weights, batch.weights * scale[batch.ids, target])
        return finish(ids, weights, used, kept, active, batch, "native")


@register(source=PAPER, example="exfold:budget=8", label="ExFold", tune=Tunable("budget", 1, "N", counts=True))
def exfold(budget: Count) -> Policy:
    """ExFold: the `budget` experts with the largest sum_t w_tu n_u; routes outside fold into the closest of the pool.

    The dynamic pool (their D). An expert may come twice in a row.
    """
    return Policy(NormMass(), TopBudget(budget), Fold())


@register(source=PAPER, example="exfold_static:budget=8", label="ExFold, static pool", tune=Tunable("budget", 1, "N"))
def exfold_static(budget: Count) -> Policy:
    """ExFold's static profile: the `budget` experts with the largest mean output norm, the same at every step."""
    return Policy(Profile("output_norm"), TopBudget(budget), Fold())


@register(
    source=PAPER, example="exfold_prefill:p=4", label="ExFold, prefill rule in decode", tune=Tunable("p", 1, "K")
)
def exfold_prefill(p: Count) -> Policy:
    """ExFold's prefill rule: a row's p heaviest routes stay, the others fold into the closest of them."""
    return Policy(HeaviestRoutes(p), Voted(), Fold(by_row=True))
