"""One layer's policy as vLLM's hook calls it: rows that vote take the policy's routes, all others keep vLLM's."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from moebudget.integrations.vllm.board import PADDING, VOTES
from moebudget.kernels.lower import FusedRouter, NotFusedError, lower
from moebudget.policy import Policy
from moebudget.router import RouterSpec
from moebudget.runtime import LayerRouter
from moebudget.types import LayerStats, Routing


class Router(Protocol):
    """What `make_router` returns."""

    path: str  # "kernel", or "torch" and why

    @property
    def totals(self) -> Tensor: ...

    def set_budget(self, budget: int) -> None: ...

    def clear(self) -> None: ...

    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        routes: tuple[Tensor, Tensor],
        rows: Tensor,
        request: Tensor,
        bias: Tensor | None,
        voting: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden [T, d], logits [T, N], vLLM's (ids, weights) [T, K], rows [T] int8, request [T] -> ids, weights.

        `voting` [V] names the rows that vote, in steps of more rows than the board calls wide. The result has the
        dtypes of vLLM's tensors and shares no memory with them. Ids of padding may be -1.
        """


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
            lower(policy, spec)
        except NotFusedError as reason:
            return TorchRouter(policy, spec, stats, device, f"torch ({reason})")
        return KernelRouter(FusedRouter(policy, spec, stats, hidden=hidden, max_rows=max_rows, device=device))


class TorchRouter:
    """The policy as the library defines it, with device values for everything that may change."""

    def __init__(self, policy: Policy, spec: RouterSpec, stats: LayerStats, device: torch.device, path: str) -> None:
        self.spec, self.path = spec, path
        self.core = LayerRouter(policy, stats, device)

    @property
    def totals(self) -> Tensor:
        return self.core.totals

    def set_budget(self, budget: int) -> None:
        self.core.set_budget(budget)

    def clear(self) -> None:
        self.core.totals.zero_()

    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        routes: tuple[Tensor, Tensor],
        rows: Tensor,
        request: Tensor,
        bias: Tensor | None,
        voting: Tensor | None = None,  # noqa: ARG002, it looks at all rows
    ) -> tuple[Tensor, Tensor]:
        votes = rows == VOTES
        batch = self.spec(hidden, logits, bias=bias, live=votes, routes=routes, request=request)
        routing = self.core(batch)
        changed = ((routing.ids != batch.ids) | (routing.weights != batch.weights)).any(-1)
        # Without a vote there is no set that padding could be moved into.
        take = (votes & changed) | ((rows == PADDING) & votes.any())
        ids, weights = routes
        return (
            torch.where(take[:, None], routing.ids.to(ids.dtype), ids),
            torch.where(take[:, None], routing.weights.to(weights.dtype), weights),
        )


class KernelRouter:
    """The fused kernel: two launches, reads the row classes and the budget on the device."""

    path = "kernel"

    def __init__(self, fused: FusedRouter) -> None:
        self.fused = fused

    @property
    def totals(self) -> Tensor:
        return self.fused.totals

    def set_budget(self, budget: int) -> None:
        self.fused.set_budget(budget)

    def clear(self) -> None:
        self.fused.counters.zero_()

    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        routes: tuple[Tensor, Tensor],
        rows: Tensor,
        request: Tensor,  # noqa: ARG002, no fused policy looks at requests
        bias: Tensor | None,
        voting: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        ids, weights = routes
        if len(ids) <= self.fused.max_rows:
            return self._run(hidden, logits, rows, bias, ids, weights)
        # A prompt of many tokens beside rows that decode, in no graph: only the latter are looked at.
        assert voting is not None
        ids, weights = ids.clone(), weights.clone()
        if len(voting):
            found = self._run(hidden[voting], logits[voting], None, bias, ids[voting], weights[voting])
            ids[voting], weights[voting] = found
        return ids, weights

    def _run(
        self, hidden: Tensor, logits: Tensor, rows: Tensor | None, bias: Tensor | None, ids: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = Routing(ids, weights.float())
        out = Routing(torch.empty_like(ids), torch.empty_like(own.weights))
        self.fused(hidden, logits, rows, bias, out, own)
        return out.ids, out.weights.to(weights.dtype)
