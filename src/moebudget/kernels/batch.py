"""Triton pieces of the whole batch: sums over rows, who is named by a row that runs nothing, counters."""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.rows import likeliest, load_logits

# What a row is: the caller's three kinds, and a real row that is not finite.
PADDING: tl.constexpr = tl.constexpr(0)
VOTES: tl.constexpr = tl.constexpr(1)
KEEPS: tl.constexpr = tl.constexpr(2)
BROKEN: tl.constexpr = tl.constexpr(3)
FIELDS: tl.constexpr = tl.constexpr(16)  # counters of a row, the ten of the runtime and padding
STEP: tl.constexpr = tl.constexpr(16)  # rows that are looked at together


@triton.jit
def add_rows(values, rows, NP: tl.constexpr, ROWS: tl.constexpr):
    """Sums [NP] float64 of the first `rows` of up to ROWS rows without entries of -1, and who has another entry."""
    row, expert = tl.arange(0, ROWS), tl.arange(0, NP)
    cell = values + row[:, None] * NP + expert[None, :]
    value = tl.load(cell, mask=(row < rows)[:, None], other=-1.0, cache_modifier=".cg")
    return tl.sum(tl.maximum(value, 0.0).to(tl.float64), 0), tl.max(value, 0) >= 0


@triton.jit
def has_below(places, limit, rows, NP: tl.constexpr):
    """[NP] bool: experts that some row holds at a place below the limit."""
    row, expert = tl.arange(0, STEP), tl.arange(0, NP)
    found = tl.zeros([NP], tl.int32)
    for start in range(0, rows, STEP):
        cell = places + (start + row)[:, None] * NP + expert[None, :]
        place = tl.load(cell, mask=(start + row < rows)[:, None], other=127, cache_modifier=".cg").to(tl.int32)
        found = tl.maximum(found, tl.max((place < limit).to(tl.int32), 0))
    return found > 0


@triton.jit
def judged(kind, sound, ROUTED: tl.constexpr):
    """A row's kind, BROKEN if its own routes had to be found, or it votes, and it holds a value that is not finite."""
    real = kind != PADDING
    if ROUTED:
        real = kind == VOTES
    return tl.where(real & (sound == 0), BROKEN, kind)


@triton.jit
def settle(
    logits, runs, kinds, ids, counters, logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr, SIGMOID: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Rows that run nothing name the best expert that another row runs; counts the experts that are run."""
    expert, field, slot = tl.arange(0, NP), tl.arange(0, FIELDS), tl.arange(0, NP)
    run = tl.zeros([NP], tl.int32)
    for start in range(0, T, STEP):
        _, some = add_rows(runs + start * NP, T - start, NP, STEP)
        run = tl.maximum(run, some.to(tl.int32))
    for row in range(0, T):
        kind = tl.load(kinds + row).to(tl.int32)
        if (kind != VOTES) & (kind != KEEPS):
            x = load_logits(logits + row * logits_stride, N, NP)
            lone = likeliest(x, (run > 0) & (expert < N), logits, N, NP, SIGMOID)
            tl.store(
                ids + row * K + slot,
                tl.zeros([NP], ids.dtype.element_ty) + lone.to(ids.dtype.element_ty),
                mask=slot < K,
            )
    if COUNT:
        count = tl.sum(run, 0)
        book = tl.load(counters + field, cache_modifier=".cg")
        tl.store(counters + field, book + field_of(field, 3, count > 0, count))


@triton.jit
def bit(flag, place: tl.constexpr):
    return flag.to(tl.int32) << place


@triton.jit
def field_of(field, place, counts, value):
    """[FIELDS] float64: `value` at `place` if it counts, 0 elsewhere."""
    return tl.where((field == place) & counts, value, 0).to(tl.float64)
