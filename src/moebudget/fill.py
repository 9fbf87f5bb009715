"""Fills: re-route every row inside the active set. Ids are inside the set; a slot of weight 0 is unused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from moebudget.types import Active, LayerStats, RouterBatch, Routing

Denominator = Literal["original", "executed"]


class Fill(Protocol):
    """One rule. `needs` names the calibrated tensors it reads, exactly."""

    needs: ClassVar[frozenset[str]]

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing: ...


def kept_routes(active: Active, batch: RouterBatch) -> Tensor:
    """[T, K] bool: which of the model's own routes lie inside the set."""
    return _inside(active, batch).gather(-1, batch.ids)


def _inside(active: Active, batch: RouterBatch) -> Tensor:
    return active.mask[..., None, :].expand(batch.probs.shape)  # [T, N]


def _lone_expert(active: Active, batch: RouterBatch) -> Tensor:
    """[T] the expert of the set that the row weighs highest, whatever its group; the lowest of the set on NaN."""
    return torch.where(_inside(active, batch), batch.probs.nan_to_num(0.0), -1.0).argmax(-1)


def _finish(
    ids: Tensor,
    weights: Tensor,
    used: Tensor,
    unchanged: Tensor,
    active: Active,
    batch: RouterBatch,
    denominator: Denominator,
) -> Routing:
    """Close unused slots, give a row without any expert its best one of the set, apply the denominator.

    ids, weights (over the original denominator) and used are [T, K]; unchanged is [T, 1]: rows that keep the model's
    own routes bit for bit.
    """
    lone = _lone_expert(active, batch)[..., None]  # [T, 1]
    empty = ~used.any(-1, keepdim=True)  # [T, 1]
    first = torch.where(empty, lone, ids.gather(-1, used.to(torch.uint8).argmax(-1, keepdim=True)))
    ids = torch.where(used, ids, first)
    weights = torch.where(used, weights, 0.0)
    slot0 = torch.arange(ids.shape[-1], device=ids.device) == 0
    weights = torch.where(empty & slot0, batch.probs.gather(-1, lone) * batch.factor[..., None], weights)
    if denominator == "executed" and batch.renormalize:
        executed = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        weights = weights * (batch.weights.sum(-1, keepdim=True) / executed)
    ids, weights = torch.where(unchanged, batch.ids, ids), torch.where(unchanged, batch.weights, weights)
    votes = batch.live[..., None]
    return Routing(torch.where(votes, ids, lone), torch.where(votes, weights, batch.weights))


@dataclass(frozen=True, slots=True)
class Backfill:
    """Each row runs the K experts of the set that it ranks highest; nothing new is fetched.

    original: w_tv = p_tv / sum_{u in R_t} p_tu, the denominator of the model's own routes R_t (BASE, section 3.3).
    executed: w_tv = p_tv / sum_{u in R'_t} p_tu, renormalised over the executed experts (OEA, eq. 1).
    For models that do not renormalise both are w = p times the model's scale.
    """

    denominator: Denominator = "original"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:  # noqa: ARG002
        inside = torch.where(_inside(active, batch), batch.choice, -torch.inf)
        best = inside.sort(dim=-1, descending=True, stable=True)
        ids, used = (x[..., : batch.ids.shape[-1]] for x in (best.indices, best.values > -torch.inf))
        weights = batch.probs.gather(-1, ids) * batch.factor[..., None]
        unchanged = kept_routes(active, batch).all(-1, keepdim=True)
        return _finish(ids, weights, used, unchanged, active, batch, self.denominator)


@dataclass(frozen=True, slots=True)
class Drop:
    """Each row runs those of its own routes that are in the set, with the model's own weights (BASE's ablation).

    A row that loses every route runs the one expert of the set that it weighs highest.
    """

    denominator: Denominator = "original"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:  # noqa: ARG002
        used = kept_routes(active, batch)
        return _finish(batch.ids, batch.weights, used, used.all(-1, keepdim=True), active, batch, self.denominator)


@dataclass(frozen=True, slots=True)
class FirstRoutes:
    """Each row runs its own first k routes and nothing else: plain top-k reduction, k instead of K experts."""

    k: int
    denominator: Denominator = "executed"
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, active: Active, batch: RouterBatch, stats: LayerStats) -> Routing:  # noqa: ARG002
        first = torch.arange(batch.ids.shape[-1], device=batch.ids.device) < self.k
        used = kept_routes(active, batch) & first
        return _finish(batch.ids, batch.weights, used, used.all(-1, keepdim=True), active, batch, self.denominator)
