"""Scores: how much it would cost the batch to lose an expert, for every row and expert, [T, N] float32.

A score is 0 where the expert is no candidate. Rows that do not vote score 0 everywhere, whatever they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from moebudget.types import LayerStats, RouterBatch

BASE_PAPER = "https://arxiv.org/abs/2609.36222"


class Score(Protocol):
    """One rule. `needs` names the calibrated tensors it reads, exactly; `needs_energy`: it reads `batch.energy`."""

    needs: ClassVar[frozenset[str]]
    needs_energy: ClassVar[bool]

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor: ...


def on_routes(batch: RouterBatch, values: Tensor) -> Tensor:
    """Spread values [T, K] of the model's own routes over [T, N]; rows that do not vote become 0."""
    votes = torch.where(batch.live[..., None], values.float(), 0.0)
    return torch.zeros_like(batch.probs).scatter(-1, batch.ids, votes)


def _squared_weights(batch: RouterBatch) -> Tensor:
    return batch.weights.square()  # [T, K]


@dataclass(frozen=True, slots=True)
class RouteRank:
    """1 for the first k0 routes of a row: membership of its top-k0. Read by `Voted`, it gives OEA's base set.

    OEA, https://arxiv.org/abs/2511.02237, phase 1 in the simplified form (p = 1).
    """

    k0: int
    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        first = torch.arange(batch.ids.shape[-1], device=batch.ids.device) < self.k0
        return on_routes(batch, first.float().expand_as(batch.weights))


@dataclass(frozen=True, slots=True)
class RouterMass:
    """The model's own weight, w_tu: BASE's ablation "weight sum" (section 5, table 2)."""

    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        return on_routes(batch, batch.weights)


@dataclass(frozen=True, slots=True)
class SquaredWeight:
    """w_tu^2: removal cost if every expert's output had the same norm (BASE's ablation "squared sum")."""

    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        return on_routes(batch, _squared_weights(batch))


@dataclass(frozen=True, slots=True)
class StaticEnergy:
    """w_tu^2 mu_u with mu_u = E |E_u(z)|^2 over calibration tokens routed to u (BASE's ablation "static")."""

    needs: ClassVar[frozenset[str]] = frozenset({"energy_mean"})
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_routes(batch, _squared_weights(batch) * stats["energy_mean"].float()[batch.ids])


@dataclass(frozen=True, slots=True)
class PredictedEnergy:
    """BASE's removal cost, D_u = sum_t w_tu^2 exp(a_u . z_t/|z_t| + b_u), https://arxiv.org/abs/2609.36222, eq. 7.

    a_u [N, d] and b_u [N] predict log |E_u(z)|^2. The exponent is taken of the predicted log energy as the paper
    does, so it is a geometric mean; the paper's lambda is not published (see docs, calibration).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"predictor_weight", "predictor_bias"})
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        z = batch.hidden.float()
        z = z / z.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)  # [T, d]
        log_energy = z @ stats["predictor_weight"].float().T + stats["predictor_bias"].float()  # [T, N]
        return on_routes(batch, _squared_weights(batch) * log_energy.gather(-1, batch.ids).exp())


@dataclass(frozen=True, slots=True)
class TrueEnergy:
    """D*_u = sum_t w_tu^2 |E_u(z_t)|^2 with the outputs themselves: what BASE's predictor estimates (eq. 11).

    For analysis: it needs every route's output before deciding which to leave out.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = True

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        if batch.energy is None:
            raise ValueError(
                "the oracle score needs the experts' true output energies, which only analysis runs compute: "
                "use it with moebudget.attach or `moebudget eval`, or take base(budget=...) to serve"
            )
        return on_routes(batch, _squared_weights(batch) * batch.energy)
