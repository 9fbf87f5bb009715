"""Triton pieces on a tile of R rows and NP experts (powers of two, N experts real): scores, groups, top-K, ranks.

A row lies in one warp, so reductions along it take a few instructions and no shared memory.
"""

# Triton compiles what it reads here: plain `if` on a constexpr is decided at compile time.
from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-2147483648)
INDEX_BITS: tl.constexpr = tl.constexpr(9)  # up to 512 experts
TINY: tl.constexpr = tl.constexpr(1.17549435e-38)


@triton.jit
def ordered(value):
    """Float32 -> int32 in the same order; -0.0 and 0.0 are one. Integer maxima are one instruction in a warp."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def top_slots(value, allowed, R: tl.constexpr, NP: tl.constexpr, K: tl.constexpr):
    """[R, NP] int32: 0 for the row's allowed expert with the largest value, ties to the lower index; K for the rest.

    K times the maximum, then the lowest expert that has it: two integer reductions, one instruction each in a warp.
    """
    expert = tl.arange(0, NP)[None, :]
    key = tl.where(allowed, ordered(value), LOWEST)
    slot = tl.full([R, NP], K, tl.int32)
    for k in tl.static_range(0, K):
        best = tl.max(key, 1)[:, None]
        lowest = tl.min(tl.where(key == best, expert, NP), 1)[:, None]
        taken = (expert == lowest) & (best > LOWEST)
        slot = tl.where(taken, k, slot)
        key = tl.where(taken, LOWEST, key)
    return slot


@triton.jit
def in_order(choice, NP: tl.constexpr):
    """[R, NP] int64, a row's experts best first: the choice's order, then 511 - expert in the lowest nine bits."""
    expert = tl.arange(0, NP)[None, :]
    key = (ordered(choice).to(tl.int64) << INDEX_BITS) | (511 - expert).to(tl.int64)
    return tl.sort(key, dim=1, descending=True)


@triton.jit
def best_expert(value, allowed, NP: tl.constexpr):
    """[R]: the row's allowed expert with the largest value, ties to the lower index; 0 if none is allowed."""
    expert = tl.arange(0, NP)[None, :]
    key = tl.where(allowed, ordered(value), LOWEST)
    best = tl.max(key, 1)
    found = tl.min(tl.where(key == best[:, None], expert, NP), 1)
    return tl.where(best > LOWEST, found, 0)


@triton.jit
def largest(total, candidate, most, NP: tl.constexpr):
    """[NP] bool: the `most` candidates with the largest total >= 0 (float64), ties to the lower index.

    Value and index share one 64-bit key, which no two experts have in common (the lowest 9 of 52 mantissa bits make
    room); the key that `most` of them reach is found by halving, in a handful of steps unless sums nearly tie.
    """
    expert = tl.arange(0, NP)
    bits = total.to(tl.int64, bitcast=True)
    key = ((bits >> INDEX_BITS) << INDEX_BITS) | (511 - expert).to(tl.int64)
    key = tl.where(candidate, key, -1)
    upper = (key >> 32).to(tl.int32)
    kept = tl.sum(candidate.to(tl.int32), 0)
    middle = tl.min(tl.where(candidate, upper, 2147483647), 0).to(tl.int64) << 32
    low, high = middle, (tl.max(upper, 0).to(tl.int64) + 1) << 32
    aim = tl.minimum(kept, tl.maximum(most, 0))
    while kept != aim:  # low: more than enough reach it; high: too few do
        middle = low + ((high - low) >> 1)
        kept = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(kept > aim, middle, low)
        high = tl.where(kept > aim, high, middle)
    return candidate & (key >= middle)


@triton.jit
def close_groups(
    choice, N, R: tl.constexpr, NP: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr,
    GP: tl.constexpr,
):  # fmt: skip
    """-inf outside the OPEN best of GROUPS equal groups; a group counts by its best value, or the sum of two."""
    expert, group = tl.arange(0, NP)[None, :], tl.arange(0, GP)[None, :]
    home = expert // (N // GROUPS)
    value = tl.full([R, GP], -float("inf"), tl.float32)
    for g in tl.static_range(0, GROUPS):
        inside = tl.where(home == g, choice, -float("inf"))
        best = tl.max(inside, 1)
        if TOP2:
            first = tl.min(tl.where(inside == best[:, None], expert, NP), 1)
            best = best + tl.max(tl.where(expert == first[:, None], -float("inf"), inside), 1)
        value = tl.where(group == g, best[:, None], value)
    opened = (top_slots(value, group < GROUPS, R, GP, OPEN) < OPEN).to(tl.int32)
    for g in tl.static_range(0, GROUPS):
        is_open = tl.max(tl.where(group == g, opened, 0), 1)[:, None]
        choice = tl.where((home == g) & (is_open == 0), -float("inf"), choice)
    return choice


@triton.jit
def row_scores(
    logits, bias, row, stride, T, N, R: tl.constexpr, NP: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Rows [R] of the logits -> (probs, choice) [R, NP] float32 and whether all logits of a row are finite [R]."""
    expert = tl.arange(0, NP)[None, :]
    real = expert < N
    there = real & (row < T)[:, None]
    x = tl.load(logits + row[:, None] * stride + expert, mask=there, other=-float("inf")).to(tl.float32)
    # inf - inf and NaN - NaN are NaN, and NaN != 0
    bad = tl.max((there & ((x - x) != 0)).to(tl.int32), 1)
    if SIGMOID:
        probs = 1.0 / (1.0 + tl.exp(-x))
    else:
        top = tl.max(ordered(x), 1)
        power = tl.exp(x - (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)[:, None])
        probs = power / tl.sum(power, 1)[:, None]
    probs = tl.where(real, probs, 0.0)
    choice = probs
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    choice = tl.where((bad == 0)[:, None], choice, 0.0)  # NaN has no rank; the row does not vote anyway
    choice = tl.where(real, choice, -float("inf"))
    if GROUPS > 1:
        choice = close_groups(choice, N, R, NP, GROUPS, OPEN, TOP2, GP)
    return probs, choice, bad == 0


@triton.jit
def over_mass(probs, chosen):
    """[R] sum of the chosen probs, never 0."""
    return tl.maximum(tl.sum(tl.where(chosen, probs, 0.0), 1), TINY)
