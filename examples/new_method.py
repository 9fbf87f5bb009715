"""A new method from outside the package: one decorated function, with a new score and a new selection.

    python examples/new_method.py

The rule: an expert counts as much as the row that depends on it most would lose, and the first routes of every row
come before other experts while the budget allows. A method that changes only one of the three parts is shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget import Policy, RouterSpec, parse, register
from moebudget.core.ops import demand, first_routes, rank_after
from moebudget.core.policy import Score, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.base import SquaredWeight
from moebudget.methods.fills import FILLS, FillName
from moebudget.methods.registry import Count, Tunable


@dataclass(frozen=True, slots=True)
class WorstRow(Score):
    """max_t w_tu^2: only the row that loses most by an expert counts for it. Reads no statistics."""

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        cost = SquaredWeight()(batch, stats)  # [T, N], 0 for rows that do not vote
        return cost * (cost == cost.amax(-2, keepdim=True))


@dataclass(frozen=True, slots=True)
class FirstRoutesFirst(Select):
    """The `budget` experts with the largest sums; those that are some row's first `routes` routes come before others.

    A field named `budget` makes the selection budgeted: `set_budget`, vLLM's RPC and graph replays change it.
    """

    budget: int | Tensor
    routes: int = 2
    caps: ClassVar[bool] = True  # no layer ever fetches more, so `tune` may start at the target

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        order = rank_after(total, candidate, first_routes(batch, self.routes))
        return Active(candidate & (order < self.budget))


@register(source="an example", example="worst_row:budget=8", tune=Tunable("budget", 1, "N", counts=True))
def worst_row(budget: Count, routes: Count = 2, fill: FillName = "native") -> Policy:
    """The `budget` experts that single rows depend on most, first routes before others."""
    return Policy(WorstRow(), FirstRoutesFirst(budget, routes), FILLS[fill])


def main() -> None:
    """Route one made-up step with the new method, by its policy string."""
    torch.manual_seed(0)
    batch = RouterSpec(num_experts=32, top_k=4)(hidden=torch.randn(16, 8), logits=torch.randn(16, 32))
    policy = parse("worst_row:budget=10,routes=1")
    routing = policy(batch)
    print(f"{policy}: {routing.ids.unique().numel()} of {batch.ids.unique().numel()} experts fetched")


if __name__ == "__main__":
    main()
