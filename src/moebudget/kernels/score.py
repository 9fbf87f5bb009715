"""The first launch of a fused policy: the routes of every row, and their scores."""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.batch import DECODE, add_rows, judged
from moebudget.kernels.rows import (
    TINY,
    load_logits,
    mass_of,
    ordered,
    places_of,
    residue,
    row_scores,
    slots_of,
    top_slots,
)
from moebudget.kernels.unlimited import leave_row

# Scores that have a kernel.
BASE: tl.constexpr = tl.constexpr(0)
SQUARED: tl.constexpr = tl.constexpr(1)
STATIC: tl.constexpr = tl.constexpr(2)
MASS: tl.constexpr = tl.constexpr(3)
RANK: tl.constexpr = tl.constexpr(4)
GATE: tl.constexpr = tl.constexpr(5)  # scores every expert, not only the native routes


@triton.jit
def score_rows(
    logits, hidden, bias, kinds_in, slope, offset, energy, budget,
    score, places, bits, kinds, partial, arrivals, native_ids, native_weights, ids, weights, counters,
    logits_stride, hidden_stride, slope_stride, T, N,
    D: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    ROUTER: tl.constexpr, HAS_BIAS: tl.constexpr,
    RULE: tl.constexpr, K0: tl.constexpr, CAPS: tl.constexpr, CHUNK: tl.constexpr, ROUTED: tl.constexpr,
    COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, s): score [t, :] float32 of row t, -1 for experts without a score, and the kind of the row.

    SPLIT > 1 (BASE): every program of a row computes the row's routes, and predicts the energy of each SPLIT-th route.
    ROUTED: native_ids and native_weights [t, K] are read, else they are computed from the logits. CHUNK > 0: the last
    program of every CHUNK rows adds them up into partial [t // CHUNK, :] float64, -1 for experts without a score.
    GATE: places [t, :] int8 of the row's routes, K elsewhere. CAPS: a budget of N or more leaves nothing out.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    if PDL:  # for the kernel before: launched early, this one saves its launch latency
        tl.extra.cuda.gdc_wait()
    if CAPS:
        most = tl.load(budget)
    x = load_logits(logits + row * logits_stride, N, NP)  # together with the budget, to hide the latency of its load
    kind = tl.load(kinds_in + row).to(tl.int32)
    if CAPS:
        if most >= N:
            if PDL:
                tl.extra.cuda.gdc_launch_dependents()
            if part == 0:
                leave_row(
                    x, kind, hidden, bias, bits, kinds, native_ids, native_weights, ids, weights, counters,
                    hidden_stride, N, D, NP, K, BLOCK, ROUTER, HAS_BIAS, ROUTED, COUNT,
                )  # fmt: skip
            return
    probs, choice, biased, finite = row_scores(x, bias, N, NP, ROUTER, HAS_BIAS)
    opened = choice > -float("inf")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert, column = tl.arange(0, NP), tl.arange(0, BLOCK)
    if ROUTED:
        place = slots_of(native_ids + row * K, NP, K)
        weight = tl.load(native_weights + row * K + place, mask=place < K, other=0.0)
        if (RULE == RANK) | (RULE == GATE):  # the order of the routes matters, and they may come in any order
            opened = opened | (place < K)
            place = places_of(ordered(biased), place, K)
    else:
        place = top_slots(ordered(choice), opened, NP, K)
        weight = probs * ROUTER.SCALE
        if ROUTER.RENORMALIZE:
            weight = probs / mass_of(probs, place < K) * ROUTER.SCALE
    route = place < K
    nonzero = tl.zeros([BLOCK], tl.float32)  # see `residue`
    if RULE == BASE:
        for turn in tl.static_range(0, (K + SPLIT - 1) // SPLIT):
            slot = part + turn * SPLIT
            if ROUTED:  # padding may hold -1
                chosen = tl.maximum(tl.load(native_ids + row * K + slot, mask=slot < K, other=0), 0)
            else:
                chosen = tl.sum(tl.where(place == slot, expert, 0), 0)
            dot = tl.zeros([BLOCK], tl.float32)
            square = tl.zeros([BLOCK], tl.float32)
            for start in tl.static_range(0, D, BLOCK):
                at = start + column
                z = tl.load(hidden + row * hidden_stride + at, mask=at < D, other=0.0).to(tl.float32)
                a = tl.load(slope + chosen * slope_stride + at, mask=at < D, other=0.0).to(tl.float32)
                dot += z * a
                square += z * z
                nonzero += z * 0.0
            length = tl.maximum(tl.sqrt(tl.sum(square, 0)), TINY)
            log_energy = tl.sum(dot, 0) / length + tl.load(offset + chosen).to(tl.float32)
            w = tl.sum(tl.where(place == slot, weight, 0.0), 0)
            voting = (kind == DECODE) & finite & (tl.sum(nonzero, 0) == 0)
            if slot < K:
                tl.store(score + row * NP + chosen, tl.where(voting, w * w * tl.exp(log_energy), -1.0))
        if part == 0:
            tl.store(score + row * NP + expert, tl.full([NP], -1.0, tl.float32), mask=place >= K)
    else:
        nonzero = residue(hidden + row * hidden_stride, D, BLOCK)
        voting = (kind == DECODE) & finite & (tl.sum(nonzero, 0) == 0)
        scored, value = route, weight
        if RULE == SQUARED:
            value = weight * weight
        if RULE == STATIC:
            value = weight * weight * tl.load(energy + expert, mask=expert < N, other=0.0).to(tl.float32)
        if RULE == RANK:
            value = (place < K0).to(tl.float32)
        if RULE == GATE:
            scored, value = opened, probs
            tl.store(places + row * NP + expert, tl.where(voting, place, K).to(tl.int8))
        tl.store(score + row * NP + expert, tl.where(scored & voting, value, -1.0))
    if part == 0:
        sound = finite & (tl.sum(nonzero, 0) == 0)
        tl.store(kinds + row, judged(kind, sound, ROUTED).to(tl.int8))
    if CHUNK > 0:
        chunk = row // CHUNK
        programs = tl.minimum(CHUNK, T - chunk * CHUNK) * SPLIT
        tl.debug_barrier()
        if tl.atomic_add(arrivals + chunk, 1, sem="acq_rel") == programs - 1:
            tl.store(arrivals + chunk, 0)
            total, scored_by_any = add_rows(score + chunk * CHUNK * NP, T - chunk * CHUNK, NP, CHUNK)
            tl.store(partial + chunk * NP + expert, tl.where(scored_by_any, total, -1.0))
