"""Selections of the other papers' methods that need no placement; those that do are in `device_selects`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moebudget.score import Score
from moebudget.select import demand, first_routes, largest_first, native_union, rank
from moebudget.types import Active, LayerStats, RouterBatch


@dataclass(frozen=True, slots=True)
class VotedBy:
    """Every expert with a positive score under another rule than the policy's own, which then only ranks."""

    rule: Score

    @property
    def needs(self) -> frozenset[str]:
        return self.rule.needs

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        return Active((self.rule(batch, stats) > 0).any(-2))


@dataclass(frozen=True, slots=True)
class AllBut:
    """Every routed expert but the `drop` with the least total; one always stays (LYNX-Lat).

    Lynx v1, https://arxiv.org/abs/2411.08982v1: with one vote a route, the experts that fewest rows use are left out.
    """

    drop: int
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        total, candidate = demand(scores, batch)
        left = (candidate.sum(-1, keepdim=True) - self.drop).clamp_min(1)
        return Active(candidate & (rank(total, candidate) < left))


@dataclass(frozen=True, slots=True)
class RetainedShare:
    """The fewest experts that together hold `share` of the total: the set's size follows the batch.

    dMoE, https://arxiv.org/abs/2605.30876 (known to us from summaries). `share` = 1 keeps every candidate.
    """

    share: float
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        total, candidate = demand(scores, batch)
        if self.share >= 1:
            return Active(candidate)
        sums = largest_first(total, candidate).values.clamp_min(0).cumsum(-1)
        size = (sums < self.share * sums[..., -1:]).sum(-1, keepdim=True) + 1
        return Active(candidate & (rank(total, candidate) < size))


@dataclass(frozen=True, slots=True)
class EffectiveRank:
    """The ceil(scale exp H(q)) experts with the largest total, q the totals as shares: AcceptMoE's set size.

    exp(entropy) is the number of equally wanted experts that would be as spread out. AcceptMoE,
    https://arxiv.org/abs/2608.02989; the paper's clamps are not public, ours are 1 and the candidates; `scale` is
    ours.
    """

    scale: float = 1.0
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        total, candidate = demand(scores, batch)
        q = total / total.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        size = (self.scale * torch.special.entr(q).sum(-1, keepdim=True).exp()).float().ceil().clamp_min(1)
        return Active(candidate & (rank(total, candidate) < size))


@dataclass(frozen=True, slots=True)
class ShareOfExperts:
    """The max(K, round(beta N)) experts with the largest total: DES-Vote's core set.

    DES, https://arxiv.org/abs/2602.00879 (known to us from summaries).
    """

    beta: float
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        total, candidate = demand(scores, batch)
        size = max(batch.ids.shape[-1], round(self.beta * total.shape[-1]))
        return Active(candidate & (rank(total, candidate) < size))


@dataclass(frozen=True, slots=True)
class UnionSize:
    """As many experts as the union of the rows' first k0 routes holds, but those with the largest total.

    The budget of BASE's selection ablation (https://arxiv.org/abs/2609.36222, table 2, with k0 = 1).
    """

    k0: int = 1
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        total, candidate = demand(scores, batch)
        return Active(candidate & (rank(total, candidate) < first_routes(batch, self.k0).sum(-1, keepdim=True)))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The rows' first k0 routes, then `m_request` experts a request, then `m` of the batch: XShare.

    XShare, https://arxiv.org/abs/2602.07265, algorithms 1 (k0 = 0, m_request = 0), 2 (m_request = 0), 3 and 4. A
    request's experts are the best by the sum over its rows, outside the warm-up set. additive: m experts come on top;
    else m caps the whole set. The order of the last two steps, and that m is additive, are our reading.
    """

    k0: int
    m: int
    m_request: int = 0
    additive: bool = True
    needs: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        chosen = first_routes(batch, self.k0)
        if self.m_request:
            chosen = chosen | self._of_requests(scores, batch, chosen)
        total, candidate = demand(scores, batch)
        room = self.m if self.additive else (self.m - chosen.sum(-1, keepdim=True)).clamp_min(0)
        rest = candidate & ~chosen
        return Active(chosen | (rest & (rank(total, rest) < room)))

    def _of_requests(self, scores: Tensor, batch: RouterBatch, chosen: Tensor) -> Tensor:
        rows = torch.arange(scores.shape[-2], device=scores.device).expand(scores.shape[:-1])
        request = rows if batch.request is None else batch.request
        together = request[..., :, None] == request[..., None, :]  # [T, T]
        sums = together.double() @ scores.double()  # [T, N], the request's sum in each of its rows
        candidate = (sums > 0) & ~chosen[..., None, :]
        best = candidate & (rank(sums, candidate) < self.m_request)
        return (best & batch.live[..., None]).any(-2)


@dataclass(frozen=True, slots=True)
class Critical:
    """The voted experts, and routed ones that none of them resembles: SERE.

    An expert u outside the voted set stays if max_v sim[u, v] < rho over the voted v; the voted ones alone may stand
    in for others. SERE, https://arxiv.org/abs/2602.07616, and the authors' code. rho = 0 keeps none, rho > 1 all.
    """

    statistic: str
    rho: float = 0.0

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.statistic})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        voted = (scores > 0).any(-2)
        alike = torch.where(voted[..., None, :], stats[self.statistic].float(), -torch.inf).amax(-1)  # [N]
        return Active(voted | (native_union(batch) & (alike < self.rho)), voted)
