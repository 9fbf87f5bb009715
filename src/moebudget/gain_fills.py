"""Fills around another fill: weights that are corrected, and what is known of the experts that a row does not run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget.fill import Backfill, Fill, executed_experts, widen
from moebudget.score import PredictedEnergy, log_energies, on_routes
from moebudget.types import Active, LayerStats, RouterBatch, Routing


def rescaled(routing: Routing, batch: RouterBatch, factor: Tensor) -> Routing:
    """The weights times factor [T, 1] in the voting rows that do not run just what the model itself would."""
    ids, weights = widen(batch.ids, batch.weights, routing.ids.shape[-1])
    same = ((routing.ids == ids) & (routing.weights == weights)).all(-1, keepdim=True)
    keep = same | ~batch.live[..., None]
    return dataclasses.replace(routing, weights=torch.where(keep, routing.weights, routing.weights * factor))


@dataclass(frozen=True, slots=True)
class EnergyGain:
    """Another fill, and a row's weights scaled so that its output keeps the energy that BASE predicts (ours).

        w'_tv = f_t w_tv,   f_t = min(cap, sqrt(sum_{u in R_t} w_tu^2 e_u(z_t) / sum_{v in R'_t} w_tv^2 e_v(z_t)))

    with the model's own weights and routes R_t above and the executed ones below. Outputs of different experts are
    taken as orthogonal. A row that runs just its own routes keeps their weights bit for bit.
    """

    fill: Fill = dataclasses.field(default_factory=Backfill)
    cap: float = 1.25

    @property
    def needs(self) -> frozenset[str]:
        return self.fill.needs | PredictedEnergy.needs

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = self.fill(active, batch, stats)
        energy = log_energies(batch, stats).exp()  # [T, N]
        native = (batch.weights.square() * energy.gather(-1, batch.ids)).sum(-1, keepdim=True)
        executed = (routing.weights.square() * energy.gather(-1, routing.ids)).sum(-1, keepdim=True)
        factor = (native / executed.clamp_min(torch.finfo(torch.float32).tiny)).sqrt().clamp_max(self.cap)
        return rescaled(routing, batch, factor)


@dataclass(frozen=True, slots=True)
class ByLayer:
    """Each row runs the K experts of the set that it ranks highest; the layer decides by what weights are divided.

        w_tv = p_tv / (P_t^(1-x) Q_t^x),   P_t = sum_{u in R_t} p_tu, Q_t = sum_{v in R'_t} p_tv

    The statistic `layer_fill` [N] holds the layer's exponent x for sets of 1 to N experts: 0 is `original`, 1/2 is
    `half`, 1 is `executed` (`moebudget allocate --fill by_layer`). Models that do not renormalise divide by nothing.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"layer_fill"})

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = Backfill()(active, batch, stats)
        if not batch.renormalize:
            return routing
        size = (active.mask.sum(-1) - 1).clamp_min(0)  # [...]
        exponent = stats["layer_fill"].float().index_select(0, size.flatten()).view(size.shape)[..., None, None]
        executed = routing.weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return rescaled(routing, batch, (batch.weights.sum(-1, keepdim=True) / executed).pow(exponent))


@dataclass(frozen=True, slots=True)
class Sketch:
    """Another fill, and for every route that it does not run a linear map of low rank in its expert's place (ours).

        shift_t = sum_{u in R_t not run} w_tu B_u^T A_u [z_t, 1]

    `sketch_in` A_u [N, r, d + 1] and `sketch_out` B_u [N, r, d] are fitted in decode mode on the routes that a budget
    loses, so that E_u(z) is met best where it is missing (`moebudget sketch`). A lost expert costs r (2 d + 1)
    numbers, where running it costs 3 d times its width.
    """

    fill: Fill = dataclasses.field(default_factory=Backfill)

    @property
    def needs(self) -> frozenset[str]:
        return self.fill.needs | {"sketch_in", "sketch_out"}

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = self.fill(active, batch, stats)
        runs = executed_experts(routing, batch)
        lost = torch.where(runs, 0.0, on_routes(batch, batch.weights))  # [T, N]
        z = torch.where(batch.live[..., None], batch.hidden.float(), 0.0)
        read, written = stats["sketch_in"].float(), stats["sketch_out"].float()
        inner = z @ read[..., :-1].flatten(0, 1).mT + read[..., -1].flatten()  # [T, N r]
        inner = inner.unflatten(-1, read.shape[:2]) * lost[..., None]  # [T, N, r]
        return dataclasses.replace(routing, shift=inner.flatten(-2) @ written.flatten(0, 1))
