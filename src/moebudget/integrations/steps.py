"""Apply a policy to the decode steps among the rows of a forward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from moebudget.fill import widen
from moebudget.integrations.families import MoeLayer
from moebudget.runtime import LayerRouter


def route_steps(
    layer: MoeLayer,
    router: LayerRouter,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    steps: Tensor,
    voting: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the layer's policy to the decode steps [S, B] of flattened tokens; everything else keeps its routes.

    hidden [T, d], ids and weights [T, K] as the model computed them. Rows that a policy leaves alone come back bit
    for bit, in the model's own slot order. Rows of a step that do not vote [S, B] run an expert of the set, weight 0.
    A policy with more than K routes a row (OEA's k_max) widens all rows; the others get unused slots.
    """
    named, rows = steps >= 0, steps.clamp_min(0)
    live = named if voting is None else named & voting
    z, own_ids, own_weights = hidden[rows], ids[rows], weights[rows]  # [S, B, ...]
    energy = None
    if router.policy.needs_energy:
        energy = layer.route_outputs(hidden, ids).float().square().sum(-1)[rows]
    batch = layer.spec(
        z, layer.logits(z), bias=layer.selection_bias, live=live, routes=(own_ids, own_weights), energy=energy
    )
    routing = router(batch)
    wide = routing.ids.shape[-1]
    ids, weights = widen(ids, weights, wide)
    own_ids, own_weights = widen(own_ids, own_weights, wide)
    before_ids, before_weights = widen(batch.ids, batch.weights, wide)
    same = (routing.ids == before_ids) & (routing.weights == before_weights)
    same = (same & batch.live[..., None]).all(-1, keepdim=True)
    new_ids = torch.where(same, own_ids, routing.ids.to(ids.dtype)).flatten(0, 1)
    new_weights = torch.where(same, own_weights, routing.weights.to(weights.dtype)).flatten(0, 1)
    padding = ids.shape[0]  # index of one extra row that empty slots write to
    target = torch.where(named, steps, padding).flatten()
    out_ids = torch.cat([ids, ids[:1]]).index_copy(0, target, new_ids)[:padding]
    out_weights = torch.cat([weights, weights[:1]]).index_copy(0, target, new_weights)[:padding]
    return out_ids, out_weights


def prefill_rows(rows: int, steps: Tensor | None, device: torch.device) -> Tensor:
    """The rows that no decode step [S, B] names, as one step [1, rows]; -1 where a step does."""
    every = torch.arange(rows, device=device)
    if steps is None:
        return every[None]
    decoding = torch.zeros(rows + 1, dtype=torch.bool, device=device)
    decoding = decoding.index_fill(0, torch.where(steps >= 0, steps, rows).flatten(), True)[:rows]
    return torch.where(decoding, -1, every)[None]


def merge_rows(routes: tuple[Tensor, Tensor], decoded: tuple[Tensor, Tensor], steps: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights [T, K]: those of `decoded` in the rows that a decode step names, of `routes` elsewhere."""
    slots = max(routes[0].shape[-1], decoded[0].shape[-1])
    routes, decoded = widen(*routes, slots), widen(*decoded, slots)
    decoding = prefill_rows(len(routes[0]), steps, steps.device)[0, :, None] < 0
    return torch.where(decoding, decoded[0], routes[0]), torch.where(decoding, decoded[1], routes[1])
