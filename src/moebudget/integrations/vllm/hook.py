"""The seam: vLLM's router of each layer calls one opaque operator after its own routing, before everything else."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor

from moebudget.integrations.vllm.board import Board
from moebudget.integrations.vllm.ranks import Watch
from moebudget.integrations.vllm.route import Router, Step
from moebudget.integrations.vllm.spec import router_spec, selection_bias

# The operator gets a layer's name, as vLLM's own does: it is the same in every process, compiled graphs may hold it.
_LAYERS: weakref.WeakValueDictionary[str, Layer] = weakref.WeakValueDictionary()


class Layer:
    """One Mixture-of-Experts layer of vLLM and its policy. `calls` counts runs of the operator on the host."""

    def __init__(self, runner: Any) -> None:
        config = runner.moe_config
        self.name, self.index = str(runner.layer_name), int(runner.layer_id)
        self.runner, self.router = runner, runner.router
        self.spec = router_spec(runner.router, int(config.num_logical_experts))
        self.hidden = int(config.hidden_dim_unpadded or config.hidden_dim)
        self.route: Router | None = None
        self.board: Board | None = None
        self.watch: Watch | None = None
        self.calls = 0
        hook(runner.router)

    def activate(self, route: Router, board: Board, watch: Watch | None = None) -> None:
        """From now on the layer's routes go through `route`; the newest engine of a process owns the name."""
        self.route, self.board, self.watch = route, board, watch
        _LAYERS[self.name] = self
        self.router.moebudget_layer = self.name

    def reroute(self, weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """vLLM's weights and ids [T, K] -> new ones. RuntimeError if there are more rows than row classes."""
        assert self.route is not None
        assert self.board is not None
        self.calls += 1
        if self.board.idle and not _capturing(ids.device):
            return weights.clone(), ids.clone()
        count = ids.shape[0]
        if count > len(self.board.rows):
            raise RuntimeError(
                f"{self.name} got {count} rows, row classes exist for {len(self.board.rows)}: "
                "raise max_num_batched_tokens to the largest captured size or above"
            )
        rows, request = self.board.rows[:count], self.board.request[:count]
        hidden = hidden[:, : self.hidden]  # vLLM may pad it for a kernel
        bias = selection_bias(self.router)
        step = Step(hidden, logits, ids, weights, rows, request, bias, self.board.voting)
        ids, weights = self.route(step)
        if self.watch is not None:
            self.watch(ids, rows)
        return weights, ids


def _capturing(device: torch.device) -> bool:
    """Whether a graph is being captured, in which nothing may depend on the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def hook(router: Any) -> None:
    """Make the instance's class a subclass of its own with the operator in it; idle until `activate`."""
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

    # The name stays, as vLLM and we tell routers by it.
    return type(cls.__name__, (cls,), {"_compute_routing": _compute_routing, "moebudget_layer": None})


def _reroute(weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: str) -> tuple[Tensor, Tensor]:
    found = _LAYERS.get(layer)
    if found is None:
        raise RuntimeError(f"no engine of this process has a layer {layer!r} under a policy")
    return found.reroute(weights, ids, hidden, logits)


def _fake(weights: Tensor, ids: Tensor, hidden: Tensor, logits: Tensor, layer: str) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return torch.empty_like(weights), torch.empty_like(ids)


_LIBRARY = torch.library.Library("moebudget", "FRAGMENT")
_LIBRARY.define(
    "reroute(Tensor weights, Tensor ids, Tensor hidden, Tensor logits, str layer) -> (Tensor, Tensor)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.impl("reroute", _reroute, "CompositeExplicitAutograd")
torch.library.register_fake("moebudget::reroute", _fake, lib=_LIBRARY)
