"""Tensor operations on a batch that scores, selections and fills share. Ties go to the lower index."""

from __future__ import annotations

import torch
from torch import Tensor

from moebudget.core.types import Active, RouterBatch, Routing, RowKind

# Scores


def on_routes(batch: RouterBatch, values: Tensor) -> Tensor:
    """Spread values [T, K] of the native routes over [T, N]; rows that do not vote become 0."""
    votes = torch.where(batch.decode[..., None], values.float(), 0.0)
    return torch.zeros_like(batch.probs).scatter(-1, batch.ids, votes)


def on_all(batch: RouterBatch, values: Tensor) -> Tensor:
    """Values [T, N] of every expert that the row may run; rows that do not vote and closed groups become 0."""
    return torch.where(batch.decode[..., None] & (batch.choice > -torch.inf), values.float(), 0.0)


def until_share(values: Tensor, share: float, total: Tensor) -> Tensor:
    """values [T, K] -> bool: the first of them, up to the one with which their sum reaches share * total [T, 1]."""
    before = values.double().cumsum(-1).roll(1, -1)
    first = torch.arange(values.shape[-1], device=values.device) == 0
    return first | (before < share * total.double())


def by_weight(batch: RouterBatch) -> Tensor:
    """[T, K] int64: 0 for a row's heaviest route; a selection bias can put it in another slot than the first."""
    return rank(batch.probs.gather(-1, batch.ids), torch.ones_like(batch.ids, dtype=torch.bool))


# Selections


def native_union(batch: RouterBatch) -> Tensor:
    """[N] bool: experts that the native routes of the voting rows name."""
    return first_routes(batch, batch.ids.shape[-1])


def first_routes(batch: RouterBatch, k0: int) -> Tensor:
    """[N] bool: union of the voting rows' first k0 routes."""
    hits = batch.decode[..., None].expand_as(batch.ids)[..., :k0]
    return torch.zeros_like(batch.probs, dtype=torch.bool).scatter(-1, batch.ids[..., :k0], hits).any(-2)


def demand(scores: Tensor, batch: RouterBatch) -> tuple[Tensor, Tensor]:
    """Scores [T, N] -> their sums [N] float64, and the candidates [N] bool: routed to, or with a positive sum.

    In float64 the sum of float32 scores hardly depends on the order of the rows, so equal sums tie.
    """
    total = scores.sum(-2, dtype=torch.float64)
    return total, native_union(batch) | (total > 0)


def largest_first(total: Tensor, candidate: Tensor) -> torch.return_types.sort:
    """Totals [N] and their indices, largest first; experts that are no candidates come last, as -inf."""
    return total.masked_fill(~candidate, -torch.inf).sort(dim=-1, descending=True, stable=True)


def rank(total: Tensor, candidate: Tensor) -> Tensor:
    """[N] int64: 0 for the candidate with the largest total; experts that are no candidates come after all."""
    order = largest_first(total, candidate).indices
    position = torch.arange(total.shape[-1], device=total.device).expand_as(order)
    return torch.zeros_like(order).scatter(-1, order, position)


def rank_after(total: Tensor, candidate: Tensor, first: Tensor) -> Tensor:
    """[N] int64: as `rank`, but the candidates in `first` [N] bool come before all others."""
    first = first & candidate
    others = first.sum(-1, keepdim=True) + rank(total, candidate & ~first)
    return torch.where(first, rank(total, first), others)


def at_average(table: Tensor, budget: int | Tensor) -> Tensor:
    """Entry of a table [N] for an average budget: the budget-th, the last one above N."""
    last = table.shape[-1] - 1
    if isinstance(budget, Tensor):
        return table.index_select(0, (budget - 1).clamp(0, last).reshape(1))[0]
    return table[min(budget - 1, last)]


# Fills


def inside(active: Active, batch: RouterBatch) -> Tensor:
    """[T, N] bool: the active set, once for every row."""
    return active.mask[..., None, :].expand(batch.probs.shape)


def kept_routes(active: Active, batch: RouterBatch) -> Tensor:
    """[T, K] bool: which native routes are inside the active set."""
    return inside(active, batch).gather(-1, batch.ids)


def widen(ids: Tensor, weights: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """[..., K] -> [..., slots], at least K: more slots, unused, that repeat the first id; a row with NaN stays NaN."""
    more = slots - ids.shape[-1]
    if more <= 0:
        return ids, weights
    shape = (*ids.shape[:-1], more)
    empty = torch.where(weights[..., :1].isnan(), weights[..., :1], 0.0)
    return torch.cat([ids, ids[..., :1].expand(shape)], -1), torch.cat([weights, empty.expand(shape)], -1)


# Results


def native_rows(routing: Routing, batch: RouterBatch) -> Tensor:
    """[T] bool: rows that keep their native routes, ids and weights bit for bit.

    Decode rows that a fill left as the model made them, and rows of kind NATIVE. This is the one place that decides
    it: engines give these rows the model's own tensors back, and fills leave their weights alone.
    """
    ids, weights = widen(batch.ids, batch.weights, routing.ids.shape[-1])
    same = ((routing.ids == ids) & (routing.weights == weights)).all(-1)
    return (same & batch.decode) | (batch.kind == RowKind.NATIVE.value)


def executed_experts(routing: Routing, batch: RouterBatch) -> Tensor:
    """[T, N] bool: the experts whose output a row takes, so not those that only an unused slot names."""
    return torch.zeros_like(batch.probs).scatter_add(-1, routing.ids, (routing.weights != 0).float()) > 0


def fetched_experts(routing: Routing, batch: RouterBatch) -> Tensor:
    """[N] bool: experts that a slot names, used or unused, padding included but not rows of kind NATIVE."""
    names = (batch.kind != RowKind.NATIVE.value)[..., None].expand_as(routing.ids)
    return torch.zeros_like(batch.probs, dtype=torch.bool).scatter(-1, routing.ids, names).any(-2)
