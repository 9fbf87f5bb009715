"""Slots and weights of a row that is re-routed inside the active set.

`probs`, `opened` and `active` [NP] are by expert. All other vectors [NP] are by place: place 0 holds the expert that
the router ranks first, the places below K hold the native routes, and `expert_at` names the expert at each place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.batch import BROKEN, DECODE, NATIVE
from moebudget.kernels.lower import DENOMINATORS
from moebudget.kernels.rows import TINY, best_expert

# Denominators of a row's router scores, in models that renormalise: their sum over the native routes, over the
# executed ones, or the geometric mean of both.
BY_NATIVE: tl.constexpr = tl.constexpr(DENOMINATORS.index("native"))
BY_EXECUTED: tl.constexpr = tl.constexpr(DENOMINATORS.index("executed"))
BY_GEOMETRIC: tl.constexpr = tl.constexpr(DENOMINATORS.index("geometric"))


@triton.jit
def slots_in_set(opened, active, kind, expert_at, NP: tl.constexpr, K: tl.constexpr, DROP: tl.constexpr):
    """By place: whether the row may run the expert (int32), its slot, and whether it takes that slot.

    Rows of kind NATIVE may run every expert that is open to them.
    """
    open_to_row = opened & ((kind == NATIVE) | (active & (kind == DECODE)))
    allowed = tl.gather(open_to_row.to(tl.int32), expert_at, 0)
    slot = tl.arange(0, NP)
    if not DROP:
        slot = tl.cumsum(allowed, 0) - 1
    return allowed, slot, (allowed > 0) & (slot < K)


@triton.jit
def fallback(probs, active, used, count, expert_at, NP: tl.constexpr, K: tl.constexpr):
    """The set's best expert for the row, the expert that its empty slots name, and the router score of the best.

    A row without any expert of the set runs the best one. Padding and broken rows name it with weight 0, and empty
    slots name the row's first expert. All are 0 for a row whose K slots are in use.
    """
    lone, first, alone = 0, 0, 0.0
    if count < K:
        expert, place = tl.arange(0, NP), tl.arange(0, NP)
        sound = tl.where(probs == probs, probs, 0.0)
        lone = best_expert(sound, active, NP)
        head = tl.min(tl.where(used, place, NP), 0)
        first = tl.where(count == 0, lone, tl.sum(tl.where(place == head, expert_at, 0), 0))
        alone = tl.sum(tl.where(expert == lone, sound, 0.0), 0)
    return lone, first, alone


@triton.jit
def weight_scale(ranked, mass, used, kind, rescued, alone, ROUTER: tl.constexpr, DENOMINATOR: tl.constexpr):
    """The factor from router scores to weights; `mass` is the sum of the native routes' scores."""
    scale = ROUTER.SCALE
    if ROUTER.RENORMALIZE:
        divisor = mass
        if DENOMINATOR != BY_NATIVE:
            executed = tl.where(rescued, alone, tl.sum(tl.where(used, ranked, 0.0), 0))
            divisor = tl.maximum(tl.where(kind == NATIVE, mass, executed), TINY)
            if DENOMINATOR == BY_GEOMETRIC:
                divisor = tl.sqrt(mass) * tl.sqrt(divisor)
        scale = scale / divisor
    return scale


@triton.jit
def store_routes(
    ids, weights, expert_at, slot, used, allowed, count, kind, rescued, first, ranked, alone, scale,
    NP: tl.constexpr, K: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """Write a row's ids and weights [K]; broken rows get NaN weights."""
    place = tl.arange(0, NP)
    empty = (place < K) & ((allowed == 0) if DROP else (place >= count))
    rest = tl.where(kind == BROKEN, float("nan"), tl.where(rescued & (place == 0), alone * scale, 0.0))
    tl.store(ids + slot, expert_at.to(ids.dtype.element_ty), mask=used)
    tl.store(weights + slot, ranked * scale, mask=used)
    tl.store(ids + place, (place * 0 + first).to(ids.dtype.element_ty), mask=empty)
    tl.store(weights + place, rest, mask=empty)


@triton.jit
def copy_routes(native_ids, native_weights, ids, weights, NP: tl.constexpr, K: tl.constexpr):
    """Write the native ids and weights [K], bit for bit."""
    slot = tl.arange(0, NP)
    tl.store(ids + slot, tl.load(native_ids + slot, mask=slot < K).to(ids.dtype.element_ty), mask=slot < K)
    tl.store(weights + slot, tl.load(native_weights + slot, mask=slot < K), mask=slot < K)
