"""Allocation search: one-layer loss curves, dynamic programming, jointly measured exchanges, and prices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from moebudget.calibrate.allocation.gains import gradient_curves, with_denominators
from moebudget.calibrate.allocation.measure import Trials, loss_curves
from moebudget.calibrate.allocation.solve import rounded, solve, table
from moebudget.core.policy import Policy
from moebudget.core.stats import ModelFacts, Stats
from moebudget.methods.base import base
from moebudget.methods.spread import price

AVERAGES = (4, 6, 8, 10, 13, 16, 20)
ROUNDS = 6  # of exchanges per average
PRICE_STEPS = 8
GAINS = ("measured", "gradient")


def allocate(
    model: nn.Module,
    stats: Stats,
    windows: Tensor,
    *,
    averages: Sequence[int] = AVERAGES,
    batch: int = 16,
    fill: str = "geometric",
    relative: float = 0.0,
    rounds: int = ROUNDS,
    prices: bool = True,
    gains: str = "measured",
    least: int | None = None,
    quiet: bool = False,
) -> Stats:
    """Add `layer_budget` [L, N] and, with `prices`, `layer_price` [L, N] to the statistics, for `spread` and `price`.

    A step's time is linear in the experts fetched over all layers, so budgets minimise the loss for a given sum. The
    loss of windows [n, S + 1] is measured in decode mode, `batch` rows per step, with one layer restricted at a time;
    the sum of these curves is minimised for each of `averages`. One-layer losses do not add up, so the solution is
    compared jointly with equal budgets and with the midpoint of the two, and the best is refined by `rounds` exchanges
    between layers, each measured jointly. Budgets of other averages are interpolated linearly. `gains="gradient"`
    replaces the one-layer losses by gradients of one backward pass. The fill `by_layer` uses, in each layer, the
    denominator with the smallest loss (statistic `layer_fill`). At `averages`, no layer gets fewer than `least`
    experts (None: half of top-k, which costs nothing on the text and preserves tasks that the text does not cover).

    Raises ValueError for impossible averages, too little text, `rounds` below 0, `least` above an average, or unknown
    `gains`.
    """
    experts, layers = stats.facts.experts, len(stats.facts.layers)
    averages, least = checked(averages, stats.facts, least)
    if len(windows) < batch:
        raise ValueError(f"{len(windows)} windows of text for a batch of {batch}: give more text or a smaller batch")
    if rounds < 0:
        raise ValueError(f"rounds={rounds} must be at least 0")
    if gains not in GAINS:
        raise ValueError(f"gains={gains!r} is unknown; known: {', '.join(GAINS)}")
    if gains == "gradient" and fill == "by_layer":
        raise ValueError("fill='by_layer' chooses by one-layer losses, which gains='gradient' does not measure")
    console = Console(stderr=True, quiet=quiet)
    by_layer = fill == "by_layer"
    trials = Trials(model, base(1, "native" if by_layer else fill, relative), stats, windows, batch=batch)
    (native,) = trials.measure([[experts] * layers])
    union = [min(experts, math.ceil(u)) for u in native.fetched.tolist()]
    if by_layer:
        trials, curves = with_denominators(trials, native, union, relative)
    else:
        curves = gradient_curves(trials, union) if gains == "gradient" else loss_curves(trials, native, union, experts)
    console.print(f"gains of {layers} layers: {trials.count} passes over {len(windows)} windows")
    solved, report = dict[int, list[int]](), dict[str, Any]()
    for average in averages:
        if sum(union) <= layers * average:
            break
        first = solve(capped(curves, union, least), layers * average)
        starts = [first, [average] * layers, middle(first, average)]
        budgets, losses = refine(lambda v: [m.mean for m in trials.measure(v)], starts, union, rounds, least)
        solved[average] = budgets
        report[str(average)] = {
            "budgets": budgets,
            "loss_over_native": round(losses[-1] - native.mean, 5),
            "one_layer_solution": first,
            "one_layer_solution_loss": round(losses[0] - native.mean, 5),
            "equal_loss": round(losses[1] - native.mean, 5),
        }
        console.print(
            f"{average} per layer: {budgets}, +{losses[-1] - native.mean:.4f} (equal: +{losses[1] - native.mean:.4f})"
        )
    budgets_table = table(solved, union, experts)
    tensors = {"layer_budget": budgets_table}
    tensors |= {name: t for name, t in trials.stats.tensors.items() if name == "layer_fill"}
    if prices:
        tensors["layer_price"], fetched = price_table(trials, budgets_table, sorted(solved), fill, relative)
        for average, count in fetched.items():
            report[str(average)]["price_fetches"] = round(count, 3)
    info = {
        "batch": batch, "fill": fill, "relative": relative, "gains": gains, "least": least, "windows": len(windows),
        "window": windows.shape[1] - 1, "passes": trials.count, "native_loss": round(native.mean, 5), "union": union,
        "averages": report,
    }  # fmt: skip
    return dataclasses.replace(stats, tensors={**stats.tensors, **tensors}, info={**stats.info, "allocation": info})


def checked(averages: Sequence[int], facts: ModelFacts, least: int | None) -> tuple[list[int], int]:
    """The averages in order and the fewest experts per layer; ValueError if there are none or one is impossible."""
    averages, experts = sorted(set(averages)), facts.experts
    if not averages or averages[0] < 1 or averages[-1] > experts:
        raise ValueError(f"averages={averages} must be between 1 and the model's {experts} experts")
    if least is None:
        least = max(1, min(facts.top_k // 2, averages[0]))
    if not 1 <= least <= averages[0]:
        raise ValueError(f"least={least} experts per layer must be between 1 and the smallest average, {averages[0]}")
    return averages, least


def capped(curves: Tensor, union: Sequence[int], least: int = 1) -> Tensor:
    """The curves [L, N], with inf for budgets above the layer's union, which gain nothing, and those below `least`."""
    budgets, most = torch.arange(1, curves.shape[1] + 1), torch.tensor(union)[:, None]
    return curves.masked_fill((budgets > most) | (budgets < most.clamp_max(least)), torch.inf)


def middle(budgets: Sequence[int], average: int) -> list[int]:
    """Budgets halfway between these and equal ones, with the same sum."""
    return rounded((torch.tensor(budgets, dtype=torch.float64) + average) / 2, sum(budgets))


def refine(
    losses: Callable[[list[list[int]]], list[float]],
    starts: list[list[int]],
    most: Sequence[int],
    rounds: int,
    least: int = 1,
) -> tuple[list[int], list[float]]:
    """Refine the best of `starts` by exchanges between layers -> budgets, and losses of the starts and of the budgets.

    A round measures every layer with s experts more and with s fewer. It moves s experts from the layers that lose
    least to those that gain most, as long as the two measured changes add up to a gain. It keeps the move (all such
    pairs, or the best pair) if the joint loss falls, and else halves s, which starts at a quarter of the mean.
    """
    start_losses = losses(starts)
    budgets, best = starts[min(range(len(starts)), key=start_losses.__getitem__)], min(start_losses)
    step = max(1, sum(budgets) // len(budgets) // 4)
    for _ in range(rounds):
        moves = exchanges(losses, budgets, best, step, most, least)
        tried = losses(moves) if moves else []
        if tried and min(tried) < best:
            best = min(tried)
            budgets = moves[tried.index(best)]
        elif step == 1:
            break
        else:
            step //= 2
    return budgets, [*start_losses, best]


def exchanges(
    losses: Callable[[list[list[int]]], list[float]],
    budgets: list[int],
    now: float,
    step: int,
    most: Sequence[int],
    least: int = 1,
) -> list[list[int]]:
    """Budgets after the promising exchanges of `step` experts: all disjoint pairs at once, and the best pair alone."""
    layers = range(len(budgets))

    def moved(*changes: tuple[int, int]) -> list[int]:
        out = list(budgets)
        for layer, change in changes:
            out[layer] += change
        return out

    givers = [i for i in layers if budgets[i] - step >= least]
    takers = [i for i in layers if budgets[i] + step <= most[i]]
    changed = losses([*(moved((i, -step)) for i in givers), *(moved((i, step)) for i in takers)])
    lose = sorted(zip((x - now for x in changed[: len(givers)]), givers, strict=True))
    gain = sorted(zip((x - now for x in changed[len(givers) :]), takers, strict=True))
    pairs, taken = list[tuple[int, int]](), set[int]()
    for win, taker in gain:
        giver = next(((loss, i) for loss, i in lose if i not in taken and i != taker), None)
        if taker in taken or giver is None or win + giver[0] >= 0:
            continue
        pairs.append((taker, giver[1]))
        taken |= {taker, giver[1]}
    changes = [[(taker, step), (giver, -step)] for taker, giver in pairs]
    every = [change for pair in changes for change in pair]
    return [moved(*every), *([moved(*changes[0])] if len(changes) > 1 else [])] if changes else []


def price_table(
    trials: Trials, budgets: Tensor, averages: Sequence[int], fill: str, relative: float
) -> tuple[Tensor, dict[int, float]]:
    """Removal cost above which a layer fetches an expert, float32 [L, N], and experts fetched per layer at `averages`.

    It starts from the cost that M_l experts per step exceed on average, M_l the layer's budget: mu / g_l. One factor
    (the price) then scales all layers' costs until the measured average is the wanted one. Logarithms are linear
    between averages; an unrestricted average (budgets of N) has -inf.
    """
    layers, experts = budgets.shape
    logs, fetched = dict[int, Tensor](), dict[int, float]()
    for average in averages:
        costs = trials.costs(budgets[:, average - 1].tolist())
        start = torch.stack([threshold(c, m) for c, m in zip(costs, budgets[:, average - 1].tolist(), strict=True)])
        logs[average], fetched[average] = scale_price(trials, start.log(), average, fill, relative)
    out = torch.full((layers, experts), -torch.inf)
    if not logs:
        return out, fetched
    restricted = int((budgets < experts).any(0).sum())  # averages 1 to this one are restricted
    for m in range(1, restricted + 1):
        low = max((a for a in logs if a <= m), default=min(logs))
        high = min((a for a in logs if a >= m), default=max(logs))
        share = (m - low) / (high - low) if high > low else 0.0
        out[:, m - 1] = (logs[low] + share * (logs[high] - logs[low])).exp().float()
    return out, fetched


def threshold(costs: Tensor, budget: int) -> Tensor:
    """The cost that `budget` experts per step exceed on average; costs [steps, N]."""
    positive = costs[costs > 0].sort(descending=True).values
    return positive[min(budget * len(costs), len(positive) - 1)]


def scale_price(trials: Trials, start: Tensor, average: int, fill: str, relative: float) -> tuple[Tensor, float]:
    """Log thresholds [L], shifted together so that layers fetch `average` experts; and the count they fetch."""
    policy: Policy = price(1, fill, relative)
    low, high, best = -2.0, 2.0, (math.inf, start, math.nan)
    shift = 0.0
    for _ in range(PRICE_STEPS):
        logs = start + shift
        at = logs.exp().float()[:, None].expand(-1, trials.stats.facts.experts)
        stats = dataclasses.replace(trials.stats, tensors={**trials.stats.tensors, "layer_price": at})
        priced = Trials(trials.model, policy, stats, trials.windows, batch=trials.batch, prefill=trials.prefill)
        (measured,) = priced.measure([[1] * len(start)])
        trials.count += 1
        count = float(measured.fetched.mean())
        best = min(best, (abs(count - average), logs, count), key=lambda b: b[0])
        if abs(count - average) < 0.005 * average:
            break
        low, high = (shift, high) if count > average else (low, shift)
        shift = (low + high) / 2
    return best[1], best[2]
