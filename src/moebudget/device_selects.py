"""Selections that look at where the experts lie: XShare on several devices, CAEE. They read a `Placement`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget.select import Select, demand, first_routes, largest_first, native_union, rank
from moebudget.types import Active, LayerStats, RouterBatch


def _same_device(stats: LayerStats) -> Tensor:
    """[N, N] bool."""
    device = stats["placement_device"]
    return device[:, None] == device[None, :]


def _rank_on_device(total: Tensor, candidate: Tensor, same: Tensor) -> Tensor:
    """[N] how many candidates of the same device come before an expert."""
    order = rank(total, candidate)
    before = (order[..., None, :] < order[..., :, None]) & candidate[..., None, :]
    return (before & same).sum(-1)


@dataclass(frozen=True, slots=True)
class RoundRobin:
    """The devices take turns to add their best expert until m are chosen, so that loads stay level.

    XShare, https://arxiv.org/abs/2602.07265, algorithm 5: the largest load is ceil(m / devices) while none runs out.
    """

    m: int
    needs: ClassVar[frozenset[str]] = frozenset({"placement_device"})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        turn = _rank_on_device(total, candidate, _same_device(stats))
        device = stats["placement_device"]
        when = turn * (device.amax() + 1) + device
        return Active(candidate & (rank(-when.double(), candidate) < self.m))


@dataclass(frozen=True, slots=True)
class PerDevice:
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
        chosen, same = first_routes(batch, self.k0), _same_device(stats)
        rest = candidate & ~chosen
        warm = (same & chosen[..., None, :]).sum(-1)  # [N] load of the expert's device
        room = self.m_device if self.additive else self.m_device - warm
        return Active(chosen | (rest & (_rank_on_device(total, rest, same) < room)))


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """The `budget` experts with the largest sums of every device: so at most that many on the fullest one (ours).

    XShare's algorithm 6 without a warm-up, which could exceed the cap. `budget` may be a tensor, as of `TopBudget`.
    """

    budget: int | Tensor
    needs: ClassVar[frozenset[str]] = frozenset({"placement_device"})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        return PerDevice(0, self.budget, additive=False)(scores, batch, stats)


@dataclass(frozen=True, slots=True)
class Threshold:
    """Experts whose total reaches theta; with `guard` also every row's first route.

    CAEE on the device, https://arxiv.org/abs/2606.29982. theta bounds a sum over rows, so it scales with the batch: in
    a small one no expert may reach it, which the guard (ours) is for; without it the one with the largest total stays.
    """

    theta: float
    guard: bool = True
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        total, _ = demand(scores, batch)
        routed = native_union(batch)
        reached = routed & (total >= self.theta)
        if self.guard:
            return Active(reached | first_routes(batch, 1))
        alone = routed & (rank(total, routed) == 0) & ~reached.any(-1, keepdim=True)
        return Active(reached | alone)


@dataclass(frozen=True, slots=True)
class CostInvariant:
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
        same, price = _same_device(stats), stats["placement_cost"]
        cost = price.double()
        load = (mask * cost) @ same.double()  # [N] load of the expert's device
        most = load.amax(-1, keepdim=True)
        rest = native_union(batch) & ~mask
        if price.dtype == torch.bool:
            paid = rest & price
            return Active(mask | (rest & ~price) | (paid & (_rank_on_device(total, paid, same) < most - load)))
        order = largest_first(total, rest).indices
        for i in range(total.shape[-1]):
            expert = order[..., i : i + 1]
            step = cost.expand_as(load).gather(-1, expert)
            fits = (load.gather(-1, expert) + step <= most) & rest.gather(-1, expert)
            mask = mask | torch.zeros_like(mask).scatter(-1, expert, fits)
            load = load + same[expert].squeeze(-2) * (step * fits)
        return Active(mask)


@dataclass(frozen=True, slots=True)
class WorthFetching:
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


@dataclass(frozen=True, slots=True)
class Level:
    """What `must` selects, and on every device the best other routed experts up to the load of the fullest device.

    The straggler fill of CAEE, https://arxiv.org/abs/2606.29982, behind any selection: `CostInvariant` where every
    expert costs the same, without its loop over experts.
    """

    must: Select

    @property
    def needs(self) -> frozenset[str]:
        return self.must.needs | {"placement_device"}

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        mask = self.must(scores, batch, stats).mask
        total, _ = demand(scores, batch)
        same = _same_device(stats)
        load = (same & mask[..., None, :]).sum(-1)  # [N] of the expert's device
        rest = native_union(batch) & ~mask
        room = load.amax(-1, keepdim=True) - load
        return Active(mask | (rest & (_rank_on_device(total, rest, same) < room)))
