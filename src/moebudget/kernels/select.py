"""Active sets: the experts that the step may fetch, one device function per kind of selection.

Arguments that they share: `total` [NP] float64, the scores' sum over rows; `union` [NP] bool, the experts that the
native routes of the voting rows name; `most`, the budget; `device` [NP] int32, the device that holds an expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.batch import has_below
from moebudget.kernels.rows import INDEX_BITS
from moebudget.kernels.score import GATE


@triton.jit
def active_set(
    total, union, most, price, scale_in, device, places, T,
    NP: tl.constexpr, RULE: tl.constexpr, K0: tl.constexpr, CAPS: tl.constexpr, SELECT: tl.constexpr,
):  # fmt: skip
    """The active set [NP] bool, and the factor that the price had (1 if it has none)."""
    factor = 1.0
    if RULE == GATE:
        active = warm_up(total, union, most, places, T, NP, K0, SELECT.ADDITIVE)
    elif SELECT.PRICED:
        active, factor = above_price(total, union, price, scale_in, NP, SELECT.HOLD)
    elif not CAPS:
        active = total > 0  # plain vote: every expert that a row named
    elif (SELECT.RANKS == 1) | SELECT.LEVEL:
        active = largest(total, union, most, NP)
    if SELECT.RANKS > 1:
        room = most
        if SELECT.LEVEL:
            room = fullest(active, device, SELECT.RANKS)
        active = largest_per_device(total, union, room, device, NP, SELECT.RANKS)
    return active, factor


@triton.jit
def largest(total, candidate, most, NP: tl.constexpr):
    """[NP] bool: the `most` candidates with the largest total >= 0 (float64), ties to the lower index.

    Value and index share one 64-bit key, which no two experts have in common (the lowest 9 of 52 mantissa bits make
    room). Halving an interval finds the key that `most` of them reach, in a few steps unless sums nearly tie.
    """
    expert = tl.arange(0, NP)
    bits = total.to(tl.int64, bitcast=True)
    key = ((bits >> INDEX_BITS) << INDEX_BITS) | (511 - expert).to(tl.int64)
    key = tl.where(candidate, key, -1)
    upper = (key >> 32).to(tl.int32)
    kept = tl.sum(candidate.to(tl.int32), 0)
    aim = tl.minimum(kept, tl.maximum(most, 0))
    middle = tl.min(tl.where(candidate, upper, 2147483647), 0).to(tl.int64) << 32
    low, high = middle, (tl.max(upper, 0).to(tl.int64) + 1) << 32
    while kept != aim:  # low: more than enough reach it; high: too few do
        middle = low + ((high - low) >> 1)
        kept = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(kept > aim, middle, low)
        high = tl.where(kept > aim, high, middle)
    return candidate & (key >= middle)


@triton.jit
def largest_per_device(total, candidate, most, device, NP: tl.constexpr, RANKS: tl.constexpr):
    """[NP] bool: on every device the `most` candidates with the largest total, by `largest`."""
    active = tl.zeros([NP], tl.int32)
    for rank in range(RANKS):
        active += largest(total, candidate & (device == rank), most, NP).to(tl.int32)
    return active > 0


@triton.jit
def fullest(active, device, RANKS: tl.constexpr):
    """The number of active experts on the device that has most of them."""
    load = tl.sum(active.to(tl.int32), 0) * 0
    for rank in range(RANKS):  # not unrolled: there may be 64
        load = tl.maximum(load, tl.sum((active & (device == rank)).to(tl.int32), 0))
    return load


@triton.jit
def warm_up(total, union, most, places, T, NP: tl.constexpr, K0: tl.constexpr, ADDITIVE: tl.constexpr):
    """[NP] bool: the rows' first K0 routes, then the `most` other experts with the largest total."""
    candidate = total > 0
    active = has_below(places, K0, T, NP)
    if not ADDITIVE:
        most = most - tl.sum(active.to(tl.int32), 0)
    return active | largest(total, (union | candidate) & ~active, most, NP)


@triton.jit
def above_price(total, union, price, scale_in, NP: tl.constexpr, HOLD: tl.constexpr):
    """[NP] bool: experts whose total exceeds the price, and the one with the largest; and the price's factor."""
    expert, factor = tl.arange(0, NP), 1.0
    highest = tl.max(tl.where(union, total, -1.0), 0)
    first = tl.min(tl.where(union & (total == highest), expert, NP), 0)
    limit = tl.load(price)
    if HOLD > 0:
        factor = tl.load(scale_in)
        limit *= factor
    return union & ((total > limit) | (expert == first)), factor


@triton.jit
def follow_price(scale_out, factor, active, union, most, HOLD: tl.constexpr):
    """Write the next layer's factor of the price, as `core.layer_router.followed` defines it."""
    size = tl.sum(union.to(tl.int32), 0)
    aim = tl.maximum(tl.minimum(most, size), 1).to(tl.float64)
    excess = tl.sum(active.to(tl.int32), 0).to(tl.float64) - aim
    change = tl.where(size > 0, HOLD * excess / aim, 0.0)
    tl.store(scale_out, factor * (1.0 + change))
