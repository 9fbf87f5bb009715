"""The bypass for a budget of N or more experts: the first launch writes the native routes, the second ends early."""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.batch import (
    BROKEN,
    COUNT_FETCHED,
    COUNT_NATIVE_UNION,
    COUNT_NONFINITE,
    COUNT_RESCUED,
    COUNT_ROWS,
    COUNT_STEPS,
    COUNT_UNRESTRICTED,
    DECODE,
    FIELDS,
    NATIVE,
    PAD,
    field_of,
    judged,
)
from moebudget.kernels.rows import (
    any_bad,
    likeliest,
    load_logits,
    mass_of,
    ordered,
    residue,
    row_scores,
    slots_of,
    top_slots,
)

TOGETHER: tl.constexpr = tl.constexpr(64)  # rows whose bits are read at once


@triton.jit
def leave_row(
    x, kind, hidden, bias, bits, kinds, native_ids, native_weights, ids, weights, counters,
    hidden_stride, N,
    D: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    ROUTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROUTED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """First launch, row t with logits x [NP]: native ids and weights [t, K], kind and counters.

    bits [t, :] name the routes of a DECODE row.
    """
    row = tl.program_id(0)
    expert, slot, field = tl.arange(0, NP), tl.arange(0, NP), tl.arange(0, FIELDS)
    if COUNT:
        before = tl.load(counters + row * FIELDS + field)
    nonzero = residue(hidden + row * hidden_stride, D, BLOCK)
    if ROUTED:  # needs no softmax: the weight tells whether a route carries weight
        finite = any_bad(x, N, NP) == 0
        place = slots_of(native_ids + row * K, NP, K)
        routes = tl.load(native_ids + row * K + slot, mask=slot < K, other=0)
        route_weights = tl.load(native_weights + row * K + slot, mask=slot < K, other=0.0)
        carries = route_weights != 0.0
    else:
        probs, choice, _, finite = row_scores(x, bias, N, NP, ROUTER, HAS_BIAS)
        place = top_slots(ordered(choice), choice > -float("inf"), NP, K)
        carries = (place < K) & (probs != 0.0)
    route = place < K
    sound = finite & (tl.sum(nonzero, 0) == 0)
    kind = judged(kind, sound, ROUTED)
    voting = kind == DECODE
    tl.store(kinds + row, kind.to(tl.int8))
    WIDTH: tl.constexpr = 32 if NP > 32 else NP
    words = tl.reshape((voting & route).to(tl.int32) << (expert % WIDTH), [NP // WIDTH, WIDTH])
    tl.store(bits + row * (NP // WIDTH) + tl.arange(0, NP // WIDTH), tl.sum(words, 1))
    if voting | (kind == NATIVE):
        if ROUTED:
            tl.store(ids + row * K + slot, routes.to(ids.dtype.element_ty), mask=slot < K)
            tl.store(weights + row * K + slot, route_weights, mask=slot < K)
        else:
            scale = ROUTER.SCALE
            if ROUTER.RENORMALIZE:
                scale = scale / mass_of(probs, route)
            tl.store(ids + row * K + place, expert.to(ids.dtype.element_ty), mask=route)
            tl.store(weights + row * K + place, probs * scale, mask=route)
    if COUNT:
        kept = tl.sum(carries.to(tl.int32), 0)
        added = field_of(field, COUNT_ROWS, voting, 1) + field_of(field, COUNT_RESCUED, voting & (kept == 0), 1)
        tl.store(counters + row * FIELDS + field, before + added + field_of(field, COUNT_NONFINITE, kind == BROKEN, 1))


@triton.jit
def voted_for(bits, rows, NP: tl.constexpr):
    """[NP] bool: experts that the bits of at least one row name; 32 experts share a word."""
    WIDTH: tl.constexpr = 32 if NP > 32 else NP
    words, word, row = tl.zeros([NP // WIDTH], tl.int32), tl.arange(0, NP // WIDTH), tl.arange(0, TOGETHER)
    for start in range(0, rows, TOGETHER):
        at = start + row
        loaded = tl.load(
            bits + at[:, None] * (NP // WIDTH) + word[None, :],
            mask=(at < rows)[:, None],
            other=0,
            cache_modifier=".cg",
        )
        words = words | tl.reduce_or(loaded, 0)
    return tl.reshape((words[:, None] >> tl.arange(0, WIDTH)[None, :]) & 1, [NP]) > 0


@triton.jit
def finish_row(
    logits, bits, kinds, ids, weights, counters, logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr, ROUTER: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Second launch, row t: PAD and BROKEN rows get the best expert of the native union; row 0 counts the step."""
    row = tl.program_id(0)
    kind = tl.load(kinds + row, cache_modifier=".cg").to(tl.int32)
    idle = (kind == PAD) | (kind == BROKEN)
    if idle | (COUNT & (row == 0)):
        union = voted_for(bits, T, NP)
        if idle:
            lone = likeliest(load_logits(logits + row * logits_stride, N, NP), union, N, NP, ROUTER.SIGMOID)
            slot = tl.arange(0, NP)
            tl.store(ids + row * K + slot, (slot * 0 + lone).to(ids.dtype.element_ty), mask=slot < K)
            rest = tl.where(kind == BROKEN, float("nan"), 0.0)
            tl.store(weights + row * K + slot, tl.zeros([NP], tl.float32) + rest, mask=slot < K)
        if COUNT:
            count, field = tl.sum(union.to(tl.int32), 0), tl.arange(0, FIELDS)
            lead = (row == 0) & (count > 0)
            added = field_of(field, COUNT_STEPS, lead, 1) + field_of(field, COUNT_UNRESTRICTED, lead, 1)
            added += field_of(field, COUNT_NATIVE_UNION, lead, count) + field_of(field, COUNT_FETCHED, lead, count)
            before = tl.load(counters + row * FIELDS + field, cache_modifier=".cg")
            tl.store(counters + row * FIELDS + field, before + added)
