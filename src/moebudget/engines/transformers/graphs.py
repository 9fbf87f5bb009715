"""CUDA graphs of decode steps in a transformers model: a layer's policy as one replay instead of many launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebudget.core.layer_router import LayerRouter
from moebudget.core.types import Routing
from moebudget.engines.transformers.families import MoeLayer
from moebudget.engines.transformers.steps import route_steps

SHAPES = 16  # numbers of rows that get graphs; steps with any further number of rows run without

Shape = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


@dataclass(slots=True)
class _Shared:
    """Memory that the graphs of one shape share, which is safe because layers run one after the other."""

    inputs: tuple[Tensor, ...]  # hidden [B, d], ids [B, K], weights [B, K], steps [1, B], and voting [1, B] if used
    stream: torch.cuda.Stream | None = None  # captures the graphs
    pool: Any = None


class StepGraphs:
    """`route_steps` for the layers of one model, with the results of `route_steps` bit for bit.

    The torch form of a policy is about two hundred small launches, which take the host about ten times as long as the
    GPU. A layer's second step of a shape is captured. From then on a step costs copies into the graph's inputs, a
    replay, and copies out. State that may change between steps (budget, price, cached experts, counters) is in tensors
    that the graph reads and writes in place.

    These run without a graph: steps on the CPU, several steps at once, steps among other rows, anything with
    gradients, policies that run experts to decide (the oracle), and steps inside another capture or compilation.

    Raises RuntimeError if a policy cannot be captured, for example because it reads a tensor on the host.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._shared: dict[Shape, _Shared] = {}
        self._graphs: dict[tuple[Shape, int], tuple[torch.cuda.CUDAGraph, Routing] | None] = {}  # None: seen once

    def __call__(self, layer: MoeLayer, router: LayerRouter, *arguments: Tensor | None) -> Routing:
        """As `route_steps`, with its arguments: hidden, ids, weights, steps, voting."""
        inputs = tuple(x for x in arguments if x is not None)
        if not (self.enabled and capturable(router, hidden=inputs[0], steps=inputs[3])):
            return route_steps(layer, router, *inputs)
        shape = tuple((x.shape, x.dtype, x.device) for x in inputs)
        shared, key = self._shared_memory(shape, inputs), (shape, layer.index)
        if shared is None:
            return route_steps(layer, router, *inputs)
        if key not in self._graphs:
            self._graphs[key] = None
            return route_steps(layer, router, *inputs)
        graph, routing = self._graphs[key] = self._graphs[key] or _capture(layer, router, shared)
        for static, current in zip(shared.inputs, inputs, strict=True):
            static.copy_(current)
        graph.replay()
        # The results are copied, because the graphs of the other layers use the same memory.
        shift = None if routing.shift is None else routing.shift.clone()
        return Routing(routing.ids.clone(), routing.weights.clone(), shift)

    def _shared_memory(self, shape: Shape, inputs: tuple[Tensor, ...]) -> _Shared | None:
        if shape not in self._shared and len(self._shared) < SHAPES:
            with torch.inference_mode(False):
                self._shared[shape] = _Shared(tuple(map(torch.clone, inputs)))
        return self._shared.get(shape)


def capturable(router: LayerRouter, hidden: Tensor, steps: Tensor) -> bool:
    """Whether a layer's step may be captured: hidden [T, d], steps [S, B]."""
    return (
        hidden.is_cuda
        and steps.shape == (1, len(hidden))
        and steps.device == hidden.device
        and not torch.is_grad_enabled()
        and not router.policy.needs_energy
        and not torch.cuda.is_current_stream_capturing()
        and not torch.compiler.is_compiling()
    )


def _capture(layer: MoeLayer, router: LayerRouter, shared: _Shared) -> tuple[torch.cuda.CUDAGraph, Routing]:
    """Record a step of the layer on the shared inputs; nothing runs."""
    device, graph = shared.inputs[0].device, torch.cuda.CUDAGraph()
    if shared.stream is None:
        shared.stream, shared.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    try:
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, shared.pool, shared.stream, capture_error_mode="thread_local"),
        ):
            routing = route_steps(layer, router, *shared.inputs)
    except RuntimeError as error:
        raise RuntimeError(
            f"policy {router.policy.name!r} cannot be captured in a CUDA graph (does it read a tensor on the host?): "
            f"use attach(..., graphs=False) to run it launch by launch; {error}"
        ) from error
    return graph, routing
