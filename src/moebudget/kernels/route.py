"""The two launches of a fused policy: score every row's routes; then select for the batch and re-route every row.

The second launch needs all rows of the first. It repeats the batch's sum in every row's program, over a dense [T, N]
score matrix, which costs less than a grid-wide barrier up to a few hundred rows. Scores of experts that no row routes
to (GATE) can give a set that no row runs in full, which one block that holds all rows must settle: one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.rows import TINY, best_expert, in_order, largest, over_mass, row_scores, top_slots

# Score rules, selections and fills that are fused.
BASE: tl.constexpr = tl.constexpr(0)
SQUARED: tl.constexpr = tl.constexpr(1)
STATIC: tl.constexpr = tl.constexpr(2)
MASS: tl.constexpr = tl.constexpr(3)
RANK: tl.constexpr = tl.constexpr(4)
GATE: tl.constexpr = tl.constexpr(5)  # has no first launch
FIELDS: tl.constexpr = tl.constexpr(16)  # counters of a row, the ten of the runtime and padding
# What a row is.
PADDING: tl.constexpr = tl.constexpr(0)
VOTES: tl.constexpr = tl.constexpr(1)
KEEPS: tl.constexpr = tl.constexpr(2)  # the model's own routes, without a vote
BROKEN: tl.constexpr = tl.constexpr(3)  # a real row that is not finite


@triton.jit
def score_rows(
    logits, hidden, bias, live, slope, offset, energy, budget,
    score, votes, partial, arrivals,
    logits_stride, hidden_stride, slope_stride, T, N,
    D: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
    RULE: tl.constexpr, K0: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, s): score [t, :] float32 of row t, -1 where it has no route or no vote, and votes [t] int8.

    With SPLIT > 1 (BASE) every program of a row finds its routes by itself and predicts the energy of each SPLIT-th.
    With GROUP > 0 the last program of every GROUP rows adds them up: partial [t // GROUP, :] float64, -1 where none has
    the route.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    probs, choice, finite = row_scores(
        logits, bias, row + tl.arange(0, 1), logits_stride, T, N, 1, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP
    )
    state = tl.load(live + row).to(tl.int32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert, column = tl.arange(0, NP)[None, :], tl.arange(0, BLOCK)[None, :]
    place = top_slots(choice, choice > -float("inf"), 1, NP, K)
    route = place < K
    weight = probs * SCALE
    if RENORMALIZE:
        weight = probs / over_mass(probs, route)[:, None] * SCALE
    line = score + row * NP
    nonzero = tl.zeros([1, BLOCK], tl.float32)  # x * 0 is NaN where x is not finite
    if RULE == BASE:
        width = tl.where(tl.load(budget) < N, D, 0)  # no limit: no predictor is read
        for turn in tl.static_range(0, (K + SPLIT - 1) // SPLIT):
            mine = part + turn * SPLIT
            chosen = tl.sum(tl.where(place == mine, expert, 0), 1)[:, None]
            dot = tl.zeros([1, BLOCK], tl.float32)
            square = tl.zeros([1, BLOCK], tl.float32)
            for start in tl.static_range(0, D, BLOCK):
                at = start + column
                z = tl.load(hidden + row * hidden_stride + at, mask=at < D, other=0.0).to(tl.float32)
                a = tl.load(slope + chosen * slope_stride + at, mask=at < width, other=0.0)
                dot += z * a.to(tl.float32)
                square += z * z
                nonzero += z * 0.0
            length = tl.maximum(tl.sqrt(tl.sum(square, 1)), TINY)[:, None]
            log_energy = tl.sum(dot, 1)[:, None] / length + tl.load(offset + chosen).to(tl.float32)
            w = tl.sum(tl.where(place == mine, weight, 0.0), 1)[:, None]
            voting = (state == VOTES) & finite & (tl.sum(nonzero, 1) == 0)
            if mine < K:
                tl.store(line + chosen, tl.where(voting[:, None], w * w * tl.exp(log_energy), -1.0))
        if part == 0:
            tl.store(line + expert, tl.full([1, NP], -1.0, tl.float32), mask=place >= K)
    else:
        for start in range(0, D, BLOCK):
            at = start + column
            nonzero += tl.load(hidden + row * hidden_stride + at, mask=at < D, other=0.0).to(tl.float32) * 0.0
        voting = (state == VOTES) & finite & (tl.sum(nonzero, 1) == 0)
        value = cost_of(place, weight, energy, N, NP, RULE, K0)
        tl.store(line + expert, tl.where(route & voting[:, None], value, -1.0))
    if part == 0:
        sound = finite & (tl.sum(nonzero, 1) == 0)
        tl.store(votes + row + tl.arange(0, 1), kind_of(state, sound).to(tl.int8))
    if GROUP > 0:
        group = row // GROUP
        programs = tl.minimum(GROUP, T - group * GROUP) * SPLIT
        tl.debug_barrier()
        if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == programs - 1:
            tl.store(arrivals + group, 0)
            total, union = add_rows(score + group * GROUP * NP, T - group * GROUP, NP, GROUP)
            tl.store(partial + group * NP + tl.arange(0, NP), tl.where(union, total, -1.0))


@triton.jit
def kind_of(state, sound):
    """What the row is, given what the caller says and whether its input is finite."""
    return tl.where((state != PADDING) & ~sound, BROKEN, state)


@triton.jit
def cost_of(place, weight, energy, N, NP: tl.constexpr, RULE: tl.constexpr, K0: tl.constexpr):
    """[R, NP] what each rule but BASE says it costs the row to lose an expert."""
    value = weight
    if RULE == SQUARED:
        value = weight * weight
    if RULE == STATIC:
        expert = tl.arange(0, NP)[None, :]
        value = weight * weight * tl.load(energy + expert, mask=expert < N, other=0.0).to(tl.float32)
    if RULE == RANK:
        value = (place < K0).to(tl.float32)
    return value


@triton.jit
def add_rows(values, rows, NP: tl.constexpr, ROWS: tl.constexpr):
    """Sums [NP] float64 of the first `rows` of up to ROWS rows without entries of -1, and who has another entry."""
    row, expert = tl.arange(0, ROWS), tl.arange(0, NP)
    cell = values + row[:, None] * NP + expert[None, :]
    value = tl.load(cell, mask=(row < rows)[:, None], other=-1.0, cache_modifier=".cg")
    return tl.sum(tl.maximum(value, 0.0).to(tl.float64), 0), tl.max(value, 0) >= 0


@triton.jit
def route_rows(
    logits, hidden, bias, live, budget, score, votes, partial, ids, weights, counters,
    logits_stride, hidden_stride, T, N,
    D: tl.constexpr, BLOCK: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, R: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
    GATE: tl.constexpr, K0: tl.constexpr, ADDITIVE: tl.constexpr, HAS_BUDGET: tl.constexpr,
    DROP: tl.constexpr, EXECUTED: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: the batch's active set, then ids [t, K] int64, weights [t, K] float32 and counters of R rows.

    ROWS is a power of two from the number of rows, or of groups of GROUP rows, up. GATE: one program has all rows, and
    no launch came before. Whatever concerns one row alone is done before the first launch has ended.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    there = (row < T)[:, None]
    expert, place, field = tl.arange(0, NP), tl.arange(0, NP)[None, :], tl.arange(0, FIELDS)[None, :]
    probs, choice, finite = row_scores(
        logits, bias, row, logits_stride, T, N, R, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP
    )
    opened = choice > -float("inf")
    best = in_order(choice, NP)
    at = 511 - (best & 511).to(tl.int32)  # the expert at each place
    ranked = tl.gather(probs, at, 1)
    own = place < K
    mass = over_mass(ranked, own)[:, None]
    book = counters + row[:, None] * FIELDS + field
    if COUNT:
        before = tl.load(book, mask=there, other=0.0)
    most = tl.load(budget)
    if GATE:
        nonzero = tl.zeros([R, BLOCK], tl.float32)
        for start in range(0, D, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            z = tl.load(hidden + row[:, None] * hidden_stride + column, mask=there & (column < D), other=0.0)
            nonzero += z.to(tl.float32) * 0.0
        kind = kind_of(tl.load(live + row, mask=row < T, other=0).to(tl.int32), finite & (tl.sum(nonzero, 1) == 0))
        voting = (kind == VOTES)[:, None]
        slot = top_slots(choice, opened, R, NP, K)
        total = tl.sum(tl.where(voting & opened, probs, 0.0).to(tl.float64), 0)
        union = tl.max((voting & (slot < K)).to(tl.int32), 0) > 0
        active = tl.max((voting & (slot < K0)).to(tl.int32), 0) > 0  # warm-up; then `most` others by their sum
        if not ADDITIVE:
            most = most - tl.sum(active.to(tl.int32), 0)
        active = active | largest(total, (union | (total > 0)) & ~active, most, NP)
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        kind = tl.load(votes + row, mask=row < T, other=0, cache_modifier=".cg").to(tl.int32)
        voting = (kind == VOTES)[:, None]
        if GROUP > 0:
            total, union = add_rows(partial, (T + GROUP - 1) // GROUP, NP, ROWS)
        else:
            total, union = add_rows(score, T, NP, ROWS)
        active = largest(total, union, most, NP) if HAS_BUDGET else total > 0

    keeps = (kind == KEEPS)[:, None]
    among = active[None, :]
    allowed = tl.gather((opened & (keeps | (among & voting))).to(tl.int32), at, 1)
    slot = place + allowed * 0 if DROP else tl.cumsum(allowed, 1) - 1
    used = (allowed > 0) & (slot < K)
    count = tl.sum(used.to(tl.int32), 1)[:, None]

    # Empty slots repeat the row's first expert. A row without any runs the best one of the set; padding and broken
    # rows name it with weight 0.
    rescued = (count == 0) & voting
    lone = tl.full([R, 1], 0, tl.int32)
    first, alone = lone, tl.full([R, 1], 0.0, tl.float32)
    if GATE or tl.min(tl.where(there, count, K)) < K:
        sound = tl.where(probs == probs, probs, 0.0)
        lone = best_expert(sound, among & there, NP)[:, None]
        if GATE:  # the set may hold experts that no row runs
            ran = (top_slots(choice, opened & among, R, NP, K) < K) | (rescued & (expert[None, :] == lone))
            executed = tl.max((ran & voting).to(tl.int32), 0) > 0
            lone = tl.where(voting, lone, best_expert(sound, executed[None, :] & there, NP)[:, None])
        head = tl.min(tl.where(used, place, NP), 1)[:, None]
        first = tl.where(count == 0, lone, tl.sum(tl.where(place == head, at, 0), 1)[:, None])
        alone = tl.sum(tl.where(expert[None, :] == lone, sound, 0.0), 1)[:, None]

    scale = tl.full([R, 1], SCALE, tl.float32)
    if RENORMALIZE:
        divisor = mass
        if EXECUTED:
            executed_mass = tl.where(rescued, alone, tl.sum(tl.where(used, ranked, 0.0), 1)[:, None])
            divisor = tl.maximum(tl.where(keeps, mass, executed_mass), TINY)
        scale = scale / divisor
    cell = row[:, None] * K
    tl.store(ids + cell + slot, at.to(tl.int64), mask=used & there)
    tl.store(weights + cell + slot, ranked * scale, mask=used & there)
    empty = (own & (allowed == 0) if DROP else own & (place >= count)) & there
    rest = tl.where(rescued & (place == 0), alone * scale, 0.0)
    rest = tl.where((kind == BROKEN)[:, None], float("nan"), rest)
    tl.store(ids + cell + place, first.to(tl.int64) + place.to(tl.int64) * 0, mask=empty)
    tl.store(weights + cell + place, rest, mask=empty)

    if COUNT:
        # Counts of at most 512 share one integer sum, ten bits each.
        ran = (used | (rescued & (at == lone))) & (ranked != 0.0)
        lost = own & ~ran & (ranked != 0.0)
        mine = tl.sum(_bit(ran & ~own, 0) + _bit(lost, 10) + _bit(ran & own, 20), 1)[:, None]
        lost_mass = tl.sum(tl.where(lost, ranked, 0.0), 1)[:, None] / mass
        if GATE:
            active = executed
        shared = tl.sum(_bit(union, 0) + _bit(active, 10) + _bit(union & ~active, 20), 0)
        lead = (row == 0)[:, None] & (shared > 0)
        added = _field(field, 0, lead, 1)
        added += _field(field, 1, voting, 1)
        added += _field(field, 2, lead, shared & 1023)
        added += _field(field, 3, lead, (shared >> 10) & 1023)
        added += _field(field, 4, voting, mine & 1023)
        added += _field(field, 5, voting, (mine >> 10) & 1023)
        added += _field(field, 6, voting, lost_mass)
        added += _field(field, 7, voting & ((mine >> 20) == 0), 1)
        added += _field(field, 8, (kind == BROKEN)[:, None], 1)
        added += _field(field, 9, lead & ((shared >> 20) == 0), 1)
        tl.store(book, before + added, mask=there)


@triton.jit
def _bit(flag, place: tl.constexpr):
    return flag.to(tl.int32) << place


@triton.jit
def _field(field, place, counts, value):
    """[R, FIELDS] float64: `value` at `place` if it counts, 0 elsewhere."""
    return tl.where((field == place) & counts, value, 0).to(tl.float64)


@triton.jit
def native_rows(
    logits, bias, ids, weights, logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program t: the unchanged model's ids [t, K] and weights; what a fused policy's time is compared with."""
    row = tl.program_id(0) + tl.arange(0, 1)
    probs, choice, _ = row_scores(
        logits, bias, row, logits_stride, T, N, 1, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP
    )
    place = top_slots(choice, choice > -float("inf"), 1, NP, K)
    route = place < K
    scale = tl.full([1], SCALE, tl.float32)[:, None]
    if RENORMALIZE:
        scale = scale / over_mass(probs, route)[:, None]
    expert = tl.arange(0, NP)[None, :]
    tl.store(ids + row[:, None] * K + place, expert.to(tl.int64), mask=route)
    tl.store(weights + row[:, None] * K + place, probs * scale, mask=route)
