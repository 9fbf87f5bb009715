"""Coverage: a selection that leaves every row something, for `study_pieces`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moebudget.core.ops import demand
from moebudget.core.policy import Select
from moebudget.core.types import Active, LayerStats, RouterBatch


@dataclass(frozen=True, slots=True)
class Coverage(Select):
    """The `budget` experts that leave every row something: greedily, the one that adds most to a concave sum.

        max_A sum_t D_t (1 - (1 - c_t(A))^q),   c_t(A) = sum_{u in A} D_tu / D_t,   D_t = sum_u D_tu

    with the scores D_tu. `exponent` q = 1 is `TopBudget`; above 1, a row that keeps most of its energy has less to
    lose, and a row that keeps little has more. The greedy choice is within 1 - 1/e of the best set, as the sum is
    submodular. Ties go to the lower index. The rule is ours.
    """

    budget: int | Tensor
    exponent: float = 2.0

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
