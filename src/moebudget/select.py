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
