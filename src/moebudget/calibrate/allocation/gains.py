"""Alternatives to plain one-layer losses: gradients of one backward pass, and a denominator per layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.calibrate.allocation.measure import Measured, Trials, loss_curves
from moebudget.engines.transformers.families import moe_layers
from moebudget.engines.transformers.teacher_forcing import pieces, teacher_forced
from moebudget.methods.base import base

EXPONENTS = {"native": 0.0, "geometric": 0.5, "executed": 1.0}  # values of `layer_fill`


def layer_gradients(model: nn.Module, windows: Tensor, *, batch: int = 16, prefill: int = 1) -> Tensor:
    """Mean over decoded tokens of |dL/dy_t|^2, y_t a layer's routed output and L the summed loss in nats: float64 [L].

    windows [n, S + 1]; native routing, one forward and one backward pass.
    """
    total, count = torch.zeros(len(moe_layers(model)), dtype=torch.float64), 0
    device = next(model.parameters()).device
    for part in pieces(windows, batch):
        ids, targets, _ = teacher_forced(part.to(device), prefill, batch)
        probes = list[Tensor]()

        def probe(_module: nn.Module, _args: Any, output: Tensor, probes: list[Tensor] = probes) -> Tensor:
            probes.append(torch.zeros_like(output, requires_grad=True))
            return output + probes[-1]

        with ExitStack() as undo, torch.enable_grad():
            for layer in moe_layers(model):
                undo.callback(layer.experts.register_forward_hook(probe).remove)
            logits = model(input_ids=ids, use_cache=False).logits[:, prefill:].flatten(0, 1).float()
            loss = nn.functional.cross_entropy(logits, targets[:, prefill:].flatten(), reduction="sum")
            gradients = torch.autograd.grad(loss, probes)
        for position, gradient in enumerate(gradients):
            total[position] += gradient.reshape(*ids.shape, -1)[:, prefill:].double().square().sum().cpu()
        count += ids[:, prefill:].numel()
    return total / count


def gradient_curves(trials: Trials, union: Sequence[int]) -> Tensor:
    """Substitutes for one-layer losses, [L, N]: g_l times the predicted cost per row of all but the m largest sums.

    g_l is `layer_gradients`: an output change of energy D changes the loss by about sqrt(g_l D / d) in either
    direction, so g_l D is comparable between layers.
    """
    experts = trials.stats.facts.experts
    gains = layer_gradients(trials.model, trials.windows, batch=trials.batch, prefill=trials.prefill)
    curves = torch.zeros(len(union), experts, dtype=torch.float64)
    for position, costs in enumerate(trials.costs([experts] * len(union))):
        largest = costs.clamp_min(0.0).sort(dim=-1, descending=True).values  # [steps, N]
        left = largest.sum(-1, keepdim=True) - largest.cumsum(-1)
        curves[position] = gains[position] * left.clamp_min(0.0).mean(0) / trials.batch
        curves[position, union[position] - 1 :] = 0.0
    return curves


def choose_denominators(curves: dict[str, Tensor], union: Sequence[int]) -> tuple[Tensor, Tensor]:
    """One-layer losses [L, N] by denominator -> `layer_fill` float32 [L, N], and the losses with it.

    `layer_fill` is the exponent of the denominator with the lowest loss at each budget. Ties go to `native`, and so do
    budgets of at least the layer's native union, where no row is re-routed.
    """
    best = torch.stack([curves[name] for name in EXPONENTS]).min(0)
    exponents = torch.tensor(list(EXPONENTS.values()))[best.indices]
    unrestricted = torch.arange(1, exponents.shape[1] + 1) >= torch.tensor(union)[:, None]
    return exponents.masked_fill(unrestricted, 0.0), best.values


def with_denominators(
    trials: Trials, native: Measured, union: Sequence[int], relative: float
) -> tuple[Trials, Tensor]:
    """Trials of the fill `by_layer` whose statistics hold `layer_fill`, and its one-layer losses [L, N]."""
    curves = {}
    for name in EXPONENTS:
        trials.policy = base(1, name, relative)
        curves[name] = loss_curves(trials, native, union, trials.stats.facts.experts)
    exponents, best = choose_denominators(curves, union)
    stats = dataclasses.replace(trials.stats, tensors={**trials.stats.tensors, "layer_fill": exponents})
    by_layer = Trials(trials.model, base(1, "by_layer", relative), stats, trials.windows, batch=trials.batch)
    by_layer.count = trials.count
    return by_layer, best
