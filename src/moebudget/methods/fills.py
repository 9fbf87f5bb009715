"""Fills: re-route every row inside the active set, and make up for the experts that it does not run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor

from moebudget.core.energy import PREDICTOR, log_energies, removal_costs
from moebudget.core.ops import (
    executed_experts,
    inside,
    kept_routes,
    native_rows,
    on_routes,
    rank,
    widen,
)
from moebudget.core.policy import Fill
from moebudget.core.types import Active, LayerStats, RouterBatch, Routing, RowKind
from moebudget.methods.registry import Choice

Denominator = Literal["native", "executed", "geometric", "preserved"]


def lone_expert(active: Active, batch: RouterBatch) -> Tensor:
    """[T] the expert of the set that the row weighs highest, whatever its group; the lowest of the set on NaN."""
    return torch.where(inside(active, batch), batch.probs.nan_to_num(0.0), -1.0).argmax(-1)


def finish(
    ids: Tensor,
    weights: Tensor,
    used: Tensor,
    kept: Tensor,
    active: Active,
    batch: RouterBatch,
    denominator: Denominator,
) -> Routing:
    """Close unused slots, rescue rows without any expert, apply the denominator, and restore native rows.

    ids, weights (over the native denominator) and used are [T, K'], K' at least K; kept [T, K] says which native
    routes still run as they were. A row that keeps all of them and runs nothing else gets its native ids and weights
    back bit for bit, and so do rows of kind NATIVE; a row that runs no expert of the set is given its best one.
    """
    unchanged = kept.all(-1, keepdim=True) & (used.sum(-1, keepdim=True) == batch.ids.shape[-1])  # [T, 1]
    lone = lone_expert(active, batch)[..., None]  # [T, 1]
    empty = ~used.any(-1, keepdim=True)  # [T, 1]
    first = torch.where(empty, lone, ids.gather(-1, used.to(torch.uint8).argmax(-1, keepdim=True)))
    ids = torch.where(used, ids, first)
    weights = torch.where(used, weights, 0.0)
    slot0 = torch.arange(ids.shape[-1], device=ids.device) == 0
    weights = torch.where(empty & slot0, batch.probs.gather(-1, lone) * batch.factor[..., None], weights)
    if denominator == "preserved" or (denominator == "executed" and batch.renormalize):
        executed = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        weights = weights * (batch.weights.sum(-1, keepdim=True) / executed)
    elif denominator == "geometric" and batch.renormalize:
        executed = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        weights = weights * (batch.weights.sum(-1, keepdim=True) / executed).sqrt()
    native_ids, native_weights = widen(batch.ids, batch.weights, ids.shape[-1])
    ids, weights = torch.where(unchanged, native_ids, ids), torch.where(unchanged, native_weights, weights)
    votes = batch.decode[..., None]
    executed = torch.zeros_like(batch.probs, dtype=torch.bool).scatter(-1, ids, votes.expand_as(ids)).any(-2)
    idle = lone_expert(Active(executed), batch)[..., None]  # the set may hold experts that no row runs
    idle = torch.where((batch.kind == RowKind.NATIVE.value)[..., None], native_ids, idle)
    return Routing(torch.where(votes, ids, idle), torch.where(votes, weights, native_weights))


def rescaled(routing: Routing, batch: RouterBatch, factor: Tensor) -> Routing:
    """The weights times factor [T, 1] in the decode rows that do not keep their native routes."""
    keep = (native_rows(routing, batch) | ~batch.decode)[..., None]
    return dataclasses.replace(routing, weights=torch.where(keep, routing.weights, routing.weights * factor))


@dataclass(frozen=True, slots=True)
class Backfill(Fill):
    """Each row runs the K experts of the set that it ranks highest; nothing new is fetched.

    native: w_tv = p_tv / sum_{u in R_t} p_tu, the denominator of the native routes R_t (BASE, section 3.3).
    executed: w_tv = p_tv / sum_{u in R'_t} p_tu, renormalised over the executed experts (OEA, eq. 1).
    geometric: the geometric mean of these two denominators (ours), so a row's weights sum to the root of what `native`
    leaves of them. For models that do not renormalise all three are w = p times the model's scale.
    preserved: renormalised so that the row's weights add up to the sum of its native weights, in every model (Lynx).

    At most `k_max` experts per row (None: K), and only a row's `max_rank` best of all N (None: any): OEA,
    https://arxiv.org/abs/2511.02237, phase 2. `everywhere` ranks by the score alone, without selection bias and across
    closed groups, as CAEE does on purpose; rows that keep all their native routes stay as they are.
    """

    denominator: Denominator = "native"
    k_max: int | None = None
    max_rank: int | None = None
    everywhere: bool = False

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        allowed = inside(active, batch)
        order = batch.probs if self.everywhere else batch.choice
        if self.max_rank is not None:
            everyone = torch.ones_like(allowed)
            allowed = allowed & (rank(order, everyone) < self.max_rank)
        best = torch.where(allowed, order, -torch.inf).sort(dim=-1, descending=True, stable=True)
        slots, k = max(batch.ids.shape[-1], self.k_max or 0), self.k_max or batch.ids.shape[-1]
        ids, used = (x[..., :slots] for x in (best.indices, best.values > -torch.inf))
        used = used & (torch.arange(used.shape[-1], device=used.device) < k)
        weights = batch.probs.gather(-1, ids) * batch.factor[..., None]
        return finish(ids, weights, used, kept_routes(active, batch), active, batch, self.denominator)


@dataclass(frozen=True, slots=True)
class Drop(Fill):
    """Each row runs those of its native routes that are in the set, with their native weights (BASE's ablation).

    A row that loses every route runs the one expert of the set that it weighs highest.
    """

    denominator: Denominator = "native"

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        used = kept_routes(active, batch)
        return finish(batch.ids, batch.weights, used, used, active, batch, self.denominator)


@dataclass(frozen=True, slots=True)
class NativeRoutes(Fill):
    """Each row runs its native routes with a score above 0 and nothing else: top-k reduction, skipping."""

    denominator: Denominator = "executed"

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        used = kept_routes(active, batch) & (scores.gather(-1, batch.ids) > 0)
        return finish(batch.ids, batch.weights, used, used, active, batch, self.denominator)


@dataclass(frozen=True, slots=True)
class Substitute(Fill):
    """Each route outside the set goes to the most similar anchor, and keeps its weight.

    u -> argmax_{v in anchors} sim[u, v], statistic [N, N]. An expert may come twice in a row; its weights add. SERE,
    https://arxiv.org/abs/2602.07616; BASE's ablation "substitution".
    """

    statistic: str = "similarity_frobenius"

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.statistic})

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        anchors = active.mask if active.anchors is None else active.anchors
        alike = torch.where(anchors[..., None, :], stats[self.statistic].float(), -torch.inf)  # [N, N]
        substitute = alike.argmax(-1)  # [N]
        kept = kept_routes(active, batch)
        table = substitute[..., None, :].expand(batch.probs.shape)
        ids = torch.where(kept, batch.ids, table.gather(-1, batch.ids))
        used = kept | anchors.any(-1)[..., None, None]
        return finish(ids, batch.weights, used, kept, active, batch, "native")


@dataclass(frozen=True, slots=True)
class ByLayer(Fill):
    """Each row runs the K experts of the set that it ranks highest; the layer chooses the denominator.

        w_tv = p_tv / (P_t^(1-x) Q_t^x),   P_t = sum_{u in R_t} p_tu, Q_t = sum_{v in R'_t} p_tv

    The statistic `layer_fill` [N] holds the layer's exponent x for sets of 1 to N experts: 0 is `native`, 1/2 is
    `geometric`, 1 is `executed` (`moebudget allocate --fill by_layer`). Models that do not renormalise have none.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"layer_fill"})

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = Backfill()(active, scores, batch, stats)
        if not batch.renormalize:
            return routing
        size = (active.mask.sum(-1) - 1).clamp_min(0)  # [...]
        exponent = stats["layer_fill"].float().index_select(0, size.flatten()).view(size.shape)[..., None, None]
        executed = routing.weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return rescaled(routing, batch, (batch.weights.sum(-1, keepdim=True) / executed).pow(exponent))


@dataclass(frozen=True, slots=True)
class EnergyGain(Fill):
    """Another fill, and a row's weights scaled so that its output keeps the energy that BASE predicts (ours).

        w'_tv = f_t w_tv,   f_t = min(cap, sqrt(sum_{u in R_t} w_tu^2 e_u(z_t) / sum_{v in R'_t} w_tv^2 e_v(z_t)))

    with the native weights and routes R_t above and the executed ones below. Outputs of different experts are taken
    as orthogonal. A row that keeps its native routes keeps their weights bit for bit.
    """

    fill: Fill = dataclasses.field(default_factory=Backfill)
    cap: float = 1.25

    @property
    def needs(self) -> frozenset[str]:
        return self.fill.needs | PREDICTOR

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = self.fill(active, scores, batch, stats)
        energy = log_energies(batch, stats).exp()  # [T, N]
        native = (batch.weights.square() * energy.gather(-1, batch.ids)).sum(-1, keepdim=True)
        executed = (routing.weights.square() * energy.gather(-1, routing.ids)).sum(-1, keepdim=True)
        factor = (native / executed.clamp_min(torch.finfo(torch.float32).tiny)).sqrt().clamp_max(self.cap)
        return rescaled(routing, batch, factor)


@dataclass(frozen=True, slots=True)
class MeanDirection(Fill):
    """Another fill, and for every native route that it does not run its expert's mean direction (ours).

        shift_t = sum_{u in R_t not run} w_tu sqrt(e_u(z_t)) d_u,   d_u = E[E_u(z) / |E_u(z)|]

    with the length that BASE predicts. The statistic `output_direction` [N, d] holds d_u, over calibration tokens
    routed to u. It costs no expert: d numbers per lost route, where an expert is 3 d times its width.
    """

    fill: Fill = dataclasses.field(default_factory=Backfill)

    @property
    def needs(self) -> frozenset[str]:
        return self.fill.needs | PREDICTOR | {"output_direction"}

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = self.fill(active, scores, batch, stats)
        runs = executed_experts(routing, batch)
        length = torch.where(runs, 0.0, removal_costs(batch, stats).sqrt())  # [T, N], 0 off the native routes
        return dataclasses.replace(routing, shift=length @ stats["output_direction"].float())


@dataclass(frozen=True, slots=True)
class LowRankSketch(Fill):
    """Another fill, and for every native route that it does not run a linear map of low rank (ours).

        shift_t = sum_{u in R_t not run} w_tu B_u^T A_u [z_t, 1]

    `sketch_in` A_u [N, r, d + 1] and `sketch_out` B_u [N, r, d] are fitted in decode mode on the routes that a budget
    loses, so that they are closest to E_u(z) where it is missing (`moebudget sketch`). A lost expert costs r (2 d + 1)
    numbers, where running it costs 3 d times its width.
    """

    fill: Fill = dataclasses.field(default_factory=Backfill)

    @property
    def needs(self) -> frozenset[str]:
        return self.fill.needs | {"sketch_in", "sketch_out"}

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = self.fill(active, scores, batch, stats)
        runs = executed_experts(routing, batch)
        lost = torch.where(runs, 0.0, on_routes(batch, batch.weights))  # [T, N]
        z = torch.where(batch.decode[..., None], batch.hidden.float(), 0.0)
        read, written = stats["sketch_in"].float(), stats["sketch_out"].float()
        inner = z @ read[..., :-1].flatten(0, 1).mT + read[..., -1].flatten()  # [T, N r]
        inner = inner.unflatten(-1, read.shape[:2]) * lost[..., None]  # [T, N, r]
        return dataclasses.replace(routing, shift=inner.flatten(-2) @ written.flatten(0, 1))


FILLS: dict[str, Fill] = {
    "native": Backfill("native"),
    "executed": Backfill("executed"),
    "geometric": Backfill("geometric"),
    "preserved": Backfill("preserved"),
    "drop": Drop(),
    "substitute": Substitute(),
    "mean_direction": MeanDirection(),
    "energy": EnergyGain(),
    "by_layer": ByLayer(),
    "sketch": LowRankSketch(),
}
FillName = Annotated[str, Choice(FILLS)]
