"""BASE and its ablations: remove the experts whose absence changes the layer's output least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from moebudget.core.energy import PREDICTOR, random_features, removal_costs, unit
from moebudget.core.ops import (
    demand,
    first_routes,
    on_routes,
    rank,
)
from moebudget.core.policy import Policy, Score, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.common import RouterMass, TopBudget
from moebudget.methods.devices import Level, PerDevice
from moebudget.methods.fills import FILLS, FillName
from moebudget.methods.registry import Choice, Count, Exponent, Tunable, register

BASE_PAPER = "https://arxiv.org/abs/2609.36222"


@dataclass(frozen=True, slots=True)
class PredictedEnergy(Score):
    """BASE's removal cost, D_u = sum_t w_tu^2 exp(a_u . z_t/|z_t| + b_u), https://arxiv.org/abs/2609.36222, eq. 7.

    a_u [N, d] and b_u [N] predict log |E_u(z)|^2. The exponent is taken of the predicted log energy as the paper
    does, so it is a geometric mean; the paper's lambda is not published (see docs, calibration).
    """

    needs: ClassVar[frozenset[str]] = PREDICTOR

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return removal_costs(batch, stats)


@dataclass(frozen=True, slots=True)
class SquaredWeight(Score):
    """w_tu^2: removal cost if every expert's output had the same norm (BASE's ablation "squared sum")."""

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_routes(batch, batch.weights.square())


@dataclass(frozen=True, slots=True)
class StaticEnergy(Score):
    """w_tu^2 mu_u with mu_u = E |E_u(z)|^2 over calibration tokens routed to u (BASE's ablation "static")."""

    needs: ClassVar[frozenset[str]] = frozenset({"energy_mean"})

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        return on_routes(batch, batch.weights.square() * stats["energy_mean"].float()[batch.ids])


@dataclass(frozen=True, slots=True)
class NonlinearEnergy(Score):
    """BASE's removal cost with a nonlinear predictor, log e_u = c_u . [zbar, relu(F zbar)] + b_u, zbar = z/|z|.

    The paper's ablation "adds a shared nonlinear residual" and says no more. Ours: F [h, d] is random and shared, each
    expert has its own readout of the features, fitted by the same ridge regression.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"nonlinear_features", "nonlinear_weight", "nonlinear_bias"})

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        x = random_features(unit(batch.hidden), stats["nonlinear_features"])  # [T, d + h]
        log_energy = x @ stats["nonlinear_weight"].float().T + stats["nonlinear_bias"].float()  # [T, N]
        return on_routes(batch, batch.weights.square() * log_energy.gather(-1, batch.ids).exp())


@dataclass(frozen=True, slots=True)
class TrueEnergy(Score):
    """D*_u = sum_t w_tu^2 |E_u(z_t)|^2 with the outputs themselves: what BASE's predictor estimates (eq. 11).

    For analysis: it needs every route's output before deciding which to leave out.
    """

    needs_energy: ClassVar[bool] = True

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        if batch.energy is None:
            raise ValueError(
                "the oracle score needs the experts' true output energies, which only analysis runs compute: "
                "use it with moebudget.attach or `moebudget eval`, or take base(budget=...) to serve"
            )
        return on_routes(batch, batch.weights.square() * batch.energy)


# Removal costs by the policy that budgets with them.
COSTS: dict[str, Score] = {
    "base": PredictedEnergy(),
    "static": StaticEnergy(),
    "squared": SquaredWeight(),
    "router_mass": RouterMass(),
}
CostName = Annotated[str, Choice(COSTS)]


@dataclass(frozen=True, slots=True)
class Relative(Score):
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


def predicted_cost(relative: float) -> Score:
    """BASE's removal cost; with `relative` above 0, every row's costs over their sum to that power (ours)."""
    return Relative(PredictedEnergy(), relative) if relative else PredictedEnergy()


def leveled(select: Select, level: bool) -> Select:
    """With `level`, devices that fetch fewer experts than the fullest one are filled up to its load (CAEE)."""
    return Level(select) if level else select


@dataclass(frozen=True, slots=True)
class DeviceBudget(Select):
    """The `budget` experts with the largest sums of every device: so at most that many on the fullest one (ours).

    XShare's algorithm 6 without a warm-up, which could exceed the cap. `budget` may be a tensor, as of `TopBudget`.
    """

    budget: int | Tensor
    needs: ClassVar[frozenset[str]] = frozenset({"placement_device"})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        return PerDevice(0, self.budget, additive=False)(scores, batch, stats)


@dataclass(frozen=True, slots=True)
class UnionSize(Select):
    """As many experts as the union of the rows' first k0 routes holds, but those with the largest total.

    The budget of BASE's selection ablation (https://arxiv.org/abs/2609.36222, table 2, with k0 = 1).
    """

    k0: int = 1

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        return Active(candidate & (rank(total, candidate) < first_routes(batch, self.k0).sum(-1, keepdim=True)))


@register(
    source=BASE_PAPER + ", sections 3.2 and 3.3",
    example="base:budget=8",
    label="BASE",
    tune=Tunable("budget", 1, "N", counts=True),
)
def base(budget: Count, fill: FillName = "native", relative: Exponent = 0.0, level: bool = False) -> Policy:
    """BASE: the `budget` experts with the largest predicted removal cost, sum_t w_tu^2 e_u(z_t).

    `fill` is "native" in the paper; "executed", "drop" and "substitute" are its ablations. `relative` (ours): each
    row's costs are divided by their sum to this power. `level` fills up the devices that fetch fewer experts than the
    fullest one, as CAEE does; it reads a placement.
    """
    return Policy(predicted_cost(relative), leveled(TopBudget(budget), level), FILLS[fill])


@register(
    source=BASE_PAPER + ", section 5, table 2",
    example="router_mass:budget=8",
    label="router mass",
    tune=Tunable("budget", 1, "N", counts=True),
)
def router_mass(budget: Count, fill: FillName = "native") -> Policy:
    """The `budget` experts with the largest sum of router weights over the batch's routes, sum_t w_tu."""
    return Policy(RouterMass(), TopBudget(budget), FILLS[fill])


@register(
    source=BASE_PAPER + ", section 5, table 2",
    example="squared:budget=8",
    label="squared weights",
    tune=Tunable("budget", 1, "N", counts=True),
)
def squared(budget: Count, fill: FillName = "native") -> Policy:
    """The `budget` experts with the largest sum_t w_tu^2."""
    return Policy(SquaredWeight(), TopBudget(budget), FILLS[fill])


@register(
    source=BASE_PAPER + ", section 5, table 2",
    example="static:budget=8",
    label="mean energy",
    tune=Tunable("budget", 1, "N", counts=True),
)
def static(budget: Count, fill: FillName = "native") -> Policy:
    """The `budget` experts with the largest sum_t w_tu^2 mu_u, mu_u the expert's mean output energy."""
    return Policy(StaticEnergy(), TopBudget(budget), FILLS[fill])


@register(
    source=BASE_PAPER + ", section 5, table 2",
    example="nonlinear:budget=8",
    label="BASE, nonlinear",
    tune=Tunable("budget", 1, "N", counts=True),
)
def nonlinear(budget: Count, fill: FillName = "native") -> Policy:
    """BASE with a nonlinear energy predictor: random features beside the linear ones (its ablation, our form)."""
    return Policy(NonlinearEnergy(), TopBudget(budget), FILLS[fill])


@register(
    source=BASE_PAPER + ", eq. 11",
    example="oracle:budget=8",
    label="true energy (bound)",
    tune=Tunable("budget", 1, "N", counts=True),
)
def oracle(budget: Count, fill: FillName = "native") -> Policy:
    """BASE with true instead of predicted output energies: the bound of any energy predictor. Analysis only."""
    return Policy(TrueEnergy(), TopBudget(budget), FILLS[fill])


@register(
    source="ours, after " + BASE_PAPER,
    example="base_ep:budget=4",
    label="BASE, per device",
    tune=Tunable("budget", 1, "N"),
)
def base_ep(budget: Count, fill: FillName = "native", relative: Exponent = 0.0) -> Policy:
    """BASE for expert parallelism (ours): of every device the `budget` experts with the largest removal costs.

    A step waits for the device that fetches most, and that one fetches at most `budget`. Reads a placement.
    """
    return Policy(predicted_cost(relative), DeviceBudget(budget), FILLS[fill])
