"""One layer's router: a policy with its statistics, a budget and counters on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from moebudget.core.counters import COUNTERS, Counter, count_step
from moebudget.core.policy import Policy
from moebudget.core.types import NO_STATS, LayerStats, RouterBatch, Routing


class Holding(Protocol):
    """A layer's router under a price that holds its average: reads `scale`, writes the next layer's."""

    scale: Tensor  # [1] float64
    following: Tensor  # [1] float64
    hold: float  # share of an excess that one layer corrects in one step; 0: the price stays


def chain(routers: Sequence[Holding]) -> None:
    """Let a model's layers move one price together: each corrects its part, and the last hands it to the first.

    A single router keeps its own price.
    """
    if len(routers) < 2:
        return
    for router, after in zip(routers, [*routers[1:], *routers[:1]], strict=True):
        router.following = after.scale
        router.hold /= len(routers)


def followed(scale: Tensor, hold: float, counts: Tensor, budget: Tensor) -> Tensor:
    """The price's factor [1] after steps with these counters [len(COUNTERS)]: scale (1 + c (F - M') / M').

    F is the experts fetched per step and M' the budget, or the native union if that is smaller. c is `hold` after one
    step, and 1 - (1 - hold)^steps after several that were decided at once (teacher forcing). Without a voting row the
    factor stays.
    """
    steps, union, fetched = (counts[c] for c in (Counter.STEPS, Counter.NATIVE_UNION, Counter.FETCHED))
    aim = torch.minimum(budget * steps, union).clamp_min(1.0)
    share = 1.0 - (1.0 - hold) ** steps
    return scale * (1.0 + share * (fetched - aim) / aim)


class LayerRouter:
    """One policy on one Mixture-of-Experts layer, as engines call it: `router(batch) -> Routing`.

    Holds the policy with its budget as a device tensor (so that it can change without a new graph capture), the
    layer's statistics on the device, and the counters.
    """

    def __init__(self, policy: Policy, stats: LayerStats = NO_STATS, device: torch.device | str = "cpu") -> None:
        self.stats = LayerStats({name: stats[name].to(device) for name in sorted(policy.needs)})
        self.budget: Tensor | None = None
        if policy.budget is not None:
            self.budget = torch.as_tensor(policy.budget, dtype=torch.int64, device=device).clone()
            policy = policy.with_budget(self.budget)
        self.policy = policy
        self.hold = policy.select.get_hold()
        self.scale = torch.ones(1, dtype=torch.float64, device=device)
        self.following = self.scale
        self.totals = torch.zeros(len(COUNTERS), dtype=torch.float64, device=device)

    def __call__(self, batch: RouterBatch) -> Routing:
        """Route one step [T, ...] or many independent ones [S, T, ...], and count."""
        stats = LayerStats({**self.stats.tensors, "price_scale": self.scale}) if self.hold else self.stats
        routing = self.policy(batch, stats)
        counts = count_step(batch, routing).reshape(-1, len(COUNTERS)).sum(0)
        self.totals += counts
        if self.hold:
            assert self.budget is not None
            self.following.copy_(followed(self.scale, self.hold, counts, self.budget))
        return routing

    def set_budget(self, budget: int) -> None:
        """Change the budget from the next step on. Raises ValueError below 1 or for a policy without a budget."""
        checked = self.policy.checked_budget(budget)
        assert self.budget is not None  # the policy has one
        self.budget.fill_(checked)
