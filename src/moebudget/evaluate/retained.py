"""Retained energy: the share of the best set's removal cost that a policy's active set keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moebudget.core.ops import native_union
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.core.types import NO_STATS
from moebudget.engines.transformers.observe import observe_routes
from moebudget.engines.transformers.teacher_forcing import aligned_steps
from moebudget.methods.base import TrueEnergy


@torch.no_grad()
def retained_energy(
    model: nn.Module, policies: Sequence[Policy], stats: Stats | None, windows: Tensor, *, batch: int = 16
) -> list[float]:
    """RE(A) = sum_{u in A} D*_u / sum_{u in A*} D*_u, mean over layers and positions of windows [n, S + 1].

    D* are the true removal costs of a decode batch (`batch` windows at one position) and A* the |A| experts with the
    largest costs (BASE, https://arxiv.org/abs/2609.36222, eq. 12). Every policy is measured on the same states, those
    of native routing. For methods without a fixed budget, |A| is the size of their active set at that position.
    Experts of A that no row routes to keep nothing.
    """
    device = next(model.parameters()).device
    shares, count = torch.zeros(len(policies), dtype=torch.float64), 0
    shape = (0, 0)
    truth = TrueEnergy()

    def observe(position: int, hidden: Tensor, logits: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:
        nonlocal count
        rows = aligned_steps(torch.ones(shape, dtype=torch.bool, device=hidden.device), batch)  # [S, B]
        energy = outputs.float().square().sum(-1)
        layer = layers[position]
        step = layer.spec(
            hidden[rows],
            logits[rows],
            bias=layer.selection_bias,
            routes=(ids[rows], weights[rows]),
            energy=energy[rows],
        )
        layer_stats = NO_STATS if stats is None else on_device[position]
        routed = native_union(step)  # [S, N]
        cost = truth(step, layer_stats).sum(-2).masked_fill(~routed, -1.0)
        best = cost.sort(dim=-1, descending=True).values
        counted = best[:, 0] > 0  # steps with energy to keep
        size = torch.arange(cost.shape[-1], device=cost.device)
        for i, policy in enumerate(policies):
            mask = policy.active(step, layer_stats).mask
            top = torch.where(size < mask.sum(-1, keepdim=True), best.clamp_min(0), 0.0).sum(-1)
            kept = torch.where(mask & routed, cost, 0.0).sum(-1)
            shares[i] += (kept / top)[counted].double().sum().cpu()
        count += int(counted.sum())

    with observe_routes(model, observe) as layers:
        on_device = [] if stats is None else [stats.layer(i).to(layer.weight.device) for i, layer in enumerate(layers)]
        for start in range(0, len(windows), batch):
            ids = windows[start : start + batch, :-1].to(device)
            shape = (ids.shape[0], ids.shape[1])
            getattr(model, "base_model", model)(input_ids=ids, use_cache=False)
    return [float(s) / count for s in shares]
