"""Watch every expert layer of a transformers model: inputs, routes and unweighted outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.integrations.families import MoeLayer, moe_layers

Observer = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None]


@contextmanager
def observe_routes(model: nn.Module, observer: Observer, only: range | None = None) -> Iterator[list[MoeLayer]]:
    """Call `observer(position, hidden, logits, ids, weights, outputs)` for every Mixture-of-Experts layer.

    position counts those layers; hidden [T, d], logits [T, N], ids and weights [T, K] are the model's own, outputs
    [T, K, d] the routes' unweighted expert outputs. The experts run once: the layer's output is made from the same
    outputs. `only` limits the observation to a range of positions.
    """
    layers = moe_layers(model)

    def observed(position: int, layer: MoeLayer) -> Callable[..., Tensor]:
        signature = inspect.signature(type(layer.experts).forward)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            hidden, ids, weights = list(signature.bind(layer.experts, *args, **kwargs).arguments.values())[1:4]
            del layer.experts.forward  # the class's own, for the calls inside
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
    """Undo an attribute set on the instance: put back what was there, or nothing."""
    if before is None:
        delattr(module, method)
    else:
        setattr(module, method, before)
