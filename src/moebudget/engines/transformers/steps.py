"""Decode steps among the rows of a forward pass, and the policy applied to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moebudget.core.layer_router import LayerRouter
from moebudget.core.ops import native_rows, widen
from moebudget.core.types import Routing
from moebudget.engines.transformers.families import MoeLayer


def route_steps(
    layer: MoeLayer,
    router: LayerRouter,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    steps: Tensor,
    voting: Tensor | None = None,
) -> Routing:
    """Apply the layer's policy to the decode steps [S, B] of flattened tokens; all other rows keep native routes.

    hidden [T, d], ids and weights [T, K] are native. Rows that keep their native routes come back bit for bit, in the
    model's slot order. Rows of a step that do not vote (`voting` [S, B]) name an expert of the active set, with weight
    0. A policy with more than K routes per row (OEA's k_max) widens all rows; the other rows get unused slots. The
    shift is 0 in rows that no step names.
    """
    named, rows = steps >= 0, steps.clamp_min(0)
    kind = named if voting is None else named & voting  # bool as RowKind: DECODE, or PAD
    z, native_ids, native_weights = hidden[rows], ids[rows], weights[rows]  # [S, B, ...]
    energy = None
    if router.policy.needs_energy:
        energy = layer.route_outputs(hidden, ids).float().square().sum(-1)[rows]
    batch = layer.spec(
        z, layer.logits(z), bias=layer.selection_bias, kind=kind, routes=(native_ids, native_weights), energy=energy
    )
    routing = router(batch)
    wide = routing.ids.shape[-1]
    ids, weights = widen(ids, weights, wide)
    native_ids, native_weights = widen(native_ids, native_weights, wide)
    native = native_rows(routing, batch)[..., None]
    new_ids = torch.where(native, native_ids, routing.ids.to(ids.dtype)).flatten(0, 1)
    new_weights = torch.where(native, native_weights, routing.weights.to(weights.dtype)).flatten(0, 1)
    padding = ids.shape[0]  # index of one extra row that empty slots write to
    target = torch.where(named, steps, padding).flatten()
    out_ids = torch.cat([ids, ids[:1]]).index_copy(0, target, new_ids)[:padding]
    out_weights = torch.cat([weights, weights[:1]]).index_copy(0, target, new_weights)[:padding]
    if routing.shift is None:
        return Routing(out_ids, out_weights)
    shift = routing.shift.new_zeros(padding + 1, hidden.shape[-1])
    return Routing(out_ids, out_weights, shift.index_copy(0, target, routing.shift.flatten(0, 1))[:padding])


def route_forward(
    layer: MoeLayer,
    decode: Callable[..., Routing],
    prefill: LayerRouter | None,
    inputs: tuple[Tensor, Tensor, Tensor],
    steps: Tensor | None,
    voting: Tensor | None,
) -> Routing:
    """Routing of one forward pass: `decode` routes the decode steps, `prefill` (None: native routes) the other rows.

    inputs: hidden [T, d], native ids and weights [T, K]. `decode` takes inputs, steps and voting as `route_steps`
    does.
    """
    ids, weights = inputs[1:]
    routed = Routing(ids, weights)
    if prefill is not None:
        routed = route_steps(layer, prefill, *inputs, prefill_rows(len(ids), steps, ids.device))
    if steps is None:
        return routed
    decoded = decode(*inputs, steps, voting)
    if prefill is None:
        return decoded
    shifts = [r.shift for r in (routed, decoded) if r.shift is not None]  # of different rows
    merged = merge_rows((routed.ids, routed.weights), (decoded.ids, decoded.weights), steps)
    return Routing(*merged, sum(shifts, torch.zeros_like(shifts[0])) if shifts else None)


def prefill_rows(rows: int, steps: Tensor | None, device: torch.device) -> Tensor:
    """The rows that no decode step [S, B] names, as one step [1, rows]; -1 in place of the others."""
    all_rows = torch.arange(rows, device=device)
    if steps is None:
        return all_rows[None]
    decoding = torch.zeros(rows + 1, dtype=torch.bool, device=device)
    decoding = decoding.index_fill(0, torch.where(steps >= 0, steps, rows).flatten(), True)[:rows]
    return torch.where(decoding, -1, all_rows)[None]


def merge_rows(routes: tuple[Tensor, Tensor], decoded: tuple[Tensor, Tensor], steps: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and weights [T, K]: from `decoded` in rows that a decode step names, from `routes` in all others."""
    slots = max(routes[0].shape[-1], decoded[0].shape[-1])
    routes, decoded = widen(*routes, slots), widen(*decoded, slots)
    decoding = prefill_rows(len(routes[0]), steps, steps.device)[0, :, None] < 0
    return torch.where(decoding, decoded[0], routes[0]), torch.where(decoding, decoded[1], routes[1])
