"""What the two launches do while the budget leaves nothing out: the first writes the model's own routes."""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.batch import BROKEN, FIELDS, KEEPS, PADDING, VOTES, field_of, judged
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
    x, kind, hidden, bias, bits, kinds, own_ids, own_weights, ids, weights, counters,
    hidden_stride, N,
    D: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
    ROUTED: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """First launch, row t of logits x [NP] and the given kind: its own ids and weights [t, K], kind and counters.

    bits [t, :] name the routes of a row that votes.
    """
    row = tl.program_id(0)
    expert, slot, field = tl.arange(0, NP), tl.arange(0, NP), tl.arange(0, FIELDS)
    if COUNT:
        before = tl.load(counters + row * FIELDS + field)
    nonzero = residue(hidden + row * hidden_stride, D, BLOCK)
    if ROUTED:  # no softmax: whether a route carries weight is seen from the weight
        finite = any_bad(x, N, NP) == 0
        place = slots_of(own_ids + row * K, NP, K)
        own = tl.load(own_ids + row * K + slot, mask=slot < K, other=0)
        own_weight = tl.load(own_weights + row * K + slot, mask=slot < K, other=0.0)
        carries = own_weight != 0.0
    else:
        probs, choice, _, finite = row_scores(x, bias, N, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP)
        place = top_slots(ordered(choice), choice > -float("inf"), NP, K)
        carries = (place < K) & (probs != 0.0)
    route = place < K
    sound = finite & (tl.sum(nonzero, 0) == 0)
    kind = judged(kind, sound, ROUTED)
    voting = kind == VOTES
    tl.store(kinds + row, kind.to(tl.int8))
    WIDTH: tl.constexpr = 32 if NP > 32 else NP
    words = tl.reshape((voting & route).to(tl.int32) << (expert % WIDTH), [NP // WIDTH, WIDTH])
    tl.store(bits + row * (NP // WIDTH) + tl.arange(0, NP // WIDTH), tl.sum(words, 1))
    if voting | (kind == KEEPS):
        if ROUTED:
            tl.store(ids + row * K + slot, own.to(ids.dtype.element_ty), mask=slot < K)
            tl.store(weights + row * K + slot, own_weight, mask=slot < K)
        else:
            scale = SCALE
            if RENORMALIZE:
                scale = scale / mass_of(probs, route)
            tl.store(ids + row * K + place, expert.to(ids.dtype.element_ty), mask=route)
            tl.store(weights + row * K + place, probs * scale, mask=route)
    if COUNT:
        kept = tl.sum(carries.to(tl.int32), 0)
        added = field_of(field, 1, voting, 1) + field_of(field, 7, voting & (kept == 0), 1)
        tl.store(counters + row * FIELDS + field, before + added + field_of(field, 8, kind == BROKEN, 1))


@triton.jit
def voted_for(bits, rows, NP: tl.constexpr):
    """[NP] bool: experts that a row's bits name; 32 experts share a word."""
    WIDTH: tl.constexpr = 32 if NP > 32 else NP
    words, word, row = tl.zeros([NP // WIDTH], tl.int32), tl.arange(0, NP // WIDTH), tl.arange(0, TOGETHER)
    for start in range(0, rows, TOGETHER):
        at = start + row
        some = tl.load(
            bits + at[:, None] * (NP // WIDTH) + word[None, :],
            mask=(at < rows)[:, None],
            other=0,
            cache_modifier=".cg",
        )
        words = words | tl.reduce_or(some, 0)
    return tl.reshape((words[:, None] >> tl.arange(0, WIDTH)[None, :]) & 1, [NP]) > 0


@triton.jit
def finish_row(
    logits, bits, kinds, ids, weights, counters, logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Second launch, row t: padding and broken rows name the best expert that a voting row runs; row 0 counts them."""
    row = tl.program_id(0)
    kind = tl.load(kinds + row, cache_modifier=".cg").to(tl.int32)
    idle = (kind == PADDING) | (kind == BROKEN)
    if idle | (COUNT & (row == 0)):
        union = voted_for(bits, T, NP)
        if idle:
            lone = likeliest(load_logits(logits + row * logits_stride, N, NP), union, logits, N, NP, SIGMOID)
            slot = tl.arange(0, NP)
            tl.store(ids + row * K + slot, (slot * 0 + lone).to(ids.dtype.element_ty), mask=slot < K)
            rest = tl.where(kind == BROKEN, float("nan"), 0.0)
            tl.store(weights + row * K + slot, tl.zeros([NP], tl.float32) + rest, mask=slot < K)
        if COUNT:
            count, field = tl.sum(union.to(tl.int32), 0), tl.arange(0, FIELDS)
            lead = (row == 0) & (count > 0)
            added = field_of(field, 0, lead, 1) + field_of(field, 9, lead, 1)
            added += field_of(field, 2, lead, count) + field_of(field, 3, lead, count)
            book = tl.load(counters + row * FIELDS + field, cache_modifier=".cg")
            tl.store(counters + row * FIELDS + field, book + added)
