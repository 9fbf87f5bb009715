"""Triton pieces of one row of NP experts, a power of two, N of them real: scores, groups, top-K, order, budget."""

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
def top_slots(key, allowed, NP: tl.constexpr, K: tl.constexpr):
    """[NP] int32: 0 for the allowed expert with the largest int32 key, ties to the lower index; K for the rest.

    K times the maximum, then the lowest expert that has it: two integer reductions, one instruction each in a warp.
    """
    expert = tl.arange(0, NP)
    key = tl.where(allowed, key, LOWEST)
    slot = tl.full([NP], K, tl.int32)
    for k in tl.static_range(0, K):
        best = tl.max(key, 0)
        lowest = tl.min(tl.where(key == best, expert, NP), 0)
        taken = (expert == lowest) & (best > LOWEST)
        slot = tl.where(taken, k, slot)
        key = tl.where(taken, LOWEST, key)
    return slot


@triton.jit
def best_expert(value, allowed, NP: tl.constexpr):
    """The allowed expert with the largest float32 value, ties to the lower index; 0 if none is allowed."""
    expert = tl.arange(0, NP)
    key = tl.where(allowed, ordered(value), LOWEST)
    best = tl.max(key, 0)
    return tl.where(best > LOWEST, tl.min(tl.where(key == best, expert, NP), 0), 0)


@triton.jit
def slots_of(ids, NP: tl.constexpr, K: tl.constexpr):
    """[NP] int32: the slot at which an expert stands among K ids at a pointer; K for the rest."""
    expert = tl.arange(0, NP)
    slot = tl.full([NP], K, tl.int32)
    for k in tl.static_range(0, K):
        slot = tl.where(expert == tl.load(ids + k), k, slot)
    return slot


@triton.jit
def places_of(key, slot, K: tl.constexpr):
    """[NP] int32: the place of each expert in a slot when the largest int32 key comes first, ties as the slots are."""
    place = tl.where(slot < K, 0, K)
    for k in tl.static_range(0, K):
        other = tl.max(tl.where(slot == k, key, LOWEST), 0)
        before = (slot < K) & ((other > key) | ((other == key) & (k < slot)))
        place += before.to(tl.int32)
    return place


@triton.jit
def agree(key, biased, own):
    """Keys by which the row's given routes come before all others; a tie may have been broken in another way."""
    key = tl.where(own, ordered(biased), key)
    worst = tl.min(tl.where(own, key, 2147483647), 0)
    return tl.where((own == 0) & (key >= worst), worst - 1, key)


@triton.jit
def by_key(key, NP: tl.constexpr):
    """[NP] int32: the experts, the largest int32 key first, ties to the lower index, which shares a 64-bit key."""
    expert = tl.arange(0, NP)
    key = (key.to(tl.int64) << INDEX_BITS) | (511 - expert).to(tl.int64)
    return 511 - (tl.sort(key, descending=True) & 511).to(tl.int32)


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
def close_groups(
    choice, N, NP: tl.constexpr, GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr
):
    """-inf outside the OPEN best of GROUPS equal groups; a group counts by its best value, or the sum of two."""
    expert, group = tl.arange(0, NP), tl.arange(0, GP)
    inside = (expert // (N // GROUPS))[None, :] == group[:, None]  # [GP, NP]
    values = tl.where(inside, choice[None, :], -float("inf"))
    value = tl.max(values, 1)
    if TOP2:
        best = tl.argmax(values, 1, tie_break_left=True)
        second = tl.max(tl.where(expert[None, :] == best[:, None], -float("inf"), values), 1)
        value = value + second
    opened = top_slots(ordered(value), group < GROUPS, GP, OPEN) < OPEN
    open_expert = tl.sum((inside & opened[:, None]).to(tl.int32), 0) > 0
    return tl.where(open_expert, choice, -float("inf"))


@triton.jit
def load_logits(logits, N, NP: tl.constexpr):
    """A row's logits [NP] float32 at a pointer, -inf from N on."""
    expert = tl.arange(0, NP)
    return tl.load(logits + expert, mask=expert < N, other=-float("inf")).to(tl.float32)


@triton.jit
def any_bad(x, N, NP: tl.constexpr):
    """1 if one of a row's N logits is not finite: inf - inf and NaN - NaN are NaN, and NaN != 0."""
    return tl.max(((tl.arange(0, NP) < N) & ((x - x) != 0)).to(tl.int32), 0)


@triton.jit
def row_scores(
    x, bias, N, NP: tl.constexpr, SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Logits x [NP] -> (probs, choice, choice without groups) [NP] float32, and whether all N are finite."""
    expert = tl.arange(0, NP)
    real = expert < N
    bad = any_bad(x, N, NP)
    if SIGMOID:
        probs = 1.0 / (1.0 + tl.exp(-x))
    else:
        top = tl.max(ordered(x), 0)
        power = tl.exp(x - (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
        probs = power / tl.sum(power, 0)
    probs = tl.where(real, probs, 0.0)
    choice = probs
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    choice = tl.where(bad == 0, choice, 0.0)  # NaN has no rank; the row does not vote anyway
    biased = tl.where(real, choice, -float("inf"))
    choice = biased
    if GROUPS > 1:
        choice = close_groups(biased, N, NP, GROUPS, OPEN, TOP2, GP)
    return probs, choice, biased, bad == 0


@triton.jit
def likeliest(x, allowed, bias, N, NP: tl.constexpr, SIGMOID: tl.constexpr):
    """The allowed expert that a row of logits x [NP] gives the most; `bias` is any pointer and is not read."""
    probs, _, _, _ = row_scores(x, bias, N, NP, SIGMOID, False, 1, 1, False, 2)
    return best_expert(tl.where(probs == probs, probs, 0.0), allowed, NP)


@triton.jit
def residue(values, D: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] float32 whose sum is 0 if all D values at a pointer are finite, NaN if not: x * 0 is NaN then."""
    column = tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        at = start + column
        found += tl.load(values + at, mask=at < D, other=0.0).to(tl.float32) * 0.0
    return found


@triton.jit
def mass_of(probs, chosen):
    """The sum of the chosen probs, never 0."""
    return tl.maximum(tl.sum(tl.where(chosen, probs, 0.0), 0), TINY)
