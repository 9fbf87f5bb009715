"""Device functions over the whole batch: sums over rows, ids of rows that execute nothing, fields of counters."""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.core.counters import Counter
from moebudget.core.types import RowKind
from moebudget.kernels.rows import likeliest, load_logits

# RowKind and Counter, as constants of the kernels.
PAD: tl.constexpr = tl.constexpr(int(RowKind.PAD))
DECODE: tl.constexpr = tl.constexpr(int(RowKind.DECODE))
NATIVE: tl.constexpr = tl.constexpr(int(RowKind.NATIVE))
BROKEN: tl.constexpr = tl.constexpr(int(RowKind.BROKEN))
COUNT_STEPS: tl.constexpr = tl.constexpr(int(Counter.STEPS))
COUNT_ROWS: tl.constexpr = tl.constexpr(int(Counter.ROWS))
COUNT_NATIVE_UNION: tl.constexpr = tl.constexpr(int(Counter.NATIVE_UNION))
COUNT_FETCHED: tl.constexpr = tl.constexpr(int(Counter.FETCHED))
COUNT_BACKFILLED: tl.constexpr = tl.constexpr(int(Counter.BACKFILLED))
COUNT_DROPPED: tl.constexpr = tl.constexpr(int(Counter.DROPPED))
COUNT_DROPPED_MASS: tl.constexpr = tl.constexpr(int(Counter.DROPPED_MASS))
COUNT_RESCUED: tl.constexpr = tl.constexpr(int(Counter.RESCUED))
COUNT_NONFINITE: tl.constexpr = tl.constexpr(int(Counter.NONFINITE))
COUNT_UNRESTRICTED: tl.constexpr = tl.constexpr(int(Counter.UNRESTRICTED))
FIELDS: tl.constexpr = tl.constexpr(16)  # counters of a row, padded to a power of two
TOGETHER: tl.constexpr = tl.constexpr(16)  # rows that are read at once


@triton.jit
def add_rows(values, rows, NP: tl.constexpr, ROWS: tl.constexpr):
    """Sums [NP] float64 over the first `rows` of up to ROWS rows, and whether any entry counts; -1 does not."""
    row, expert = tl.arange(0, ROWS), tl.arange(0, NP)
    cell = values + row[:, None] * NP + expert[None, :]
    value = tl.load(cell, mask=(row < rows)[:, None], other=-1.0, cache_modifier=".cg")
    return tl.sum(tl.maximum(value, 0.0).to(tl.float64), 0), tl.max(value, 0) >= 0


@triton.jit
def sums_over_batch(score, partial, T, NP: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Sums [NP] float64 of the scores over all rows, and which experts have a score; of the chunks' sums if any."""
    if CHUNK > 0:
        total, union = add_rows(partial, (T + CHUNK - 1) // CHUNK, NP, ROWS)
    else:
        total, union = add_rows(score, T, NP, ROWS)
    return total, union


@triton.jit
def has_below(places, limit, rows, NP: tl.constexpr):
    """[NP] bool: experts at a place below the limit in at least one row."""
    row, expert = tl.arange(0, TOGETHER), tl.arange(0, NP)
    below = tl.zeros([NP], tl.int32)
    for start in range(0, rows, TOGETHER):
        cell = places + (start + row)[:, None] * NP + expert[None, :]
        place = tl.load(cell, mask=(start + row < rows)[:, None], other=127, cache_modifier=".cg").to(tl.int32)
        below = tl.maximum(below, tl.max((place < limit).to(tl.int32), 0))
    return below > 0


@triton.jit
def judged(kind, sound, ROUTED: tl.constexpr):
    """A row's kind, or BROKEN if it holds a value that is not finite; given routes, only DECODE rows can be broken."""
    real = kind != PAD
    if ROUTED:
        real = kind == DECODE
    return tl.where(real & (sound == 0), BROKEN, kind)


@triton.jit
def settle(
    logits, runs, kinds, ids, counters, logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr, ROUTER: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Give rows that execute nothing the best expert that another row executes; count the executed experts.

    runs [T, NP]: 0 where a row executes an expert, -1 elsewhere. For active sets that may hold experts that no row
    executes.
    """
    expert, field, slot = tl.arange(0, NP), tl.arange(0, FIELDS), tl.arange(0, NP)
    run = tl.zeros([NP], tl.int32)
    for start in range(0, T, TOGETHER):
        _, executed = add_rows(runs + start * NP, T - start, NP, TOGETHER)
        run = tl.maximum(run, executed.to(tl.int32))
    for row in range(0, T):
        kind = tl.load(kinds + row).to(tl.int32)
        if (kind != DECODE) & (kind != NATIVE):
            x = load_logits(logits + row * logits_stride, N, NP)
            lone = likeliest(x, (run > 0) & (expert < N), N, NP, ROUTER.SIGMOID)
            tl.store(
                ids + row * K + slot,
                tl.zeros([NP], ids.dtype.element_ty) + lone.to(ids.dtype.element_ty),
                mask=slot < K,
            )
    if COUNT:
        count = tl.sum(run, 0)
        before = tl.load(counters + field, cache_modifier=".cg")
        tl.store(counters + field, before + field_of(field, COUNT_FETCHED, count > 0, count))


@triton.jit
def field_of(field, place, counts, value):
    """[FIELDS] float64: `value` at `place` if it counts, 0 elsewhere."""
    return tl.where((field == place) & counts, value, 0).to(tl.float64)
