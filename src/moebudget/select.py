"""Selections: which experts the whole step may fetch, given scores [T, N]. Ties go to the lower index."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from moebudget.types import Active, LayerStats, RouterBatch


class Select(Protocol):
    """One rule. `needs` names the calibrated tensors it reads, exactly."""

    @property
    def needs(self) -> frozenset[str]: ...

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active: ...


def native_union(batch: RouterBatch) -> Tensor:
    """[N] bool: experts that a voting row routes to in the unchanged model."""
    return first_routes(batch, batch.ids.shape[-1])


def demand(scores: Tensor, batch: RouterBatch) -> tuple[Tensor, Tensor]:
    """Scores [T, N] -> their sums [N] float64, and the candidates [N] bool: routed to, or with a positive sum.

    In float64 the sum of float32 scores hardly depends on the order of the rows, so equal sums tie.
    """
    total = scores.sum(-2, dtype=torch.float64)
    return total, native_union(batch) | (total > 0)


def largest_first(total: Tensor, candidate: Tensor) -> torch.return_types.sort:
    """Totals [N] and their indices, largest first, ties to the lower index; no candidates come last, as -inf."""
    return total.masked_fill(~candidate, -torch.inf).sort(dim=-1, descending=True, stable=True)


def rank(total: Tensor, candidate: Tensor) -> Tensor:
    """[N] int64: 0 for the candidate with the largest total, ties to the lower index; others come after all."""
    order = largest_first(total, candidate).indices
    position = torch.arange(total.shape[-1], device=total.device).expand_as(order)
    return torch.zeros_like(order).scatter(-1, order, position)


def first_routes(batch: RouterBatch, k0: int) -> Tensor:
    """[N] bool: union of the voting rows' first k0 routes."""
    hits = batch.live[..., None].expand_as(batch.ids)[..., :k0]
    return torch.zeros_like(batch.probs, dtype=torch.bool).scatter(-1, batch.ids[..., :k0], hits).any(-2)


@dataclass(frozen=True, slots=True)
class Voted:
    """Every expert with a positive score in some row: with `RouteRank(k0)` the union of the rows' top-k0."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        return Active((scores > 0).any(-2))


@dataclass(frozen=True, slots=True)
class Union:
    """Every expert that the unchanged model would fetch."""

    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        return Active(native_union(batch))


@dataclass(frozen=True, slots=True)
class TopBudget:
    """The `budget` experts with the largest sum over rows, min_A sum_{u not in A} D_u s.t. |A| <= M (BASE, eq. 4).

    Only candidates (routed to by a voting row, or with a positive sum) are ever in the set, so the step fetches
    min(M, candidates) experts. `budget` may be an integer tensor on the device: then it can change between replays
    of a CUDA graph.
    """

    budget: int | Tensor
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        total, candidate = demand(scores, batch)
        return Active(candidate & (rank(total, candidate) < self.budget))


def at_average(table: Tensor, budget: int | Tensor) -> Tensor:
    """Entry of a table [N] for `budget` experts a layer on average: the budget-th, the last one above N."""
    last = table.shape[-1] - 1
    if isinstance(budget, Tensor):
        return table.index_select(0, (budget - 1).clamp(0, last).reshape(1))[0]
    return table[min(budget - 1, last)]


def rank_after(total: Tensor, candidate: Tensor, first: Tensor) -> Tensor:
    """[N] int64: as `rank`, but the candidates in `first` [N] bool come before all others."""
    first = first & candidate
    others = first.sum(-1, keepdim=True) + rank(total, candidate & ~first)
    return torch.where(first, rank(total, first), others)


@dataclass(frozen=True, slots=True)
class LayerBudget:
    """The layer's own number of experts with the largest sums, when `budget` are fetched a layer on average (ours).

    The statistic `layer_budget` [N] holds the layer's number for every average 1 to N (`moebudget allocate`). Its
    last entry is N. `floor`: the rows' first routes come before other experts, while the layer's number allows.
    """

    budget: int | Tensor
    floor: bool = False
    needs: ClassVar[frozenset[str]] = frozenset({"layer_budget"})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        order = rank_after(total, candidate, first_routes(batch, 1)) if self.floor else rank(total, candidate)
        return Active(candidate & (order < at_average(stats["layer_budget"], self.budget)))


@dataclass(frozen=True, slots=True)
class Price:
    """Every expert worth its fetch: D_u > mu / g_l, one price mu for all layers and steps, gain g_l a layer (ours).

    The statistic `layer_price` [N] holds the layer's mu / g_l for every average budget 1 to N, -inf at N (`moebudget
    allocate`); a step may fetch more or fewer than its layer's average. The largest sum is always in the set.
    `floor` adds every row's first route. At most `ceiling` experts; under `floor` first routes come before others.

    With `hold` above 0 the price follows the traffic until the average is `budget` again: it is multiplied by the
    statistic `price_scale`, which the runtime keeps (`runtime.followed`).
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


@dataclass(frozen=True, slots=True)
class Coverage:
    """The `budget` experts that leave every row something: greedily, the next one that adds most to a concave sum
    (ours).

        max_A sum_t D_t (1 - (1 - c_t(A))^q),   c_t(A) = sum_{u in A} D_tu / D_t,   D_t = sum_u D_tu

    with the scores D_tu. `exponent` q = 1 is `TopBudget`; above, a row that keeps most of its energy has less to lose,
    and one that keeps little more. Greedy choice is within 1 - 1/e of the best set, as the sum is submodular. Ties go
    to the lower index.
    """

    budget: int | Tensor
    exponent: float = 2.0
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        _, candidate = demand(scores, batch)
        total = scores.sum(-1, keepdim=True)  # [T, 1]
        share = scores / total.clamp_min(torch.finfo(torch.float32).tiny)
        experts = scores.shape[-1]
        order = torch.full_like(candidate, experts, dtype=torch.int64)
        lost, left = torch.ones_like(total), candidate
        for place in range(experts):
            worth = total * (lost.pow(self.exponent) - (lost - share).clamp_min(0).pow(self.exponent))
            added = worth.sum(-2, dtype=torch.float64).masked_fill(~left, -torch.inf).argmax(-1, keepdim=True)
            best = torch.zeros_like(left).scatter(-1, added, True) & left  # [N]
            order = torch.where(best, place, order)
            lost = (lost - torch.where(best[..., None, :], share, 0.0).sum(-1, keepdim=True)).clamp_min(0.0)
            left = left & ~best
        return Active(candidate & (order < self.budget))


Budgeted = TopBudget | LayerBudget | Price | Coverage
