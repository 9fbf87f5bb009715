"""Observation of every expert layer of a transformers model: inputs, routes and unweighted outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.engines.transformers.families import MoeLayer, moe_layers

Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None]


@contextmanager
def observe_routes(model: nn.Module, observer: Observer, only: range | None = None) -> Iterator[list[MoeLayer]]:
    """Call `observer(position, hidden, logits, ids, weights, outputs)` for every Mixture-of-Experts layer.

    `position` counts those layers. hidden [T, d], logits [T, N], ids and weights [T, K] are native; outputs [T, K, d]
    are the unweighted expert outputs of the routes. The experts run once: the layer's output is the weighted sum of
    these outputs. `only` limits the observation to a range of positions.
    """
    layers = moe_layers(model)

    def observed(position: int, layer: MoeLayer) -> Callable[..., Tensor]:
        signature = inspect.signature(type(layer.experts).forward)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            hidden, ids, weights = list(signature.bind(layer.experts, *args, **kwargs).arguments.values())[1:4]
            del layer.experts.forward  # so that calls inside use the forward of the class
            try:
                outputs = layer.route_outputs(hidden, ids)
                observer(position, hidden, layer.logits(hidden), ids, weights, outputs)
            finally:
                layer.experts.forward = forward
            return torch.einsum("tk,tkd->td", weights.to(outputs.dtype), outputs)

        return forward

    with ExitStack() as undo:
        for position, layer in enumerate(layers):
            if only is None or position in only:
                undo.callback(restore, layer.experts, "forward", layer.experts.__dict__.get("forward"))
                layer.experts.forward = observed(position, layer)
        yield layers


def restore(module: nn.Module, method: str, before: Any) -> None:
    """Undo an attribute set on an instance: put back the value that it had, or remove it if there was none."""
    if before is None:
        delattr(module, method)
    else:
        setattr(module, method, before)
