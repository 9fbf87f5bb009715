"""Counters of a step: every row's program adds its part to the row's own line."""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.batch import (
    BROKEN,
    COUNT_BACKFILLED,
    COUNT_DROPPED,
    COUNT_DROPPED_MASS,
    COUNT_FETCHED,
    COUNT_NATIVE_UNION,
    COUNT_NONFINITE,
    COUNT_RESCUED,
    COUNT_ROWS,
    COUNT_STEPS,
    COUNT_UNRESTRICTED,
    DECODE,
    FIELDS,
    field_of,
)
from moebudget.kernels.score import GATE


@triton.jit
def count_row(
    counters, before, row, kind, union, active, executed, ranked, mass,
    NP: tl.constexpr, K: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Add row `row` to its counters, which were `before`; row 0 also counts the step.

    `executed` and the router scores `ranked` are [NP] by place, `union` and `active` [NP] by expert. With the GATE
    rule the set may hold experts that no row runs; `settle` counts the fetched ones.
    """
    place, field = tl.arange(0, NP), tl.arange(0, FIELDS)
    native, voting, weighs = place < K, kind == DECODE, ranked != 0.0
    lost = native & ~executed & weighs
    # Counts of at most 512 share one integer sum, ten bits each.
    of_row = tl.sum(bit(executed & ~native & weighs, 0) + bit(lost, 10) + bit(executed & native & weighs, 20), 0)
    of_step = tl.sum(bit(union, 0) + bit(active, 10) + bit(union & ~active, 20), 0)
    lead = (row == 0) & (of_step > 0)
    added = field_of(field, COUNT_STEPS, lead, 1)
    added += field_of(field, COUNT_ROWS, voting, 1)
    added += field_of(field, COUNT_NATIVE_UNION, lead, of_step & 1023)
    if RULE != GATE:
        added += field_of(field, COUNT_FETCHED, lead, (of_step >> 10) & 1023)
    added += field_of(field, COUNT_BACKFILLED, voting, of_row & 1023)
    added += field_of(field, COUNT_DROPPED, voting, (of_row >> 10) & 1023)
    added += field_of(field, COUNT_DROPPED_MASS, voting, tl.sum(tl.where(lost, ranked, 0.0), 0) / mass)
    added += field_of(field, COUNT_RESCUED, voting & ((of_row >> 20) == 0), 1)
    added += field_of(field, COUNT_NONFINITE, kind == BROKEN, 1)
    added += field_of(field, COUNT_UNRESTRICTED, lead & ((of_step >> 20) == 0), 1)
    tl.store(counters + row * FIELDS + field, before + added)


@triton.jit
def bit(flag, place: tl.constexpr):
    return flag.to(tl.int32) << place
