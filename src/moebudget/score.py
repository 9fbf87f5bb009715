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

    @property
    def needs(self) -> frozenset[str]: ...
    @property
    def needs_energy(self) -> bool: ...

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor: ...


def on_routes(batch: RouterBatch, values: Tensor) -> Tensor:
    """Spread values [T, K] of the model's own routes over [T, N]; rows that do not vote become 0."""
    votes = torch.where(batch.live[..., None], values.float(), 0.0)
    return torch.zeros_like(batch.probs).scatter(-1, batch.ids, votes)


def on_all(batch: RouterBatch, values: Tensor) -> Tensor:
    """Values [T, N] of every expert that the row may run; rows that do not vote and closed groups become 0."""
    return torch.where(batch.live[..., None] & (batch.choice > -torch.inf), values.float(), 0.0)


def until_share(values: Tensor, share: float, total: Tensor) -> Tensor:
    """values [T, K] -> bool: the first of them up to the one with which their sum reaches share * total [T, 1]."""
    before = values.double().cumsum(-1).roll(1, -1)
    first = torch.arange(values.shape[-1], device=values.device) == 0
    return first | (before < share * total.double())


def unit(hidden: Tensor) -> Tensor:
    """[T, d] -> rows of length 1, float32."""
    z = hidden.float()
    length: Tensor = z.norm(dim=-1, keepdim=True)
    return z / length.clamp_min(torch.finfo(torch.float32).tiny)


def random_features(z: Tensor, features: Tensor) -> Tensor:
    """Rows [T, d] of length 1 and features [h, d] -> [T, d + h]: the row itself and relu(features z)."""
    return torch.cat([z, (z @ features.float().mT).relu()], -1)


def _squared_weights(batch: RouterBatch) -> Tensor:
    return batch.weights.square()  # [T, K]


@dataclass(frozen=True, slots=True)
class RouteRank:
    """1 for the first n_t routes of a row: membership of its top-k0. Read by `Voted`, it gives OEA's base set.

    n_t = min(k0, least rank at which the row's scores add up to p of their sum over all N). OEA,
    https://arxiv.org/abs/2511.02237, phase 1; p = 1 is the simplified form. A k0 above K means K.
    """

    k0: int
    p: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset()
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:  # noqa: ARG002
        first = torch.arange(batch.ids.shape[-1], device=batch.ids.device) < self.k0
        first = first.expand_as(batch.weights)
        if self.p < 1:
            own = batch.probs.gather(-1, batch.ids)
            first = first & until_share(own, self.p, batch.probs.double().sum(-1, keepdim=True))
        return on_routes(batch, first)


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


def log_energies(batch: RouterBatch, stats: LayerStats) -> Tensor:
    """log e_u(z_t) = a_u . z_t/|z_t| + b_u of every expert, [T, N]; see `PredictedEnergy`."""
    z = unit(batch.hidden)  # [T, d]
    return z @ stats["predictor_weight"].float().T + stats["predictor_bias"].float()


@dataclass(frozen=True, slots=True)
class PredictedEnergy:
    """BASE's removal cost, D_u = sum_t w_tu^2 exp(a_u . z_t/|z_t| + b_u), https://arxiv.org/abs/2609.36222, eq. 7.

    a_u [N, d] and b_u [N] predict log |E_u(z)|^2. The exponent is taken of the predicted log energy as the paper
    does, so it is a geometric mean; the paper's lambda is not published (see docs, calibration).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"predictor_weight", "predictor_bias"})
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        energy = log_energies(batch, stats).gather(-1, batch.ids).exp()
        return on_routes(batch, _squared_weights(batch) * energy)


@dataclass(frozen=True, slots=True)
class NonlinearEnergy:
    """BASE's removal cost with a nonlinear predictor, log e_u = c_u . [zbar, relu(F zbar)] + b_u, zbar = z/|z|.

    The paper's ablation "adds a shared nonlinear residual" and says no more. Ours: F [h, d] is random and shared, each
    expert has its own readout of the features, fitted by the same ridge regression.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"nonlinear_features", "nonlinear_weight", "nonlinear_bias"})
    needs_energy: ClassVar[bool] = False

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        x = random_features(unit(batch.hidden), stats["nonlinear_features"])  # [T, d + h]
        log_energy = x @ stats["nonlinear_weight"].float().T + stats["nonlinear_bias"].float()  # [T, N]
        return on_routes(batch, _squared_weights(batch) * log_energy.gather(-1, batch.ids).exp())


@dataclass(frozen=True, slots=True)
class Relative:
    """Another score, each row divided by its sum to a power: c_tu / (sum_v c_tv)^exponent (ours).

    For removal costs the sum is about |y_t|^2, the squared norm of the layer's output for the row (outputs are nearly
    orthogonal): with exponent 1 every row has the same say, with 0 rows of large outputs decide.
    """

    score: Score
    exponent: float

    @property
    def needs(self) -> frozenset[str]:
        return self.score.needs

    @property
    def needs_energy(self) -> bool:
        return self.score.needs_energy

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        cost = self.score(batch, stats)
        total = cost.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        return cost / total.pow(self.exponent)


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


# Removal costs by the preset that budgets with them.
COSTS: dict[str, Score] = {
    "base": PredictedEnergy(),
    "static": StaticEnergy(),
    "squared": SquaredWeight(),
    "router_mass": RouterMass(),
}
