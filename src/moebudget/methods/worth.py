"""Worth fetching: with experts offloaded, fetch a missing one only if its removal cost pays for it (ours)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget.core.ops import (
    demand,
    native_union,
    rank,
)
from moebudget.core.policy import Policy, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.base import COSTS, CostName
from moebudget.methods.devices import CostInvariant
from moebudget.methods.fills import FILLS, FillName
from moebudget.methods.registry import Positive, Tunable, register


@dataclass(frozen=True, slots=True)
class WorthFetching(Select):
    """Every routed expert whose total is at least `least` times the mean total of those routed to.

    Ours: min lost + price * cost, expert by expert. `least` is what the most costly expert to fetch must carry, others
    in proportion to their cost; one that costs nothing stays, and so does the largest total.
    """

    least: float
    needs: ClassVar[frozenset[str]] = frozenset({"placement_cost"})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, _ = demand(scores, batch)
        routed, cost = native_union(batch), stats["placement_cost"].double()
        mean = total.sum(-1, keepdim=True) / routed.sum(-1, keepdim=True).clamp_min(1)
        price = self.least * mean / cost.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        worth = total >= price * cost
        return Active(routed & (worth | (rank(total, routed) == 0)))


@register(
    source="ours, with the second step of CAEE",
    example="worth:least=0.5",
    label="worth",
    tune=Tunable("least", 0.02, 8.0),
)
def worth(least: Positive, cost: CostName = "base", fill: FillName = "geometric") -> Policy:
    """Offloading (ours): what is at hand, missing experts worth a fetch, and others that make no device slower.

    A missing expert is worth it if its removal cost is `least` times the mean of the experts that the batch routes to.
    `cost`: the removal cost by the score of base, static, squared or router_mass. Reads a placement.
    """
    return Policy(COSTS[cost], CostInvariant(WorthFetching(least)), FILLS[fill])
