"""Budgets from one-layer loss curves by dynamic programming, and their interpolation between averages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def interpolate(points: Mapping[int, float], experts: int) -> Tensor:
    """Losses at some budgets -> at all budgets 1 to N, float64 [N]: linear between points, never rising, 0 at the end.

    Below the first point, the first slope is continued.
    """
    budgets = sorted(points)
    if len(budgets) < 2 or budgets[0] < 1 or budgets[-1] > experts:
        raise ValueError(f"budgets={budgets} must be at least two numbers from 1 to {experts}")
    values = [points[m] for m in budgets]
    curve = torch.zeros(experts, dtype=torch.float64)
    for m in range(1, budgets[-1] + 1):
        right = next(i for i in range(1, len(budgets)) if budgets[i] >= m)
        low, high = budgets[right - 1], budgets[right]
        share = (m - low) / (high - low)
        curve[m - 1] = values[right - 1] + share * (values[right] - values[right - 1])
    falling: Tensor = curve.flip(0).cummax(0).values.flip(0)  # a measured rise is taken as noise
    return falling.clamp_min(0.0)


def solve(curves: Tensor, total: int) -> list[int]:
    """min sum_l curves[l, M_l - 1] over 1 <= M_l <= N with sum_l M_l = total, by dynamic programming over layers.

    curves [L, N], inf for a budget that is not allowed. If no allocation has that sum, the best with a smaller sum.
    Ties go to the smaller budget in the later layer.
    """
    layers, n = curves.shape
    if total < layers:
        raise ValueError(f"{total} experts for {layers} layers: every layer needs at least one")
    total = min(total, layers * n)
    best = torch.full((total + 1,), torch.inf, dtype=torch.float64)  # by experts spent so far
    best[0] = 0.0
    choices = []
    for layer in range(layers):
        options = torch.full((n, total + 1), torch.inf, dtype=torch.float64)
        for m in range(1, min(n, total) + 1):
            options[m - 1, m:] = best[: total + 1 - m] + curves[layer, m - 1]
        best, chosen = options.min(0)
        choices.append(chosen + 1)
    left = total if best[total] < torch.inf else int(best.argmin())
    budgets = []
    for chosen in reversed(choices):
        budgets.append(int(chosen[left]))
        left -= budgets[-1]
    return budgets[::-1]


def rounded(values: Tensor, total: int) -> list[int]:
    """Real numbers [L] of at least 1 -> integers that add up to `total`, largest remainders rounded up first."""
    low = values.floor().long().clamp_min(1)
    order = (values - low).sort(descending=True, stable=True).indices.tolist()
    short = total - int(low.sum())
    step = 1 if short > 0 else -1
    budgets: list[int] = low.tolist()
    queue = order if step > 0 else order[::-1]
    while short:
        for layer in queue:
            if short and budgets[layer] + step >= 1:
                budgets[layer] += step
                short -= step
    return budgets


def table(solved: Mapping[int, Sequence[int]], union: Sequence[int], experts: int) -> Tensor:
    """Budgets for some averages -> for every average 1 to N, int64 [L, N]: linear between them, rounded to the total.

    `union` [L] is the most that a layer can use. From the first average that covers all unions on, budgets are N.
    """
    layers = len(union)
    enough = max(2, min(experts, -(-sum(union) // layers)))
    points = {1: [1] * layers, enough: list(union)} | {m: list(b) for m, b in solved.items() if 1 < m < enough}
    averages = sorted(points)
    out = torch.full((layers, experts), experts, dtype=torch.int64)
    for m in range(1, enough):
        right = next(i for i in range(1, len(averages)) if averages[i] >= m)
        low, high = averages[right - 1], averages[right]
        a, b = (torch.tensor(points[x], dtype=torch.float64) for x in (low, high))
        out[:, m - 1] = torch.tensor(rounded(a + (m - low) / (high - low) * (b - a), layers * m))
    return out
