"""Spread: BASE's removal costs, with more experts in the layers that need them (ours)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from moebudget.core.ops import (
    at_average,
    demand,
    first_routes,
    rank,
    rank_after,
)
from moebudget.core.policy import Policy, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.base import leveled, predicted_cost
from moebudget.methods.fills import FILLS, FillName
from moebudget.methods.registry import Count, Exponent, Tunable, register


@dataclass(frozen=True, slots=True)
class LayerBudget(Select):
    """A layer's number of experts with the largest sums, when `budget` are fetched per layer on average (ours).

    The statistic `layer_budget` [N] holds the layer's number for every average 1 to N (`moebudget allocate`). Its
    last entry is N. `floor`: the rows' first routes come before other experts, while the layer's number allows.
    """

    budget: int | Tensor
    floor: bool = False
    needs: ClassVar[frozenset[str]] = frozenset({"layer_budget"})
    caps: ClassVar[bool] = True

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        order = rank_after(total, candidate, first_routes(batch, 1)) if self.floor else rank(total, candidate)
        return Active(candidate & (order < at_average(stats["layer_budget"], self.budget)))


@dataclass(frozen=True, slots=True)
class Price(Select):
    """Every expert worth its fetch: D_u > mu / g_l, one price mu for all layers and steps, gain g_l per layer (ours).

    The statistic `layer_price` [N] holds the layer's mu / g_l for every average budget 1 to N, -inf at N (`moebudget
    allocate`); a step may fetch more or fewer than its layer's average. The largest sum is always in the set.
    `floor` adds every row's first route. At most `ceiling` experts; under `floor` first routes come before others.

    With `hold` above 0 the price follows the traffic until the average is `budget` again: it is multiplied by the
    statistic `price_scale`, which the layer's router keeps (`core.layer_router.followed`).
    """

    budget: int | Tensor
    floor: bool = False
    ceiling: int | None = None
    hold: float = 0.0
    needs: ClassVar[frozenset[str]] = frozenset({"layer_price"})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        order = rank(total, candidate)
        price = at_average(stats["layer_price"], self.budget)
        if self.hold:
            price = price * stats["price_scale"]
        mask = (total > price) | (order == 0)
        if self.floor:
            first = first_routes(batch, 1)
            mask, order = mask | first, rank_after(total, candidate, first)
        if self.ceiling is not None:
            mask = mask & (order < self.ceiling)
        return Active(candidate & mask)


@register(source="ours", example="spread:budget=8", label="spread", tune=Tunable("budget", 1, "N", counts=True))
def spread(
    budget: Count, fill: FillName = "geometric", relative: Exponent = 0.0, floor: bool = False, level: bool = False
) -> Policy:
    """BASE's removal costs with more experts in the layers that need them, `budget` per layer on average (ours).

    Each layer's number is read from the statistics (`moebudget allocate`). `floor` keeps every row's best expert while
    the layer's number allows; `relative` and `level` are those of `base`.
    """
    return Policy(predicted_cost(relative), leveled(LayerBudget(budget, floor), level), FILLS[fill])


@register(source="ours", example="price:budget=8", label="price", tune=Tunable("budget", 1, "N"))
def price(
    budget: Count,
    fill: FillName = "geometric",
    relative: Exponent = 0.0,
    floor: bool = False,
    ceiling: Count | None = None,
    hold: Exponent = 0.0,
    level: bool = False,
) -> Policy:
    """Every expert whose removal cost times the layer's gain exceeds one price, `budget` per layer on average (ours).

    Price and gains are read from the statistics (`moebudget allocate`) and hold for the batch size they were made at.
    `floor` adds every row's best expert; `ceiling` is the most that a layer fetches in a step. `hold`, the share of an
    excess that each step corrects, say .02, keeps the average at `budget` when text or batch size change. `level`,
    which is that of `base`, comes after the ceiling; `hold` counts its experts, too.
    """
    chosen = leveled(Price(budget, floor, ceiling, hold), level)
    return Policy(predicted_cost(relative), chosen, FILLS[fill])
