"""The second launch of a fused policy: select for the batch and re-route every row.

It needs all rows of the first, but does what concerns one row alone before the first has ended. It repeats the batch's
sum in every row's program, over a dense [T, N] score matrix, which costs less than a grid-wide barrier up to a few
hundred rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.batch import BROKEN, FIELDS, KEEPS, VOTES, add_rows, bit, field_of, has_below, settle
from moebudget.kernels.rows import (
    TINY,
    agree,
    best_expert,
    by_key,
    largest,
    load_logits,
    mass_of,
    ordered,
    row_scores,
    slots_of,
)
from moebudget.kernels.score import GATE
from moebudget.kernels.unlimited import finish_row

# What a row's router scores are divided by, in models that do: their sum over its routes, over what runs, or both.
ORIGINAL: tl.constexpr = tl.constexpr(0)
EXECUTED: tl.constexpr = tl.constexpr(1)
HALF: tl.constexpr = tl.constexpr(2)


@triton.jit
def fullest(active, device, RANKS: tl.constexpr):
    """The load of the device with most active experts."""
    load = tl.sum(active.to(tl.int32), 0) * 0
    for rank in range(RANKS):  # not unrolled: there may be 64
        load = tl.maximum(load, tl.sum((active & (device == rank)).to(tl.int32), 0))
    return load


@triton.jit
def largest_of_each(total, candidate, most, device, NP: tl.constexpr, RANKS: tl.constexpr):
    """[NP] bool: of every device the `most` candidates with the largest total, as `largest` finds them."""
    found = tl.zeros([NP], tl.int32)
    for rank in range(RANKS):
        found += largest(total, candidate & (device == rank), most, NP).to(tl.int32)
    return found > 0


@triton.jit
def route_rows(
    logits, bias, budget, price, scale_in, scale_out, home, score, places, bits, kinds, partial, arrivals, runs,
    own_ids, own_weights, ids, weights, counters, logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
    RULE: tl.constexpr, K0: tl.constexpr, CAPS: tl.constexpr, PRICED: tl.constexpr, HOLD: tl.constexpr,
    ADDITIVE: tl.constexpr, RANKS: tl.constexpr, LEVEL: tl.constexpr,
    DROP: tl.constexpr, DENOMINATOR: tl.constexpr, ROUTED: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t: the batch's active set, then ids [t, K], weights [t, K] float32 and counters of row t.

    ROWS is a power of two from the number of rows, or of chunks, up. ROUTED: a row that loses no route gets the given
    own_ids and own_weights, as they are. PRICED: every expert whose sum exceeds `price`, whatever the budget, and the
    one with the largest sum; with HOLD above 0 the price times scale_in, and row 0 writes the next layer's scale_out.
    RANKS above 1: `home` [NP] int32 is the device of each expert, and the budget is one a device; or with LEVEL one of
    all, after which every device is filled up to the load of the fullest.
    """
    row = tl.program_id(0)
    most = tl.load(budget)
    if CAPS:
        if most >= N:
            if PDL:
                tl.extra.cuda.gdc_wait()
            if HOLD > 0:
                if row == 0:
                    tl.store(scale_out, tl.load(scale_in))
            finish_row(logits, bits, kinds, ids, weights, counters, logits_stride, T, N, NP, K, SIGMOID, COUNT)
            return
    expert, place, field = tl.arange(0, NP), tl.arange(0, NP), tl.arange(0, FIELDS)
    x = load_logits(logits + row * logits_stride, N, NP)
    probs, choice, biased, _ = row_scores(x, bias, N, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP)
    key, opened = ordered(choice), choice > -float("inf")
    if ROUTED:
        routed = slots_of(own_ids + row * K, NP, K) < K
        key, opened = agree(key, biased, routed), opened | routed
    at = by_key(key, NP)  # the expert at each place
    ranked = tl.gather(probs, at, 0)
    own = place < K
    mass = mass_of(ranked, own)
    if RANKS > 1:
        device = tl.load(home + expert)
    if COUNT:
        before = tl.load(counters + row * FIELDS + field)
    if PDL:
        tl.extra.cuda.gdc_wait()

    kind = tl.load(kinds + row, cache_modifier=".cg").to(tl.int32)
    if CHUNK > 0:
        total, union = add_rows(partial, (T + CHUNK - 1) // CHUNK, NP, ROWS)
    else:
        total, union = add_rows(score, T, NP, ROWS)
    if RULE == GATE:  # the rows' first K0 routes, then `most` others by their sum
        candidate = total > 0
        union = has_below(places, K, T, NP)
        active = has_below(places, K0, T, NP)
        if not ADDITIVE:
            most = most - tl.sum(active.to(tl.int32), 0)
        active = active | largest(total, (union | candidate) & ~active, most, NP)
    elif PRICED:
        most_wanted = tl.max(tl.where(union, total, -1.0), 0)
        first = tl.min(tl.where(union & (total == most_wanted), expert, NP), 0)
        limit = tl.load(price)
        if HOLD > 0:
            factor = tl.load(scale_in)
            limit *= factor
        active = union & ((total > limit) | (expert == first))
    elif not CAPS:
        active = total > 0
    elif (RANKS == 1) | LEVEL:
        active = largest(total, union, most, NP)
    if RANKS > 1:
        room = most
        if LEVEL:
            room = fullest(active, device, RANKS)
        active = largest_of_each(total, union, room, device, NP, RANKS)
    if HOLD > 0:
        if row == 0:
            some = tl.sum(union.to(tl.int32), 0)
            aim = tl.maximum(tl.minimum(most, some), 1).to(tl.float64)
            excess = tl.sum(active.to(tl.int32), 0).to(tl.float64) - aim
            change = tl.where(some > 0, HOLD * excess / aim, 0.0)
            tl.store(scale_out, factor * (1.0 + change))

    voting, keeps = kind == VOTES, kind == KEEPS
    open_to_row = opened & (keeps | (active & voting))
    allowed = tl.gather(open_to_row.to(tl.int32), at, 0)
    slot = place
    if not DROP:
        slot = tl.cumsum(allowed, 0) - 1
    used = (allowed > 0) & (slot < K)
    count = tl.sum(used.to(tl.int32), 0)
    # A row without any expert of the set runs the best one. Padding and broken rows name it with weight 0, and empty
    # slots the row's first expert.
    rescued = (count == 0) & voting
    lone, first, alone = 0, 0, 0.0
    if count < K:
        sound = tl.where(probs == probs, probs, 0.0)
        lone = best_expert(sound, active, NP)
        head = tl.min(tl.where(used, place, NP), 0)
        first = tl.where(count == 0, lone, tl.sum(tl.where(place == head, at, 0), 0))
        alone = tl.sum(tl.where(expert == lone, sound, 0.0), 0)
    scale = SCALE
    if RENORMALIZE:
        divisor = mass
        if DENOMINATOR != ORIGINAL:
            ran_mass = tl.where(rescued, alone, tl.sum(tl.where(used, ranked, 0.0), 0))
            divisor = tl.maximum(tl.where(keeps, mass, ran_mass), TINY)
            if DENOMINATOR == HALF:
                divisor = tl.sqrt(mass) * tl.sqrt(divisor)
        scale = scale / divisor
    empty = own & ((allowed == 0) if DROP else (place >= count))
    rest = tl.where(kind == BROKEN, float("nan"), tl.where(rescued & (place == 0), alone * scale, 0.0))
    row_ids, row_weights = ids + row * K, weights + row * K
    changed = True
    if ROUTED:
        changed = (tl.sum((own & (allowed == 0)).to(tl.int32), 0) > 0) | (kind == BROKEN)
    if changed:
        tl.store(row_ids + slot, at.to(ids.dtype.element_ty), mask=used)
        tl.store(row_weights + slot, ranked * scale, mask=used)
        tl.store(row_ids + place, (place * 0 + first).to(ids.dtype.element_ty), mask=empty)
        tl.store(row_weights + place, rest, mask=empty)
    else:
        tl.store(row_ids + place, tl.load(own_ids + row * K + place, mask=own).to(ids.dtype.element_ty), mask=own)
        tl.store(row_weights + place, tl.load(own_weights + row * K + place, mask=own), mask=own)

    ran = used | (rescued & (at == lone))
    if COUNT:
        # Counts of at most 512 share one integer sum, ten bits each.
        weighs = ranked != 0.0
        lost = own & ~ran & weighs
        mine = tl.sum(bit(ran & ~own & weighs, 0) + bit(lost, 10) + bit(ran & own & weighs, 20), 0)
        shared = tl.sum(bit(union, 0) + bit(active, 10) + bit(union & ~active, 20), 0)
        lead = (row == 0) & (shared > 0)
        added = field_of(field, 0, lead, 1)
        added += field_of(field, 1, voting, 1)
        added += field_of(field, 2, lead, shared & 1023)
        if RULE != GATE:
            added += field_of(field, 3, lead, (shared >> 10) & 1023)
        added += field_of(field, 4, voting, mine & 1023)
        added += field_of(field, 5, voting, (mine >> 10) & 1023)
        added += field_of(field, 6, voting, tl.sum(tl.where(lost, ranked, 0.0), 0) / mass)
        added += field_of(field, 7, voting & ((mine >> 20) == 0), 1)
        added += field_of(field, 8, kind == BROKEN, 1)
        added += field_of(field, 9, lead & ((shared >> 20) == 0), 1)
        tl.store(counters + row * FIELDS + field, before + added)
    if RULE == GATE:  # the set may hold experts that no row runs: the last program sees to who names and counts them
        tl.store(runs + row * NP + at, tl.where(voting & ran, 0.0, -1.0))
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == T - 1:
            tl.store(arrivals, 0)
            settle(logits, runs, kinds, ids, counters, logits_stride, T, N, NP, K, SIGMOID, COUNT)
