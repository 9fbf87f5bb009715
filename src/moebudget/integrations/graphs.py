"""Decode steps of a transformers model on a GPU: a layer's policy as one CUDA graph in the place of many launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moebudget.integrations.families import MoeLayer
from moebudget.integrations.steps import route_steps
from moebudget.runtime import LayerRouter
from moebudget.types import Routing

SHAPES = 16  # numbers of rows that get graphs; steps of any further number run as they are

Shape = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


@dataclass(slots=True)
class _Room:
    """What the graphs of one shape share, as layers run one after the other."""

    inputs: tuple[Tensor, ...]  # hidden [B, d], ids [B, K], weights [B, K], steps [1, B], voting [1, B] if it is given
    stream: torch.cuda.Stream | None = None  # that captures
    pool: Any = None


class StepGraphs:
    """`route_steps` for the layers of one model, with the results of `route_steps` bit for bit.

    The torch form of a policy is some two hundred small launches, which take the host about ten times as long as the
    GPU. A layer's second step of a shape is captured, and from then on costs copies into the graph's inputs, a replay,
    and copies out. What may change between steps (budget, price, what is cached, counters) lives in tensors that the
    graph reads and writes where they are.

    Run as they are: steps on the CPU, several steps at once, steps among other rows, anything with gradients,
    policies that run experts to decide (the oracle), and what is inside somebody else's capture or compilation.

    Raises RuntimeError if a policy cannot be captured, because it reads a tensor on the host for example.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self._rooms: dict[Shape, _Room] = {}
        self._graphs: dict[tuple[Shape, int], tuple[torch.cuda.CUDAGraph, Routing] | None] = {}  # None: seen once

    def __call__(self, layer: MoeLayer, router: LayerRouter, *arguments: Tensor | None) -> Routing:
        """As `route_steps`, with its arguments: hidden, ids, weights, steps, voting."""
        given = tuple(x for x in arguments if x is not None)
        if not (self.enabled and capturable(router, hidden=given[0], steps=given[3])):
            return route_steps(layer, router, *given)
        shape = tuple((x.shape, x.dtype, x.device) for x in given)
        room, key = self._room(shape, given), (shape, layer.index)
        if room is None:
            return route_steps(layer, router, *given)
        if key not in self._graphs:
            self._graphs[key] = None
            return route_steps(layer, router, *given)
        graph, routing = self._graphs[key] = self._graphs[key] or _capture(layer, router, room)
        for static, now in zip(room.inputs, given, strict=True):
            static.copy_(now)
        graph.replay()
        # Copies, as the graphs of the other layers use the same memory.
        shift = None if routing.shift is None else routing.shift.clone()
        return Routing(routing.ids.clone(), routing.weights.clone(), shift)

    def _room(self, shape: Shape, given: tuple[Tensor, ...]) -> _Room | None:
        if shape not in self._rooms and len(self._rooms) < SHAPES:
            with torch.inference_mode(False):
                self._rooms[shape] = _Room(tuple(map(torch.clone, given)))
        return self._rooms.get(shape)


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


def _capture(layer: MoeLayer, router: LayerRouter, room: _Room) -> tuple[torch.cuda.CUDAGraph, Routing]:
    """Record a step of the layer on the room's inputs; nothing runs."""
    device, graph = room.inputs[0].device, torch.cuda.CUDAGraph()
    if room.stream is None:
        room.stream, room.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    try:
        with (
            torch.cuda.device(device),
            torch.cuda.graph(graph, room.pool, room.stream, capture_error_mode="thread_local"),
        ):
            routing = route_steps(layer, router, *room.inputs)
    except RuntimeError as error:
        raise RuntimeError(
            f"policy {router.policy.name!r} cannot be captured in a CUDA graph (does it read a tensor on the host?): "
            f"attach(..., graphs=False) runs it launch by launch; {error}"
        ) from error
    return graph, routing
