"""Routers of one layer under a policy: rows that vote take the policy's routes, all others keep the native ones."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moebudget.core.layer_router import Holding, LayerRouter
from moebudget.core.ops import native_rows
from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.core.types import LayerStats, Routing, RowKind
from moebudget.kernels import FusedRouter, NotFusedError


class Step(NamedTuple):
    """Input of one layer in one step. `voting` is set only in a step of more rows than `StepRows.wide`."""

    hidden: Tensor  # [T, d]
    logits: Tensor  # [T, N]
    ids: Tensor  # [T, K] native, as vLLM orders them; -1 in padding
    weights: Tensor  # [T, K]
    kind: Tensor  # [T] int8 RowKind
    request: Tensor  # [T] int64
    bias: Tensor | None  # [N]
    voting: Tensor | None = None  # [V] int64, indices of the rows that vote


class Router(Protocol):
    """One layer's router under a policy, as `make_router` returns it."""

    path: str  # "kernel", or "torch" and the reason

    @property
    def holding(self) -> Holding: ...

    @property
    def totals(self) -> Tensor: ...

    def set_budget(self, budget: int) -> None: ...

    def clear(self) -> None:
        """Set the counters to 0, and a price that follows the traffic to its calibrated value."""

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """Executed ids and weights [T, K], in the dtypes of vLLM's tensors; they share no memory with them."""


def make_router(
    policy: Policy,
    spec: RouterSpec,
    stats: LayerStats,
    *,
    hidden: int,
    max_rows: int,
    device: torch.device,
) -> Router:
    """The fused kernel on a GPU if it covers the policy, else the torch form, whose `path` gives the reason."""
    with torch.inference_mode(False):
        if device.type != "cuda":
            return TorchRouter(policy, spec, stats, device, f"torch ({device.type})")
        try:
            return KernelRouter(FusedRouter(policy, spec, stats, hidden=hidden, max_rows=max_rows, device=device))
        except NotFusedError as reason:
            return TorchRouter(policy, spec, stats, device, f"torch ({reason})")


class TorchRouter:
    """The torch form of the policy; everything that may change is a device value."""

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
        routes = step.ids, step.weights
        batch = self.spec(
            step.hidden, step.logits, bias=step.bias, kind=step.kind, routes=routes, request=step.request
        )
        routing = self.core(batch)
        # Without a vote there is no active set for padding to point into.
        idle = (step.kind == RowKind.PAD.value) & ~(step.kind == RowKind.DECODE.value).any()
        native = (native_rows(routing, batch) | idle)[:, None]
        return (
            torch.where(native, step.ids, routing.ids.to(step.ids.dtype)),
            torch.where(native, step.weights, routing.weights.to(step.weights.dtype)),
        )


class KernelRouter:
    """The fused kernel: two launches that read the row kinds and the budget on the device."""

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
            return self._run(step, step.kind)
        # A long prompt beside decode rows, in no graph: the kernel sees only the decode rows.
        assert step.voting is not None
        ids, weights, voting = step.ids.clone(), step.weights.clone(), step.voting
        if len(voting):
            hidden, logits = step.hidden[voting], step.logits[voting]
            decode = step._replace(hidden=hidden, logits=logits, ids=ids[voting], weights=weights[voting])
            ids[voting], weights[voting] = self._run(decode, None)
        return ids, weights

    def _run(self, step: Step, kind: Tensor | None) -> tuple[Tensor, Tensor]:
        """All rows vote if `kind` is None. No fused policy reads requests."""
        native = Routing(step.ids, step.weights.float())
        out = Routing(torch.empty_like(native.ids), torch.empty_like(native.weights))
        self.fused(step.hidden, step.logits, kind, step.bias, out, native)
        return out.ids, out.weights.to(step.weights.dtype)
