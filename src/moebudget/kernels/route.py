"""The two launches of a fused policy: score every row's routes; then select for the batch and re-route every row.

The second launch needs all rows of the first. It repeats the batch's sum in every row's program, over a dense [T, N]
score matrix, which costs less than a grid-wide barrier up to a few hundred rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moebudget.kernels.rows import best_expert, best_sums, row_scores, top_slots

# Score rules, selections and fills that are fused.
BASE: tl.constexpr = tl.constexpr(0)
SQUARED: tl.constexpr = tl.constexpr(1)
STATIC: tl.constexpr = tl.constexpr(2)
MASS: tl.constexpr = tl.constexpr(3)
RANK: tl.constexpr = tl.constexpr(4)
FIELDS: tl.constexpr = tl.constexpr(16)  # counters of a row, the ten of the runtime and padding


@triton.jit
def score_rows(
    logits, hidden, bias, live, slope, offset, energy, budget,
    score, votes, partial, arrivals,
    logits_stride, hidden_stride, slope_stride, T, N,
    D: tl.constexpr, NP: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
    RULE: tl.constexpr, K0: tl.constexpr, HAS_BUDGET: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, s): score [t, :] float32 of row t, -1 where it has no route or no vote, and votes [t] int8.

    With SPLIT > 1 (BASE) every program of a row finds its routes by itself and predicts the energy of each SPLIT-th.
    votes: 1 voting, 0 padding, 2 a real row that is not finite. With GROUP > 0 the last program of every GROUP rows
    adds them up, in the order of the rows: partial [t // GROUP, :] float64, -1 where none has the route.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    probs, choice, finite = row_scores(
        logits + row * logits_stride, bias, N, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP
    )
    real = tl.load(live + row) != 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.arange(0, NP)
    place = top_slots(choice, choice > -float("inf"), NP, K)
    route = place < K
    weight = probs
    if RENORMALIZE:
        weight = probs / tl.maximum(tl.sum(tl.where(route, probs, 0.0), 0), 1.17549435e-38)
    weight = weight * SCALE

    column = tl.arange(0, BLOCK)
    nonzero = tl.zeros([BLOCK], tl.float32)  # x * 0 is NaN where x is not finite
    if RULE == BASE:
        enough = tl.load(budget) >= N if HAS_BUDGET else False
        for turn in tl.static_range(0, (K + SPLIT - 1) // SPLIT):
            mine = part + turn * SPLIT
            chosen = tl.sum(tl.where(place == mine, expert, 0), 0)
            dot = tl.zeros([BLOCK], tl.float32)
            square = tl.zeros([BLOCK], tl.float32)
            for start in range(0, D, BLOCK):
                inside = start + column < D
                z = tl.load(hidden + row * hidden_stride + start + column, mask=inside, other=0.0).to(tl.float32)
                a = tl.load(slope + chosen * slope_stride + start + column, mask=inside & (not enough), other=0.0)
                dot += z * a.to(tl.float32)
                square += z * z
                nonzero += z * 0.0
            length = tl.maximum(tl.sqrt(tl.sum(square, 0)), 1.17549435e-38)
            log_energy = tl.sum(dot, 0) / length + tl.load(offset + chosen).to(tl.float32)
            w = tl.sum(tl.where(place == mine, weight, 0.0), 0)
            value = w * w * tl.exp(log_energy)
            voting = real & finite & (tl.sum(nonzero, 0) == 0)
            if mine < K:
                tl.store(score + row * NP + chosen, tl.where(voting, value, -1.0))
        if part == 0:
            tl.store(score + row * NP + expert, tl.full([NP], -1.0, tl.float32), mask=place >= K)
    else:
        for start in range(0, D, BLOCK):
            inside = start + column < D
            z = tl.load(hidden + row * hidden_stride + start + column, mask=inside, other=0.0).to(tl.float32)
            nonzero += z * 0.0
        voting = real & finite & (tl.sum(nonzero, 0) == 0)
        value = weight
        if RULE == SQUARED:
            value = weight * weight
        if RULE == STATIC:
            value = weight * weight * tl.load(energy + expert, mask=expert < N, other=0.0).to(tl.float32)
        if RULE == RANK:
            value = (place < K0).to(tl.float32)
        tl.store(score + row * NP + expert, tl.where(route & voting, value, -1.0))
    if part == 0:
        tl.store(votes + row, tl.where(voting, 1, tl.where(real, 2, 0)).to(tl.int8))
    if GROUP > 0:
        group = row // GROUP
        programs = tl.minimum(GROUP, T - group * GROUP) * SPLIT
        tl.debug_barrier()
        if tl.atomic_add(arrivals + group, 1, sem="acq_rel") == programs - 1:
            tl.store(arrivals + group, 0)
            total, union = add_rows(score + group * GROUP * NP, T - group * GROUP, NP, GROUP)
            tl.store(partial + group * NP + expert, tl.where(union, total, -1.0))


@triton.jit
def add_rows(values, rows, NP: tl.constexpr, ROWS: tl.constexpr):
    """Sums [NP] float64 of the first `rows` of up to ROWS rows without entries of -1, and who has another entry."""
    row, expert = tl.arange(0, ROWS), tl.arange(0, NP)
    cell = values + row[:, None] * NP + expert[None, :]
    value = tl.load(cell, mask=(row < rows)[:, None], other=-1.0, cache_modifier=".cg")
    total = tl.sum(tl.maximum(value, 0.0).to(tl.float64), 0)
    return total, tl.max(value, 0) >= 0


@triton.jit
def fill_rows(
    logits, bias, budget, score, votes, partial, ids, weights, counters,
    logits_stride, T, N,
    NP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
    HAS_BUDGET: tl.constexpr, DROP: tl.constexpr, EXECUTED: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t: the batch's active set, then ids [t, K] int64 and weights [t, K] float32 of row t, and its counters.

    ROWS is a power of two from the number of rows, or of groups of GROUP rows, up.
    """
    row = tl.program_id(0)
    probs, choice, _ = row_scores(logits + row * logits_stride, bias, N, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP)
    expert, field = tl.arange(0, NP), tl.arange(0, FIELDS)
    if COUNT:
        before = tl.load(counters + row * FIELDS + field)
    most = N
    if HAS_BUDGET:
        most = tl.load(budget)
    if PDL:
        tl.extra.cuda.gdc_wait()
    vote = tl.load(votes + row, cache_modifier=".cg").to(tl.int32)
    own = tl.load(score + row * NP + expert, cache_modifier=".cg") >= 0
    if GROUP > 0:
        total, union = add_rows(partial, (T + GROUP - 1) // GROUP, NP, ROWS)
    else:
        total, union = add_rows(score, T, NP, ROWS)
    active = best_sums(total, union, most, NP) if HAS_BUDGET else total > 0

    inside = choice > -float("inf")
    if not DROP:
        inside = inside & active
    slot = top_slots(choice, inside, NP, K)
    used = tl.where(vote == 1, slot, K) < K
    used = used & active
    count = tl.sum(used.to(tl.int32), 0)
    lone = 0
    if count == 0:  # a row of the set's best expert: padding, not finite, or none of its own is in the set
        lone = best_expert(tl.where(probs == probs, probs, 0.0), active, NP)
    rescued = (count == 0) & (vote == 1)
    ran = used | (rescued & (expert == lone))
    first_slot = tl.min(tl.where(used, slot, K), 0)
    first = tl.where(count > 0, tl.min(tl.where(used & (slot == first_slot), expert, NP), 0), lone)

    mass = tl.sum(tl.where(own, probs, 0.0), 0)
    scale = SCALE
    if RENORMALIZE:
        divisor = tl.sum(tl.where(ran, probs, 0.0), 0) if EXECUTED else mass
        scale = scale / tl.maximum(divisor, 1.17549435e-38)
    tl.store(ids + row * K + slot, expert.to(tl.int64), mask=used)
    tl.store(weights + row * K + slot, probs * scale, mask=used)
    if DROP:
        tl.store(ids + row * K + slot, first.to(tl.int64) + expert.to(tl.int64) * 0, mask=(slot < K) & ~used)
        empty = tl.where(vote == 2, float("nan"), 0.0) + expert * 0.0
        alone = tl.sum(tl.where(expert == lone, probs, 0.0), 0) * scale
        tl.store(weights + row * K + slot, tl.where(rescued & (slot == 0), alone, empty), mask=(slot < K) & ~used)
    else:
        position = tl.arange(0, KP)
        rest = (position >= count) & (position < K)
        alone = tl.sum(tl.where(expert == lone, probs, 0.0), 0) * scale
        empty = tl.where(vote == 2, float("nan"), tl.where(rescued & (position == 0), alone, 0.0))
        tl.store(ids + row * K + position, first.to(tl.int64) + position.to(tl.int64) * 0, mask=rest)
        tl.store(weights + row * K + position, empty, mask=rest)

    if COUNT:
        # Counts of at most 512 share one integer sum, ten bits each.
        weighs = probs != 0.0
        lost = own & ~ran & weighs
        mine = tl.sum(_bit(ran & ~own & weighs, 0) + _bit(lost, 10) + _bit(own & ran & weighs, 20), 0)
        shared = tl.sum(_bit(union, 0) + _bit(active, 10) + _bit(union & ~active, 20), 0)
        lost_mass = tl.sum(tl.where(lost, probs, 0.0), 0) / tl.maximum(mass, 1.17549435e-38)
        voting, lead = vote == 1, (row == 0) & (shared > 0)
        added = _field(field, 0, lead, 1)
        added += _field(field, 1, voting, 1)
        added += _field(field, 2, lead, shared & 1023)
        added += _field(field, 3, lead, (shared >> 10) & 1023)
        added += _field(field, 4, voting, mine & 1023)
        added += _field(field, 5, voting, (mine >> 10) & 1023)
        added += _field(field, 6, voting, lost_mass)
        added += _field(field, 7, voting & ((mine >> 20) == 0), 1)
        added += _field(field, 8, vote == 2, 1)
        added += _field(field, 9, lead & ((shared >> 20) == 0), 1)
        tl.store(counters + row * FIELDS + field, before + added)


@triton.jit
def _bit(flag, place: tl.constexpr):
    return flag.to(tl.int32) << place


@triton.jit
def _field(field, place, counts, value):
    """[FIELDS] float64: `value` at `place` if it counts, 0 elsewhere."""
    return tl.where((field == place) & counts, value, 0).to(tl.float64)


@triton.jit
def native_rows(
    logits, bias, ids, weights, logits_stride, N,
    NP: tl.constexpr, K: tl.constexpr,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, RENORMALIZE: tl.constexpr, SCALE: tl.constexpr,
    GROUPS: tl.constexpr, OPEN: tl.constexpr, TOP2: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """Program t: the unchanged model's ids [t, K] and weights; what a fused policy's time is compared with."""
    row = tl.program_id(0)
    probs, choice, _ = row_scores(logits + row * logits_stride, bias, N, NP, SIGMOID, HAS_BIAS, GROUPS, OPEN, TOP2, GP)
    place = top_slots(choice, choice > -float("inf"), NP, K)
    route = place < K
    scale = SCALE
    if RENORMALIZE:
        scale = scale / tl.maximum(tl.sum(tl.where(route, probs, 0.0), 0), 1.17549435e-38)
    expert = tl.arange(0, NP)
    tl.store(ids + row * K + place, expert.to(tl.int64), mask=route)
    tl.store(weights + row * K + place, probs * scale, mask=route)
