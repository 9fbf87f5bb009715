"""LayerRouter: one policy on one Mixture-of-Experts layer, with a budget and counters that live on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moebudget.fill import executed_experts
from moebudget.policy import Policy
from moebudget.select import Price, native_union
from moebudget.types import NO_STATS, LayerStats, RouterBatch, Routing

FIELDS = (
    "steps",  # decode steps with at least one voting row
    "rows",  # voting rows
    "native_union",  # distinct experts that the unchanged model would have fetched
    "fetched",  # distinct experts that were fetched
    "backfilled",  # experts that a row executes and the model had not chosen for it, over rows
    "dropped",  # the model's routes that were not executed
    "dropped_mass",  # sum over rows of the weight of those routes, as a share of the row's weight
    "rescued",  # rows that kept none of their own routes
    "nonfinite",  # real rows whose router input was not finite; they do not vote
    "unrestricted",  # steps in which nothing had to be left out
)


def fetched_experts(routing: Routing, batch: RouterBatch) -> Tensor:
    """[N] bool: experts that some row of the step executes, used or unused slot, padding included."""
    return torch.zeros_like(batch.probs, dtype=torch.bool).scatter(-1, routing.ids, True).any(-2)


def count_step(batch: RouterBatch, routing: Routing) -> Tensor:
    """The counters of each step, float64 [..., len(FIELDS)] for a batch with leading dimensions [...]."""
    live = batch.live  # [..., T]
    voting = live.any(-1)
    fetched = fetched_experts(routing, batch)
    runs = executed_experts(routing, batch)
    ran = runs.gather(-1, batch.ids)
    own = ran | (batch.weights == 0)  # leaving out a route of weight 0 changes nothing
    routed = torch.zeros_like(runs).scatter(-1, batch.ids, True)
    mass = batch.weights.abs().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    lost = torch.where(own, 0.0, batch.weights.abs()).sum(-1) / mass
    native = native_union(batch).sum(-1)
    values = (
        voting,
        live.sum(-1),
        native,
        fetched.sum(-1) * voting,
        torch.where(live, (runs & ~routed).sum(-1), 0).sum(-1),
        torch.where(live, (~own).sum(-1), 0).sum(-1),
        torch.where(live, lost, 0.0).sum(-1),
        (live & ~ran.any(-1) & (batch.weights != 0).any(-1)).sum(-1),
        batch.weights.isnan().any(-1).sum(-1),
        voting & ((~own).sum(-1) * live).sum(-1).eq(0),
    )
    return torch.stack([v.double() for v in values], -1)


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened so far, over all layers. Means are per layer and step."""

    layers: int
    totals: dict[str, float]
    by_layer: tuple[float, ...] = ()  # distinct experts fetched in all steps, one number a layer

    def _mean(self, name: str, over: str = "steps") -> float:
        return self.totals[name] / self.totals[over] if self.totals[over] else float("nan")

    @property
    def steps(self) -> int:
        """Decode steps in which the policy was active (of the layer that saw most; all see the same)."""
        return round(self.totals["steps"] / self.layers) if self.layers else 0

    @property
    def fetched(self) -> float:
        """Distinct experts fetched, mean over layers and steps."""
        return self._mean("fetched")

    @property
    def fetched_by_layer(self) -> list[float]:
        """Distinct experts fetched a step, one number a layer; empty if nothing was counted."""
        return [count / self.steps for count in self.by_layer] if self.steps else []

    @property
    def native_union(self) -> float:
        """Distinct experts that the unchanged model would have fetched, mean over layers and steps."""
        return self._mean("native_union")

    @property
    def rows(self) -> float:
        """Voting rows a step."""
        return self._mean("rows")

    @property
    def dropped_mass(self) -> float:
        """Share of a row's own routing weight that was not executed, mean over rows and layers."""
        return self._mean("dropped_mass", "rows")

    def as_dict(self) -> dict[str, float]:
        """Totals by name, and the means that people read."""
        means = {"fetched_mean": self.fetched, "native_union_mean": self.native_union, "rows_mean": self.rows}
        return {"layers": self.layers, **self.totals, **means}

    def __str__(self) -> str:
        t = self.totals
        return (
            f"{self.steps} decode steps x {self.layers} layers, {self.rows:.1f} rows a step: "
            f"{self.fetched:.2f} experts fetched a layer and step (unchanged model: {self.native_union:.2f}), "
            f"{100 * self.dropped_mass:.1f} % of the routing weight dropped, {t['backfilled']:.0f} routes backfilled, "
            f"{t['rescued']:.0f} rows rescued, {t['nonfinite']:.0f} not finite"
        )


def read_counters(layers: list[LayerRouter]) -> Counters:
    """Sum the layers' device counters; this is the one place that reads them on the host."""
    counts = torch.stack([torch.zeros(len(FIELDS), dtype=torch.float64), *(layer.totals.cpu() for layer in layers)])
    by_layer = counts[1:, FIELDS.index("fetched")].tolist()
    return Counters(len(layers), dict(zip(FIELDS, counts.sum(0).tolist(), strict=True)), tuple(by_layer))


class Holding(Protocol):
    """A layer's router under a price that holds its average: reads `scale`, writes the next layer's."""

    scale: Tensor  # [1] float64
    following: Tensor  # [1] float64
    hold: float  # share of an excess that one layer corrects in one step; 0: the price stays


def chain(routers: Sequence[Holding]) -> None:
    """Let a model's layers move one price together: each corrects its part, and the last hands it to the first.

    A single router goes on by itself.
    """
    if len(routers) < 2:
        return
    for router, after in zip(routers, [*routers[1:], *routers[:1]], strict=True):
        router.following = after.scale
        router.hold /= len(routers)


def followed(scale: Tensor, hold: float, counts: Tensor, budget: Tensor) -> Tensor:
    """The price's factor [1] after steps with these counters [len(FIELDS)]: scale (1 + c (F - M') / M').

    F is what was fetched a step and M' the budget, or the union if that is smaller. c is `hold` after one step, and
    1 - (1 - hold)^steps after several that were decided at once (teacher forcing). Without a voting row it stays.
    """
    steps, union, fetched = (counts[FIELDS.index(name)] for name in ("steps", "native_union", "fetched"))
    aim = torch.minimum(budget * steps, union).clamp_min(1.0)
    share = 1.0 - (1.0 - hold) ** steps
    return scale * (1.0 + share * (fetched - aim) / aim)


class LayerRouter:
    """What every integration calls for one layer: `router(batch) -> Routing`.

    Holds the policy with its budget as a device tensor (so that it can change without a new graph capture), the
    layer's statistics on the device, and the counters.
    """

    def __init__(self, policy: Policy, stats: LayerStats = NO_STATS, device: torch.device | str = "cpu") -> None:
        self.stats = LayerStats({name: stats[name].to(device) for name in sorted(policy.needs)})
        self.budget: Tensor | None = None
        if policy.budget is not None:
            self.budget = torch.as_tensor(policy.budget, dtype=torch.int64, device=device).clone()
            policy = policy.with_budget(self.budget)
        self.policy = policy
        self.hold = policy.budgeted.hold if isinstance(policy.budgeted, Price) else 0.0
        self.scale = torch.ones(1, dtype=torch.float64, device=device)
        self.following = self.scale
        self.totals = torch.zeros(len(FIELDS), dtype=torch.float64, device=device)

    def __call__(self, batch: RouterBatch) -> Routing:
        """Route one step [T, ...] or many independent ones [S, T, ...], and count."""
        stats = LayerStats({**self.stats.tensors, "price_scale": self.scale}) if self.hold else self.stats
        routing = self.policy(batch, stats)
        counts = count_step(batch, routing).reshape(-1, len(FIELDS)).sum(0)
        self.totals += counts
        if self.hold:
            assert self.budget is not None
            self.following.copy_(followed(self.scale, self.hold, counts, self.budget))
        return routing

    def set_budget(self, budget: int) -> None:
        """Change the budget from the next step on. Raises ValueError below 1 or for a policy without a budget."""
        checked = self.policy.checked_budget(budget)
        assert self.budget is not None  # the policy has one
        self.budget.fill_(checked)
