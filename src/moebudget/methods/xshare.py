"""XShare: warm-up routes plus the largest router mass, also per request and per device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from moebudget.core.ops import (
    demand,
    first_routes,
    rank,
)
from moebudget.core.policy import Policy, Score, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.base import COSTS
from moebudget.methods.common import GateMass
from moebudget.methods.devices import PerDevice, rank_on_device, same_device
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import Choice, Count, Natural, Tunable, register


@dataclass(frozen=True, slots=True)
class WarmUp(Select):
    """The rows' first k0 routes, then `m_request` experts per request, then `m` of the batch: XShare.

    XShare, https://arxiv.org/abs/2602.07265, algorithms 1 (k0 = 0, m_request = 0), 2 (m_request = 0), 3 and 4. A
    request's experts are the best by the sum over its rows, outside the warm-up set. additive: m experts come on top;
    else m caps the whole set. The order of the last two steps, and that m is additive, are our reading.
    """

    k0: int
    m: int
    m_request: int = 0
    additive: bool = True

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
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
        return (best & batch.decode[..., None]).any(-2)


@dataclass(frozen=True, slots=True)
class RoundRobin(Select):
    """The devices take turns to add their best expert until m are chosen, so that loads stay level.

    XShare, https://arxiv.org/abs/2602.07265, algorithm 5: the largest load is ceil(m / devices) while none runs out.
    """

    m: int
    needs: ClassVar[frozenset[str]] = frozenset({"placement_device"})

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        turn = rank_on_device(total, candidate, same_device(stats))
        device = stats["placement_device"]
        when = turn * (device.amax() + 1) + device
        return Active(candidate & (rank(-when.double(), candidate) < self.m))


DEVICE_SCORES: dict[str, Score] = {"gate": GateMass(), **COSTS}
DeviceScoreName = Annotated[str, Choice(DEVICE_SCORES)]


@register(
    source="https://arxiv.org/abs/2602.07265, algorithms 1 to 4",
    example="xshare:k0=1,m=8",
    label="XShare",
    tune=Tunable("m", 0, "N"),
    variants={
        "XShare, greedy": ("xshare:k0=0,m={}",),
        "XShare, warm-up + budget": ("xshare:k0=1,m={}", "xshare:k0=2,m={}"),
    },
)
def xshare(k0: Natural, m: Natural, m_request: Natural = 0, additive: bool = True) -> Policy:
    """XShare: the rows' top-k0, m_request experts per request, then m of the batch, by router scores over all experts.

    Algorithms 1 (k0 = 0), 2, 3 and 4.
    """
    if not k0 + m + m_request:
        raise ValueError("xshare: k0, m and m_request are all 0, so no token could run any expert; give k0=1")
    return Policy(GateMass(), WarmUp(k0, m, m_request, additive), Backfill("executed"))


@register(
    source="https://arxiv.org/abs/2602.07265, algorithm 5",
    example="xshare_balanced:m=8",
    label="XShare, round-robin",
    tune=Tunable("m", 1, "N"),
)
def xshare_balanced(m: Count) -> Policy:
    """XShare's device-aware greedy rule: the devices take turns to add their best expert until there are m.

    Reads a placement.
    """
    return Policy(GateMass(), RoundRobin(m), Backfill("executed"))


@register(
    source="https://arxiv.org/abs/2602.07265, algorithm 6",
    example="xshare_ep:k0=1,m_device=2",
    label="XShare, per device",
    tune=Tunable("m_device", 0, "N"),
    variants={"XShare, per device": ("xshare_ep:k0=0,m_device={}", "xshare_ep:k0=1,m_device={}")},
)
def xshare_ep(k0: Natural, m_device: Natural, additive: bool = True, score: DeviceScoreName = "gate") -> Policy:
    """XShare for expert parallelism: the rows' top-k0, then the m_device best others of every device.

    Reads a placement. The paper's `score` is "gate", router scores over all experts; "base", "static", "squared" and
    "router_mass" are those of the policies of these names.
    """
    if not k0 + m_device:
        raise ValueError("xshare_ep: k0 and m_device are both 0, so no token could run any expert")
    return Policy(DEVICE_SCORES[score], PerDevice(k0, m_device, additive), Backfill("executed"))
