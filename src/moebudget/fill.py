"""Fills: re-route every row inside the active set. Ids are inside the set; a slot of weight 0 is unused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from moebudget.score import PredictedEnergy, Score
from moebudget.select import rank
from moebudget.types import Active, LayerStats, RouterBatch, Routing

UNSEEN = 1e30  # fold_loss of a pair that was never routed together

Denominator = Literal["original", "executed", "preserved", "half"]


class Fill(Protocol):
    """One rule. `needs` names the calibrated tensors it reads, exactly."""

    @property
    def needs(self) -> frozenset[str]: ...

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing: ...


def executed_experts(routing: Routing, batch: RouterBatch) -> Tensor:
    """[T, N] bool: the experts whose output a row takes, so not those that only an unused slot names."""
    return torch.zeros_like(batch.probs).scatter_add(-1, routing.ids, (routing.weights != 0).float()) > 0


def kept_routes(active: Active, batch: RouterBatch) -> Tensor:
    """[T, K] bool: which of the model's own routes lie inside the set."""
    return _inside(active, batch).gather(-1, batch.ids)


def _inside(active: Active, batch: RouterBatch) -> Tensor:
    return active.mask[..., None, :].expand(batch.probs.shape)  # [T, N]


def _lone_expert(active: Active, batch: RouterBatch) -> Tensor:
    """[T] the expert of the set that the row weighs highest, whatever its group; the lowest of the set on NaN."""
    return torch.where(_inside(active, batch), batch.probs.nan_to_num(0.0), -1.0).argmax(-1)


def widen(ids: Tensor, weights: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """[..., K] -> [..., slots], at least K: more slots, unused, that repeat the first id; a row with NaN stays NaN."""
    more = slots - ids.shape[-1]
    if more <= 0:
        return ids, weights
    shape = (*ids.shape[:-1], more)
    empty = torch.where(weights[..., :1].isnan(), weights[..., :1], 0.0)
    return torch.cat([ids, ids[..., :1].expand(shape)], -1), torch.cat([weights, empty.expand(shape)], -1)


def _finish(
    ids: Tensor,
    weights: Tensor,
    used: Tensor,
    unchanged: Tensor,
    active: Active,
    batch: RouterBatch,
    denominator: Denominator,
) -> Routing:
    """Close unused slots, give a row without any expert its best one of the set, apply the denominator.

    ids, weights (over the original denominator) and used are [T, K]; unchanged is [T, 1]: rows that keep the model's
    own routes bit for bit. More slots than K (ids [T, K'] with K' > K) are filled up for those rows.
    """
    lone = _lone_expert(active, batch)[..., None]  # [T, 1]
    empty = ~used.any(-1, keepdim=True)  # [T, 1]
    first = torch.where(empty, lone, ids.gather(-1, used.to(torch.uint8).argmax(-1, keepdim=True)))
    ids = torch.where(used, ids, first)
    weights = torch.where(used, weights, 0.0)
    slot0 = torch.arange(ids.shape[-1], device=ids.device) == 0
    weights = torch.where(empty & slot0, batch.probs.gather(-1, lone) * batch.factor[..., None], weights)
    if denominator == "preserved" or (denominator == "executed" and batch.renormalize):
        executed = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        weights = weights * (batch.weights.sum(-1, keepdim=True) / executed)
    elif denominator == "half" and batch.renormalize:
        executed = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        weights = weights * (batch.weights.sum(-1, keepdim=True) / executed).sqrt()
    own_ids, own_weights = widen(batch.ids, batch.weights, ids.shape[-1])
    ids, weights = torch.where(unchanged, own_ids, ids), torch.where(unchanged, own_weights, weights)
    votes = batch.live[..., None]
    executed = torch.zeros_like(batch.probs, dtype=torch.bool).scatter(-1, ids, votes.expand_as(ids)).any(-2)
    idle = _lone_expert(Active(executed), batch)[..., None]  # the set may hold experts that no row runs
    return Routing(torch.where(votes, ids, idle), torch.where(votes, weights, own_weights))


@dataclass(frozen=True, slots=True)
class Backfill:
    """Each row runs the K experts of the set that it ranks highest; nothing new is fetched.

    original: w_tv = p_tv / sum_{u in R_t} p_tu, the denominator of the model's own routes R_t (BASE, section 3.3).
    executed: w_tv = p_tv / sum_{u in R'_t} p_tu, renormalised over the executed experts (OEA, eq. 1).
    half: the geometric mean of these two denominators (ours), so a row's weights sum to the root of what `original`
    leaves of them. For models that do not renormalise all three are w = p times the model's scale.
    preserved: renormalised so that the row's weights add up to what the model's own did, in every model (Lynx).

    At most `k_max` experts a row (None: K), and only a row's `max_rank` best of all N (None: any): OEA,
    https://arxiv.org/abs/2511.02237, phase 2. `everywhere` ranks by the score alone, without selection bias and across
    closed groups, as CAEE does on purpose; rows that keep all their own routes stay as they are.
    """

    denominator: Denominator = "original"
    k_max: int | None = None
    max_rank: int | None = None
    everywhere: bool = False
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:  # noqa: ARG002
        allowed = _inside(active, batch)
        order = batch.probs if self.everywhere else batch.choice
        if self.max_rank is not None:
            everyone = torch.ones_like(allowed)
            allowed = allowed & (rank(order, everyone) < self.max_rank)
        best = torch.where(allowed, order, -torch.inf).sort(dim=-1, descending=True, stable=True)
        slots, k = max(batch.ids.shape[-1], self.k_max or 0), self.k_max or batch.ids.shape[-1]
        ids, used = (x[..., :slots] for x in (best.indices, best.values > -torch.inf))
        used = used & (torch.arange(used.shape[-1], device=used.device) < k)
        weights = batch.probs.gather(-1, ids) * batch.factor[..., None]
        return _finish(ids, weights, used, self._unchanged(active, batch, used), active, batch, self.denominator)

    def _unchanged(self, active: Active, batch: RouterBatch, used: Tensor) -> Tensor:
        """[T, 1]: the row runs its own routes and nothing else."""
        same = used.sum(-1, keepdim=True) == batch.ids.shape[-1]
        return kept_routes(active, batch).all(-1, keepdim=True) & same


@dataclass(frozen=True, slots=True)
class Drop:
    """Each row runs those of its own routes that are in the set, with the model's own weights (BASE's ablation).

    A row that loses every route runs the one expert of the set that it weighs highest.
    """

    denominator: Denominator = "original"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:  # noqa: ARG002
        used = kept_routes(active, batch)
        return _finish(batch.ids, batch.weights, used, used.all(-1, keepdim=True), active, batch, self.denominator)


@dataclass(frozen=True, slots=True)
class OwnRoutes:
    """Each row runs those of its own routes that `keep` scores above 0 and nothing else: top-k reduction, skipping."""

    keep: Score
    denominator: Denominator = "executed"

    @property
    def needs(self) -> frozenset[str]:
        return self.keep.needs

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:
        used = kept_routes(active, batch) & (self.keep(batch, stats).gather(-1, batch.ids) > 0)
        return _finish(batch.ids, batch.weights, used, used.all(-1, keepdim=True), active, batch, self.denominator)


@dataclass(frozen=True, slots=True)
class Substitute:
    """Each route outside the set goes to the most similar expert that may stand in, and keeps its weight.

    u -> argmax_{v in anchors} sim[u, v], statistic [N, N]. An expert may come twice in a row; its weights add. SERE,
    https://arxiv.org/abs/2602.07616; BASE's ablation "substitution".
    """

    statistic: str = "similarity_frobenius"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.statistic})

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:
        anchors = active.mask if active.anchors is None else active.anchors
        alike = torch.where(anchors[..., None, :], stats[self.statistic].float(), -torch.inf)  # [N, N]
        stand_in = alike.argmax(-1)  # [N]
        kept = kept_routes(active, batch)
        table = stand_in[..., None, :].expand(batch.probs.shape)
        ids = torch.where(kept, batch.ids, table.gather(-1, batch.ids))
        used = kept | anchors.any(-1)[..., None, None]
        return _finish(ids, batch.weights, used, kept.all(-1, keepdim=True), active, batch, "original")


@dataclass(frozen=True, slots=True)
class Fold:
    """Each route u outside the set goes to v = argmin_{v in A} loss[u, v] with weight w s[u, v]; no renormalisation.

    ExFold, https://arxiv.org/abs/2608.24938: `fold_scale` [N, N] is the s that brings s E_v(z) closest to E_u(z),
    `fold_loss` [N, N] what remains. A pair never routed together (loss 1e30) is left out. An expert may come twice in
    a row; weights add and may be negative. With `keep`, the routes that `keep` scores 0 are folded into the row's
    other ones instead (their prefill rule).
    """

    keep: Score | None = None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"fold_scale", "fold_loss"}) | (frozenset() if self.keep is None else self.keep.needs)

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:
        loss, scale = stats["fold_loss"].float(), stats["fold_scale"].float()
        kept = kept_routes(active, batch)
        if self.keep is None:
            best = torch.where(active.mask[..., None, :], loss, UNSEEN).min(-1)  # [N]
            remains, target = (x[..., None, :].expand(batch.probs.shape).gather(-1, batch.ids) for x in best)
        else:
            kept = kept & (self.keep(batch, stats).gather(-1, batch.ids) > 0)
            by_id = batch.ids.sort(-1)  # so that ties go to the lower expert, not to the lower slot
            pair = loss[batch.ids[..., :, None], by_id.values[..., None, :]]  # [T, K, K]
            best = torch.where(kept.gather(-1, by_id.indices)[..., None, :], pair, UNSEEN).min(-1)
            target, remains = by_id.values.gather(-1, best.indices), best.values
        used = kept | (remains < UNSEEN)
        ids = torch.where(kept, batch.ids, target)
        weights = torch.where(kept, batch.weights, batch.weights * scale[batch.ids, target])
        return _finish(ids, weights, used, kept.all(-1, keepdim=True), active, batch, "original")


@dataclass(frozen=True, slots=True)
class StandIn:
    """Another fill, and something for every route that it does not run: its expert's mean direction, as long as BASE
    predicts (ours).

        shift_t = sum_{u in R_t not run} w_tu sqrt(e_u(z_t)) d_u,   d_u = E[E_u(z) / |E_u(z)|]

    The statistic `output_direction` [N, d] holds d_u, over calibration tokens routed to u. It costs no expert: d
    numbers a lost route, where an expert is 3 d times its width.
    """

    fill: Fill = Backfill()

    @property
    def needs(self) -> frozenset[str]:
        return self.fill.needs | PredictedEnergy.needs | {"output_direction"}

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = self.fill(active, batch, stats)
        runs = executed_experts(routing, batch)
        length = torch.where(runs, 0.0, PredictedEnergy()(batch, stats).sqrt())  # [T, N], 0 off the model's routes
        return dataclasses.replace(routing, shift=length @ stats["output_direction"].float())
