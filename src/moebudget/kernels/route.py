"""The launches of a fused policy. Few rows: measure them, then route the whole batch in one block. Many: score rows,
then re-route them in tiles.

The second launch needs all of the first. It repeats what concerns the whole batch in every program, which costs less
than a grid-wide barrier up to a few hundred rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.rows import TINY, best_expert, largest, over_mass, row_scores, top_slots

# Score rules, selections and fills that are fused.
BASE: tl.constexpr = tl.constexpr(0)
SQUARED: tl.constexpr = tl.constexpr(1)
STATIC: tl.constexpr = tl.constexpr(2)
MASS: tl.constexpr = tl.constexpr(3)
RANK: tl.constexpr = tl.constexpr(4)
GATE: tl.constexpr = tl.constexpr(5)
FIELDS: tl.constexpr = tl.constexpr(16)  # counters of a row, the ten of the runtime and padding
# What a row is.
PADDING: tl.constexpr = tl.constexpr(0)
VOTES: tl.constexpr = tl.constexpr(1)
KEEPS: tl.constexpr = tl.constexpr(2)  # the model's own routes, without a vote
BROKEN: tl.constexpr = tl.constexpr(3)  # a real row that is not finite


@triton.jit
def measure_rows(
    hidden, slope, budget, dots, lengths,
    hidden_stride, slope_stride, T, N,
    D: tl.constexpr, NP: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (0, s): lengths [s, t], the squared length of part s of row t, NaN unless finite. Program (1 + u, s):
    dots [s, t, u], that part's product with the slope of expert u, where the budget is a limit. Parts of D in BLOCKs.
    """
    task, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, column = tl.arange(0, R), tl.arange(0, BLOCK)
    step: tl.constexpr = (D + PARTS * BLOCK - 1) // (PARTS * BLOCK)
    if task == 0:
        square = tl.zeros([R, BLOCK], tl.float32)
        for turn in tl.static_range(0, step):
            at = (part * step + turn) * BLOCK + column
            inside = (row < T)[:, None] & (at < D)[None, :]
            z = tl.load(hidden + row[:, None] * hidden_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
            square += tl.where((z - z) == 0, z * z, float("nan"))
        tl.store(lengths + part * R + row, tl.sum(square, 1))
    elif tl.load(budget) < N:
        expert = task - 1
        dot = tl.zeros([R, BLOCK], tl.float32)
        for turn in tl.static_range(0, step):
            at = (part * step + turn) * BLOCK + column
            a = tl.load(slope + expert * slope_stride + at, mask=at < D, other=0.0).to(tl.float32)
            inside = (row < T)[:, None] & (at < D)[None, :]
            z = tl.load(hidden + row[:, None] * hidden_stride + at[None, :], mask=inside, other=0.0).to(tl.float32)
            dot += z * a[None, :]
        tl.store(dots + (part * R + row) * NP + expert, tl.sum(dot, 1))


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
    The last program of every GROUP rows adds them up: partial [t // GROUP, :] float64, -1 where none has the route.
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
        limited = tl.load(budget) < N
        for turn in tl.static_range(0, (K + SPLIT - 1) // SPLIT):
            mine = part + turn * SPLIT
            chosen = tl.sum(tl.where(place == mine, expert, 0), 1)[:, None]
            dot = tl.zeros([1, BLOCK], tl.float32)
            square = tl.zeros([1, BLOCK], tl.float32)
            for start in range(0, D, BLOCK):
                at = start + column
                z = tl.load(hidden + row * hidden_stride + at, mask=at < D, other=0.0).to(tl.float32)
                a = tl.load(slope + chosen * slope_stride + at, mask=(at < D) & limited, other=0.0)
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
        value = cost_of(place, weight, probs, energy, N, NP, RULE, K0)
        tl.store(line + expert, tl.where(route & voting[:, None], value, -1.0))
    if part == 0:
        sound = finite & (tl.sum(nonzero, 1) == 0)
        tl.store(votes + row + tl.arange(0, 1), kind_of(state, sound).to(tl.int8))
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
def cost_of(place, weight, probs, energy, N, NP: tl.constexpr, RULE: tl.constexpr, K0: tl.constexpr):
    """[R, NP] what each rule but BASE says it costs the row to lose an expert."""
    value = weight
    if RULE == SQUARED:
        value = weight * weight
    if RULE == STATIC:
        expert = tl.arange(0, NP)[None, :]
        value = weight * weight * tl.load(energy + expert, mask=expert < N, other=0.0).to(tl.float32)
    if RULE == RANK:
        value = (place < K0).to(tl.float32)
    if RULE == GATE:
        value = probs
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
    logits, bias, live, budget, dots, lengths, offset, energy, score, votes, partial, ids, weights, counters,
    logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, R: tl.constexpr, ALONE: tl.constexpr, PARTS: tl.constexpr,
    LINES: tl.constexpr, GROUP: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
    RULE: tl.constexpr, K0: tl.constexpr, HAS_BUDGET: tl.constexpr, ADDITIVE: tl.constexpr,
    DROP: tl.constexpr, EXECUTED: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: the batch's active set, then ids [t, K] int64, weights [t, K] float32 and counters of R rows.

    ALONE: one program holds all rows and scores them itself, from `measure_rows`. Else the scores and the sums of each
    GROUP rows (at most LINES, a power of two) come from `score_rows`.
    """
    row = tl.program_id(0) * R + tl.arange(0, R)
    there = row < T
    expert, field = tl.arange(0, NP)[None, :], tl.arange(0, FIELDS)[None, :]
    probs, choice, finite = row_scores(
        logits, bias, row, logits_stride, T, N, R, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP
    )
    opened = choice > -float("inf")
    book = counters + row[:, None] * FIELDS + field
    if COUNT:
        before = tl.load(book, mask=there[:, None], other=0.0)
    most = tl.load(budget)
    if ALONE:
        place = top_slots(choice, opened, R, NP, K)
        own = place < K
        mass = over_mass(probs, own)
        weight = probs * SCALE
        if RENORMALIZE:
            weight = probs / mass[:, None] * SCALE
        state = tl.load(live + row, mask=there, other=0).to(tl.int32)
        if PDL:
            tl.extra.cuda.gdc_wait()
        square = tl.zeros([R], tl.float32)
        for part in tl.static_range(0, PARTS):
            square += tl.load(lengths + part * R + row, cache_modifier=".cg")
        kind = kind_of(state, finite & (square == square))
        voting = (kind == VOTES)[:, None]
        scored = (opened if RULE == GATE else own) & voting
        value = cost_of(place, weight, probs, energy, N, NP, RULE, K0)
        if RULE == BASE:
            needed = scored & (expert < tl.where(most < N, N, 0))
            dot = tl.zeros([R, NP], tl.float32)
            for part in tl.static_range(0, PARTS):
                at = dots + (part * R + row)[:, None] * NP + expert
                dot += tl.load(at, mask=needed, other=0.0, cache_modifier=".cg")
            scale = tl.maximum(tl.sqrt(square), TINY)[:, None]
            value = weight * weight * tl.exp(dot / scale + tl.load(offset + expert, mask=expert < N, other=0.0))
        total = tl.sum(tl.where(scored, value, 0.0).to(tl.float64), 0)
        union = tl.max((own & voting).to(tl.int32), 0) > 0
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        kind = tl.load(votes + row, mask=there, other=0, cache_modifier=".cg").to(tl.int32)
        own = tl.load(score + row[:, None] * NP + expert, mask=there[:, None], other=-1.0, cache_modifier=".cg") >= 0
        total, union = add_rows(partial, (T + GROUP - 1) // GROUP, NP, LINES)
    votes_here, keeps = (kind == VOTES)[:, None], (kind == KEEPS)[:, None]

    if RULE == GATE:  # the rows' first K0 routes, then `most` others by their sum
        warm = tl.max(((place < K0) & votes_here).to(tl.int32), 0) > 0
        if not ADDITIVE:
            most = most - tl.sum(warm.to(tl.int32), 0)
        active = warm | largest(total, (union | (total > 0)) & ~warm, most, NP)
    elif HAS_BUDGET:
        active = union
        if most < N:
            active = largest(total, union, most, NP)
    else:
        active = total > 0
    among = active[None, :]
    slot = top_slots(choice, opened if DROP else opened & (among | keeps), R, NP, K)
    used = (slot < K) & (keeps | (among & votes_here)) & there[:, None]
    own = (slot < K) & keeps | own & ~keeps
    if not ALONE:
        mass = over_mass(probs, own)

    # Rows without any expert of the set run its best one; padding and broken rows name an expert that is fetched.
    sound = tl.where(probs == probs, probs, 0.0)
    lone = best_expert(sound, among & there[:, None], NP)[:, None]
    head = tl.min(tl.where(used, slot * 1024 + expert, K * 1024), 1)[:, None]
    empty = head == K * 1024
    rescued = empty & votes_here
    ran = used | (rescued & (expert == lone))
    if RULE == GATE:  # the set may hold experts that no row runs
        active = tl.max((ran & votes_here).to(tl.int32), 0) > 0
        lone = tl.where(votes_here, lone, best_expert(sound, active[None, :] & there[:, None], NP)[:, None])
    first = tl.where(empty, lone, head & 1023)

    scale = tl.full([R], SCALE, tl.float32)[:, None]
    if RENORMALIZE:
        divisor = mass[:, None]
        if EXECUTED:
            divisor = tl.where(keeps, divisor, over_mass(probs, ran)[:, None])
        scale = scale / divisor
    position = tl.arange(0, KP)[None, :]
    cell, open_cell = row[:, None] * K + position, (position < K) & there[:, None]
    alone = tl.sum(tl.where(expert == lone, sound, 0.0), 1)[:, None] * scale
    rest = tl.where((kind == BROKEN)[:, None], float("nan"), tl.where(rescued & (position == 0), alone, 0.0))
    tl.store(ids + cell, first.to(tl.int64) + position.to(tl.int64) * 0, mask=open_cell)
    tl.store(weights + cell, rest, mask=open_cell)
    tl.debug_barrier()  # used slots replace what was just written
    tl.store(ids + row[:, None] * K + slot, expert.to(tl.int64) + slot.to(tl.int64) * 0, mask=used)
    tl.store(weights + row[:, None] * K + slot, probs * scale, mask=used)

    if COUNT:
        # Counts of at most 512 share one integer sum, ten bits each.
        weighs = probs != 0.0
        lost = own & ~ran & weighs
        mine = tl.sum(_bit(ran & ~own & weighs, 0) + _bit(lost, 10) + _bit(own & ran & weighs, 20), 1)[:, None]
        shared = tl.sum(_bit(union, 0) + _bit(active, 10) + _bit(union & ~active, 20), 0)
        lost_mass = tl.sum(tl.where(lost, probs, 0.0), 1)[:, None] / mass[:, None]
        lead = (row == 0)[:, None] & (shared > 0)
        added = _field(field, 0, lead, 1)
        added += _field(field, 1, votes_here, 1)
        added += _field(field, 2, lead, shared & 1023)
        added += _field(field, 3, lead, (shared >> 10) & 1023)
        added += _field(field, 4, votes_here, mine & 1023)
        added += _field(field, 5, votes_here, (mine >> 10) & 1023)
        added += _field(field, 6, votes_here, lost_mass)
        added += _field(field, 7, votes_here & ((mine >> 20) == 0), 1)
        added += _field(field, 8, (kind == BROKEN)[:, None], 1)
        added += _field(field, 9, lead & ((shared >> 20) == 0), 1)
        tl.store(book, before + added, mask=there[:, None])


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
