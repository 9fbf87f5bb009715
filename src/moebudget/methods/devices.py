"""Selections that look at which device holds an expert; several methods share them. They read a placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget.core.ops import (
    demand,
    first_routes,
    largest_first,
    native_union,
    rank,
)
from moebudget.core.policy import Select
from moebudget.core.types import Active, LayerStats, RouterBatch


def same_device(stats: LayerStats) -> Tensor:
    """[N, N] bool."""
    device = stats["placement_device"]
    return device[:, None] == device[None, :]


def rank_on_device(total: Tensor, candidate: Tensor, same: Tensor) -> Tensor:
    """[N] how many candidates of the same device come before an expert."""
    order = rank(total, candidate)
    before = (order[..., None, :] < order[..., :, None]) & candidate[..., None, :]
    return (before & same).sum(-1)


@dataclass(frozen=True, slots=True)
class PerDevice(Select):
    """The rows' first k0 routes, and the `m_device` best others of every device.

    XShare, https://arxiv.org/abs/2602.07265, algorithm 6. additive: m_device experts come on top of the warm-up set
    (our reading of the reported peak loads); else it caps a device's load.
    """

    k0: int
    m_device: int | Tensor
    additive: bool = True
    needs: ClassVar[frozenset[str]] = frozenset({"placement_device"})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        chosen, same = first_routes(batch, self.k0), same_device(stats)
        rest = candidate & ~chosen
        warm = (same & chosen[..., None, :]).sum(-1)  # [N] load of the expert's device
        room = self.m_device if self.additive else self.m_device - warm
        return Active(chosen | (rest & (rank_on_device(total, rest, same) < room)))


@dataclass(frozen=True, slots=True)
class CostInvariant(Select):
    """What `must` selects, and every further routed expert that does not raise the cost of the slowest device.

    F(S) = max_d sum_{e in S on d} cost_e. The rest is tried from the largest total down; e joins if its device's load
    plus its cost stays within F(must). So F does not change and the set stays inside the native union. CAEE,
    https://arxiv.org/abs/2606.29982; the order and the sum inside the maximum are our reading. Costs that are bool
    (equal where there are any) give the same set without the loop over experts.
    """

    must: Select

    @property
    def needs(self) -> frozenset[str]:
        return self.must.needs | {"placement_device", "placement_cost"}

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        mask = self.must(scores, batch, stats).mask
        total, _ = demand(scores, batch)
        same, price = same_device(stats), stats["placement_cost"]
        cost = price.double()
        load = (mask * cost) @ same.double()  # [N] load of the expert's device
        most = load.amax(-1, keepdim=True)
        rest = native_union(batch) & ~mask
        if price.dtype == torch.bool:
            paid = rest & price
            return Active(mask | (rest & ~price) | (paid & (rank_on_device(total, paid, same) < most - load)))
        order = largest_first(total, rest).indices
        for i in range(total.shape[-1]):
            expert = order[..., i : i + 1]
            step = cost.expand_as(load).gather(-1, expert)
            fits = (load.gather(-1, expert) + step <= most) & rest.gather(-1, expert)
            mask = mask | torch.zeros_like(mask).scatter(-1, expert, fits)
            load = load + same[expert].squeeze(-2) * (step * fits)
        return Active(mask)


@dataclass(frozen=True, slots=True)
class Level(Select):
    """What `must` selects, and on every device the best other routed experts up to the load of the fullest device.

    The straggler fill of CAEE, https://arxiv.org/abs/2606.29982, behind any selection: `CostInvariant` where every
    expert costs the same, without its loop over experts.
    """

    must: Select

    @property
    def needs(self) -> frozenset[str]:
        return self.must.needs | {"placement_device"}

    def get_budget(self) -> int | Tensor | None:
        return self.must.get_budget()

    def get_hold(self) -> float:
        return self.must.get_hold()

    def with_budget(self, budget: int | Tensor) -> Level:
        return Level(self.must.with_budget(budget))

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        mask = self.must(scores, batch, stats).mask
        total, _ = demand(scores, batch)
        same = same_device(stats)
        load = (same & mask[..., None, :]).sum(-1)  # [N] of the expert's device
        rest = native_union(batch) & ~mask
        room = load.amax(-1, keepdim=True) - load
        return Active(mask | (rest & (rank_on_device(total, rest, same) < room)))
