"""Router specification: what a model does with its router logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moebudget.core.types import RouterBatch, RowKind


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a model turns logits [T, N] into K weighted routes per token.

    softmax + renormalize      Qwen3-MoE, Mixtral; equal to a softmax over the selected logits (gpt-oss, Granite)
    softmax                    Qwen1.5-MoE, OLMoE, DeepSeek-V2 (weights are not renormalised)
    sigmoid (+ bias, groups)   DeepSeek-V3, GLM-4-MoE: the bias ranks, the unbiased score weighs

    With `groups` > 1 only the experts of the `open_groups` best groups may be chosen; a group is scored by its
    largest choice value (`group_score="max"`, DeepSeek-V2) or by the sum of its two largest ("top2", DeepSeek-V3).
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    open_groups: int = 1
    group_score: Literal["max", "top2"] = "max"

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k} must be between 1 and the number of experts, {self.num_experts}")
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"unknown scoring {self.scoring!r}: known are 'softmax' and 'sigmoid'")
        if self.groups < 1 or self.num_experts % self.groups:
            raise ValueError(f"{self.num_experts} experts cannot be split into groups={self.groups} equal groups")
        if self.group_score not in ("max", "top2"):
            raise ValueError(f"unknown group_score {self.group_score!r}: known are 'max' and 'top2'")
        if self.group_score == "top2" and self.num_experts == self.groups > 1:
            raise ValueError(f"groups={self.groups} of one expert each have no two largest scores to add ('top2')")
        if not 1 <= self.open_groups <= self.groups:
            raise ValueError(f"open_groups={self.open_groups} must be between 1 and groups={self.groups}")
        reachable = self.num_experts // self.groups * self.open_groups
        if reachable < self.top_k:
            raise ValueError(f"{self.open_groups} open groups hold {reachable} experts, fewer than top_k={self.top_k}")

    def scores(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [T, N] and selection bias [N] -> (choice, probs), float32 [T, N] each."""
        probs = logits.float().softmax(-1) if self.scoring == "softmax" else logits.float().sigmoid()
        choice = _biased(probs, bias)
        if self.groups > 1:
            grouped = choice.unflatten(-1, (self.groups, -1))  # [T, G, N/G]
            rank = grouped.amax(-1) if self.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
            best = rank.sort(dim=-1, descending=True, stable=True).indices[..., : self.open_groups]
            open_ = torch.zeros_like(rank, dtype=torch.bool).scatter(-1, best, True)
            choice = grouped.masked_fill(~open_[..., None], -torch.inf).flatten(-2)
        return choice, probs

    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        *,
        bias: Tensor | None = None,
        kind: Tensor | None = None,
        routes: tuple[Tensor, Tensor] | None = None,
        request: Tensor | None = None,
        accept: Tensor | None = None,
        energy: Tensor | None = None,
    ) -> RouterBatch:
        """Build the batch of one step. hidden [T, d], logits [T, N], bias [N], kind [T] (RowKind; None: all DECODE).

        request [T] and accept [T] belong to speculative verification: which request a row is of, and the probability
        that its token is accepted. Raises ValueError if their length is not that of the rows.

        `routes` are the ids and weights [T, K] that the model computed; they are taken as they are, so that a policy
        which changes nothing returns the model's numbers bit for bit. Without them they are computed here, ties
        to the lower index. `energy` [T, K] belongs to `routes` and is reordered with them.
        """
        for name, rows in (("request", request), ("accept", accept), ("kind", kind)):
            if rows is not None and rows.shape != logits.shape[:-1]:
                raise ValueError(
                    f"{name} has shape {tuple(rows.shape)}, the logits have {tuple(logits.shape[:-1])} rows: "
                    f"give one {name} value per row"
                )
        choice, probs = self.scores(logits, bias)
        if kind is None:
            kind = torch.full(logits.shape[:-1], RowKind.DECODE.value, device=logits.device)
        kind = kind.to(torch.int8)
        finite = logits.isfinite().all(-1) & hidden.isfinite().all(-1)  # [T]
        if routes is None:
            ids = choice.sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k]
            scores = probs.gather(-1, ids)
            total = _positive(scores.sum(-1, keepdim=True))
            weights = (scores / total if self.renormalize else scores) * self.scale
        else:
            ids, weights = routes[0].long(), routes[1].float()
            ids = torch.where(finite[..., None], ids, 0).clamp(0, self.num_experts - 1)
            choice = _agree(choice, _biased(probs, bias), ids)
            order = choice.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices
            ids, weights = ids.gather(-1, order), weights.gather(-1, order)
            energy = None if energy is None else energy.gather(-1, order)
        mass = probs.gather(-1, ids).sum(-1)
        factor = torch.where(mass > 0, self.scale / _positive(mass), 0.0)
        factor = factor if self.renormalize else torch.full_like(mass, self.scale)
        broken = (kind == RowKind.DECODE.value) & ~finite
        weights = torch.where(broken[..., None], torch.nan, weights)
        weights = torch.where((kind == RowKind.PAD.value)[..., None], 0.0, weights)
        kind = torch.where(broken, RowKind.BROKEN.value, kind)
        ranked = choice if bias is not None else torch.where(choice > -torch.inf, logits.float(), -torch.inf)
        return RouterBatch(
            hidden, choice, probs, factor, ids, weights, kind, self.renormalize, ranked, request, accept, energy
        )


def _biased(probs: Tensor, bias: Tensor | None) -> Tensor:
    """The choice values before groups are closed."""
    return probs if bias is None else probs + bias.float()


def _positive(mass: Tensor) -> Tensor:
    return mass.clamp_min(torch.finfo(mass.dtype).tiny)


def _agree(choice: Tensor, ungrouped: Tensor, ids: Tensor) -> Tensor:
    """Push every expert that the model did not choose just below those it chose.

    Ties (frequent with bf16 logits) may have been broken another way than ours, and a model may have ranked in a
    lower precision; without this a "best inside the set" rule could replace a route that needs no replacing. A route
    in a group that we would have closed (a tie between groups) ranks by its value without groups.
    """
    chosen = torch.zeros_like(choice, dtype=torch.bool).scatter(-1, ids, True)
    choice = torch.where(chosen, ungrouped, choice)
    worst = choice.gather(-1, ids).amin(-1, keepdim=True)
    below = torch.nextafter(worst, torch.full_like(worst, -torch.inf))
    return torch.where(~chosen & (choice >= worst), below, choice)
