"""The second launch of a fused policy: select for the batch and re-route every row.

It needs all rows of the first launch, but does what concerns its row alone before the first has ended. Every row's
program repeats the batch's sum, over a full [T, N] score matrix, which costs less than a grid-wide barrier up to a few
hundred rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.batch import BROKEN, DECODE, FIELDS, has_below, settle, sums_over_batch
from moebudget.kernels.counts import count_row
from moebudget.kernels.fill import copy_routes, fallback, slots_in_set, store_routes, weight_scale
from moebudget.kernels.rows import mass_of, rank_row
from moebudget.kernels.score import GATE
from moebudget.kernels.select import active_set, follow_price
from moebudget.kernels.unlimited import finish_row


@triton.jit
def route_rows(
    logits, bias, budget, price, scale_in, scale_out, home, score, places, bits, kinds, partial, arrivals, runs,
    native_ids, native_weights, ids, weights, counters, logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
    ROUTER: tl.constexpr, HAS_BIAS: tl.constexpr, RULE: tl.constexpr, K0: tl.constexpr, CAPS: tl.constexpr,
    SELECT: tl.constexpr, FILL: tl.constexpr, ROUTED: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t: the batch's active set, then ids [t, K], weights [t, K] float32 and counters of row t.

    ROWS is a power of two, at least the number of rows, or of chunks. ROUTER, SELECT and FILL: see `settings`.
    ROUTED: a row that loses no route gets native_ids and native_weights as they are. HOLD above 0: the price is
    multiplied by scale_in, and row 0 writes scale_out, the factor of the next layer. RANKS above 1: `home` [NP] int32
    is the device of each expert.
    """
    row = tl.program_id(0)
    most = tl.load(budget)
    if CAPS:
        if most >= N:
            if PDL:
                tl.extra.cuda.gdc_wait()
            if SELECT.HOLD > 0:
                if row == 0:
                    tl.store(scale_out, tl.load(scale_in))
            finish_row(logits, bits, kinds, ids, weights, counters, logits_stride, T, N, NP, K, ROUTER, COUNT)
            return
    # The row alone: this runs beside the first launch.
    probs, ranked, opened, expert_at = rank_row(
        logits + row * logits_stride, bias, native_ids + row * K, N, NP, K, ROUTER, HAS_BIAS, ROUTED
    )
    expert, place, device = tl.arange(0, NP), tl.arange(0, NP), 0
    native = place < K
    mass = mass_of(ranked, native)
    if SELECT.RANKS > 1:
        device = tl.load(home + expert)
    if COUNT:
        before = tl.load(counters + row * FIELDS + tl.arange(0, FIELDS))
    if PDL:
        tl.extra.cuda.gdc_wait()

    # The batch.
    kind = tl.load(kinds + row, cache_modifier=".cg").to(tl.int32)
    total, union = sums_over_batch(score, partial, T, NP, ROWS, CHUNK)
    if RULE == GATE:  # every expert has a score: the union comes from the routes
        union = has_below(places, K, T, NP)
    active, factor = active_set(total, union, most, price, scale_in, device, places, T, NP, RULE, K0, CAPS, SELECT)
    if SELECT.HOLD > 0:
        if row == 0:
            follow_price(scale_out, factor, active, union, most, SELECT.HOLD)

    # The row inside the active set.
    allowed, slot, used = slots_in_set(opened, active, kind, expert_at, NP, K, FILL.DROP)
    count = tl.sum(used.to(tl.int32), 0)
    rescued = (count == 0) & (kind == DECODE)
    lone, first, alone = fallback(probs, active, used, count, expert_at, NP, K)
    scale = weight_scale(ranked, mass, used, kind, rescued, alone, ROUTER, FILL.DENOMINATOR)
    changed = True
    if ROUTED:
        changed = (tl.sum((native & (allowed == 0)).to(tl.int32), 0) > 0) | (kind == BROKEN)
    row_ids, row_weights = ids + row * K, weights + row * K
    if changed:
        store_routes(
            row_ids, row_weights, expert_at, slot, used, allowed, count, kind, rescued, first, ranked, alone, scale,
            NP, K, FILL.DROP,
        )  # fmt: skip
    else:
        copy_routes(native_ids + row * K, native_weights + row * K, row_ids, row_weights, NP, K)

    executed = used | (rescued & (expert_at == lone))
    if COUNT:
        count_row(counters, before, row, kind, union, active, executed, ranked, mass, NP, K, RULE)
    if RULE == GATE:
        tl.store(runs + row * NP + expert_at, tl.where((kind == DECODE) & executed, 0.0, -1.0))
        tl.debug_barrier()
        if tl.atomic_add(arrivals, 1, sem="acq_rel") == T - 1:
            tl.store(arrivals, 0)
            settle(logits, runs, kinds, ids, counters, logits_stride, T, N, NP, K, ROUTER, COUNT)
