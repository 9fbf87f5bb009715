"""One layer's policy as vLLM's hook calls it: rows that vote take the policy's routes, all others keep vLLM's."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moebudget.integrations.vllm.board import PADDING, VOTES
from moebudget.kernels import FusedRouter, NotFusedError
from moebudget.policy import Policy
from moebudget.router import RouterSpec
from moebudget.runtime import Holding, LayerRouter
from moebudget.types import LayerStats, Routing


class Step(NamedTuple):
    """What one layer is asked in one step. `voting` is given in steps of more rows than the board calls wide."""

    hidden: Tensor  # [T, d]
    logits: Tensor  # [T, N]
    ids: Tensor  # [T, K] vLLM's own; -1 in padding
    weights: Tensor  # [T, K]
    rows: Tensor  # [T] int8, row classes
    request: Tensor  # [T] int64
    bias: Tensor | None  # [N]
    voting: Tensor | None = None  # [V] int64, the rows that vote


class Router(Protocol):
    """What `make_router` returns."""

    path: str  # "kernel", or "torch" and why

    @property
    def holding(self) -> Holding: ...

    @property
    def totals(self) -> Tensor: ...

    def set_budget(self, budget: int) -> None: ...

    def clear(self) -> None:
        """Counters to 0, a price that follows the traffic back to where it was calibrated."""

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """Ids and weights [T, K], of the dtypes of vLLM's tensors and sharing no memory with them."""


def make_router(
    policy: Policy,
    spec: RouterSpec,
    stats: LayerStats,
    *,
    hidden: int,
    max_rows: int,
    device: torch.device,
) -> Router:
    """The fused kernel on a GPU for what it covers, else the torch form, which says why."""
    with torch.inference_mode(False):
        if device.type != "cuda":
            return TorchRouter(policy, spec, stats, device, f"torch ({device.type})")
        try:
            return KernelRouter(FusedRouter(policy, spec, stats, hidden=hidden, max_rows=max_rows, device=device))
        except NotFusedError as reason:
            return TorchRouter(policy, spec, stats, device, f"torch ({reason})")


class TorchRouter:
    """The policy as the library defines it, with device values for everything that may change."""

    def __init__(self, policy: Policy, spec: RouterSpec, stats: LayerStats, device: torch.device, path: str) -> None:
        self.spec, self.path = spec, path
        self.core = self.holding = LayerRouter(policy, stats, device)

    @property
    def totals(self) -> Tensor:
        return self.core.totals

    def set_budget(self, budget: int) -> None:
        self.core.set_budget(budget)

    def clear(self) -> None:
        self.core.totals.zero_()
        self.core.scale.fill_(1)

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        votes, routes = step.rows == VOTES, (step.ids, step.weights)
        batch = self.spec(step.hidden, step.logits, bias=step.bias, live=votes, routes=routes, request=step.request)
        routing = self.core(batch)
        changed = ((routing.ids != batch.ids) | (routing.weights != batch.weights)).any(-1)
        # Without a vote there is no set that padding could be moved into.
        take = ((votes & changed) | ((step.rows == PADDING) & votes.any()))[:, None]
        return (
            torch.where(take, routing.ids.to(step.ids.dtype), step.ids),
            torch.where(take, routing.weights.to(step.weights.dtype), step.weights),
        )


class KernelRouter:
    """The fused kernel: two launches, reads the row classes and the budget on the device."""

    path = "kernel"

    def __init__(self, fused: FusedRouter) -> None:
        self.fused = self.holding = fused

    @property
    def totals(self) -> Tensor:
        return self.fused.totals

    def set_budget(self, budget: int) -> None:
        self.fused.set_budget(budget)

    def clear(self) -> None:
        self.fused.counters.zero_()
        self.fused.scale.fill_(1)

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        if len(step.ids) <= self.fused.max_rows:
            return self._run(step, step.rows)
        # A prompt of many tokens beside rows that decode, in no graph: only the latter are looked at.
        assert step.voting is not None
        ids, weights, at = step.ids.clone(), step.weights.clone(), step.voting
        if len(at):
            part = step._replace(hidden=step.hidden[at], logits=step.logits[at], ids=ids[at], weights=weights[at])
            ids[at], weights[at] = self._run(part, None)
        return ids, weights

    def _run(self, step: Step, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """All rows vote if `rows` is None. No fused policy looks at requests."""
        own = Routing(step.ids, step.weights.float())
        out = Routing(torch.empty_like(own.ids), torch.empty_like(own.weights))
        self.fused(step.hidden, step.logits, rows, step.bias, out, own)
        return out.ids, out.weights.to(step.weights.dtype)
