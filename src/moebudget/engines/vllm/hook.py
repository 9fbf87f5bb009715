"""Hook in vLLM's routers: an opaque operator that re-routes a layer's rows right after native routing."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from moebudget.engines.vllm.ranks import RankCounters
from moebudget.engines.vllm.route import Router, Step
from moebudget.engines.vllm.router_spec import router_spec, selection_bias
from moebudget.engines.vllm.row_kinds import StepRows

# The operator takes a layer's name, as vLLM's own operators do: compiled graphs may hold it, in any process.
_LAYERS: weakref.WeakValueDictionary[str, Layer] = weakref.WeakValueDictionary()


class Layer:
    """One Mixture-of-Experts layer of vLLM under a policy. `calls` counts runs of the operator on the host."""

    def __init__(self, runner: Any) -> None:
        config = runner.moe_config
        self.name, self.index = str(runner.layer_name), int(runner.layer_id)
        self.runner, self.router = runner, runner.router
        self.spec = router_spec(runner.router, int(config.num_logical_experts))
        self.hidden = int(config.hidden_dim_unpadded or config.hidden_dim)
        self.route: Router | None = None
        self.step_rows: StepRows | None = None
        self.rank_counters: RankCounters | None = None
        self.calls = 0
        hook(runner.router)

    def activate(self, route: Router, step_rows: StepRows, rank_counters: RankCounters | None = None) -> None:
        """Re-route the layer's rows by `route` from now on; the newest engine of a process owns the name."""
        self.route, self.step_rows, self.rank_counters = route, step_rows, rank_counters
        _LAYERS[self.name] = self
        self.router.moebudget_layer = self.name

    def reroute(self, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """vLLM's weights and ids [T, K] -> the executed ones. RuntimeError if a row has no row kind."""
        assert self.route is not None
        assert self.step_rows is not None
        self.calls += 1
        if self.step_rows.idle and not _capturing(ids.device):
            return weights.clone(), ids.clone()
        count = ids.shape[0]
        if count > len(self.step_rows.kind):
            raise RuntimeError(
                f"{self.name} got {count} rows, but only {len(self.step_rows.kind)} have a row kind: "
                "raise max_num_batched_tokens to the largest captured size or above"
            )
        kind, request = self.step_rows.kind[:count], self.step_rows.request[:count]
        hidden = hidden[:, : self.hidden]  # without what vLLM may pad for a kernel
        bias = selection_bias(self.router)
        step = Step(hidden, logits, ids, weights, kind, request, bias, self.step_rows.voting)
        ids, weights = self.route(step)
        if self.rank_counters is not None:
            self.rank_counters(ids, kind)
        return weights, ids


def _capturing(device: torch.device) -> bool:
    """Whether a graph is being captured; then nothing may depend on the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def hook(router: Any) -> None:
    """Make the router an instance of a subclass that calls the operator; idle until `activate`."""
    cls: Any = type(router)
    router.__class__ = _hooked(cls)


@functools.cache
def _hooked(cls: type) -> type:
    # Single inheritance: with a second base in front Python refuses to change an instance's class.
    def _compute_routing(
        self: Any, hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        weights, ids = cls._compute_routing(self, hidden_states, router_logits, *args, **kwargs)  # type: ignore[attr-defined]
        if self.moebudget_layer is None:
            return weights, ids
        op = torch.ops.moebudget.reroute
        return op(weights, ids, hidden_states, router_logits, self.moebudget_layer)  # type: ignore[no-any-return]

    # Keep the name: vLLM and moebudget tell routers apart by it.
    return type(cls.__name__, (cls,), {"_compute_routing": _compute_routing, "moebudget_layer": None})


def _reroute(weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    capped = _LAYERS.get(layer)
    if capped is None:
        raise RuntimeError(f"no engine of this process has a layer {layer!r} under a policy")
    return capped.reroute(weights, ids, hidden, logits)


def _fake(weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(weights), torch.empty_like(ids)


_LIBRARY = torch.library.Library("moebudget", "FRAGMENT")
_LIBRARY.define(
    "reroute(Tensor weights, Tensor ids, Tensor hidden, Tensor logits, str layer) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("reroute", _reroute, "CompositeExplicitAutograd")
torch.library.register_fake("moebudget::reroute", _fake, lib=_LIBRARY)
