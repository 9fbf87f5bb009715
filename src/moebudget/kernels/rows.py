"""Device functions of one row of NP experts, a power of two, N of them real: scores, groups, top-K, order."""

# A plain `if` on a constexpr is decided when Triton compiles the kernel.
from __future__ import annotations

import triton
import triton.language as tl

LOWEST: tl.constexpr = tl.constexpr(-2147483648)
INDEX_BITS: tl.constexpr = tl.constexpr(9)  # up to 512 experts
TINY: tl.constexpr = tl.constexpr(1.17549435e-38)


@triton.jit
def ordered(value):
    """Float32 -> int32 in the same order; -0.0 and 0.0 are equal. Integer maxima are one instruction in a warp."""
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
    """[NP] int32: the slot of each expert among K ids at a pointer; K for the rest."""
    expert = tl.arange(0, NP)
    slot = tl.full([NP], K, tl.int32)
    for k in tl.static_range(0, K):
        slot = tl.where(expert == tl.load(ids + k), k, slot)
    return slot


@triton.jit
def places_of(key, slot, K: tl.constexpr):
    """[NP] int32: places of the experts that have a slot, largest int32 key first, ties in the order of the slots."""
    place = tl.where(slot < K, 0, K)
    for k in tl.static_range(0, K):
        key_k = tl.max(tl.where(slot == k, key, LOWEST), 0)
        before = (slot < K) & ((key_k > key) | ((key_k == key) & (k < slot)))
        place += before.to(tl.int32)
    return place


@triton.jit
def agree(key, biased, routed):
    """Keys that put the row's native routes before all other experts; the model may break ties differently."""
    key = tl.where(routed, ordered(biased), key)
    worst = tl.min(tl.where(routed, key, 2147483647), 0)
    return tl.where((routed == 0) & (key >= worst), worst - 1, key)


@triton.jit
def by_key(key, NP: tl.constexpr):
    """[NP] int32: the expert at each place, largest int32 key first, ties to the lower index; both share 64 bits."""
    expert = tl.arange(0, NP)
    key = (key.to(tl.int64) << INDEX_BITS) | (511 - expert).to(tl.int64)
    return 511 - (tl.sort(key, descending=True) & 511).to(tl.int32)


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
def row_probs(x, N, NP: tl.constexpr, SIGMOID: tl.constexpr):
    """Logits x [NP] -> router scores [NP] float32, 0 from N on."""
    if SIGMOID:
        probs = 1.0 / (1.0 + tl.exp(-x))
    else:
        top = tl.max(ordered(x), 0)
        power = tl.exp(x - (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))
        probs = power / tl.sum(power, 0)
    return tl.where(tl.arange(0, NP) < N, probs, 0.0)


@triton.jit
def row_scores(x, bias, N, NP: tl.constexpr, ROUTER: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Logits x [NP] -> (probs, choice, choice without groups) [NP] float32, and whether all N are finite."""
    expert = tl.arange(0, NP)
    real = expert < N
    bad = any_bad(x, N, NP)
    probs = row_probs(x, N, NP, ROUTER.SIGMOID)
    choice = probs
    if HAS_BIAS:
        choice += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    choice = tl.where(bad == 0, choice, 0.0)  # NaN has no rank; the row does not vote anyway
    biased = tl.where(real, choice, -float("inf"))
    choice = biased
    if ROUTER.GROUPS > 1:
        choice = close_groups(biased, N, NP, ROUTER.GROUPS, ROUTER.OPEN, ROUTER.TOP2, ROUTER.GP)
    return probs, choice, biased, bad == 0


@triton.jit
def rank_row(
    logits, bias, native_ids, N,
    NP: tl.constexpr, K: tl.constexpr, ROUTER: tl.constexpr, HAS_BIAS: tl.constexpr, ROUTED: tl.constexpr,
):  # fmt: skip
    """A row's logits at a pointer -> router scores [NP] by expert, and the same in the order in which the row ranks
    the experts; the experts that are open to the row [NP] bool; the expert at each place [NP] int32.

    ROUTED: the native routes, K ids at a pointer, take the first K places.
    """
    x = load_logits(logits, N, NP)
    probs, choice, biased, _ = row_scores(x, bias, N, NP, ROUTER, HAS_BIAS)
    key, opened = ordered(choice), choice > -float("inf")
    if ROUTED:
        routed = slots_of(native_ids, NP, K) < K
        key, opened = agree(key, biased, routed), opened | routed
    expert_at = by_key(key, NP)
    return probs, tl.gather(probs, expert_at, 0), opened, expert_at


@triton.jit
def likeliest(x, allowed, N, NP: tl.constexpr, SIGMOID: tl.constexpr):
    """The allowed expert with the largest router score in a row of logits x [NP]."""
    probs = row_probs(x, N, NP, SIGMOID)
    return best_expert(tl.where(probs == probs, probs, 0.0), allowed, NP)


@triton.jit
def residue(values, D: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] float32 whose sum is 0 if all D values at a pointer are finite, else NaN, because x * 0 is NaN then."""
    column = tl.arange(0, BLOCK)
    nonzero = tl.zeros([BLOCK], tl.float32)
    for start in tl.static_range(0, D, BLOCK):
        at = start + column
        nonzero += tl.load(values + at, mask=at < D, other=0.0).to(tl.float32) * 0.0
    return nonzero


@triton.jit
def mass_of(probs, chosen):
    """The sum of the chosen probs, never 0."""
    return tl.maximum(tl.sum(tl.where(chosen, probs, 0.0), 0), TINY)
