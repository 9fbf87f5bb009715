"""allocate(): one-layer loss curves, dynamic programming, exchanges measured jointly, then one price."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from moebudget.allocate.gains import gradient_curves, with_denominators
from moebudget.allocate.measure import Trials, loss_curves
from moebudget.allocate.solve import rounded, solve, table
from moebudget.policy import Policy
from moebudget.presets import base, price
from moebudget.stats import ModelFacts, Stats

AVERAGES = (4, 6, 8, 10, 13, 16, 20)
ROUNDS = 6  # of exchanges an average
PRICE_STEPS = 8
GAINS = ("measured", "gradient")


def allocate(
    model: nn.Module,
    stats: Stats,
    windows: Tensor,
    *,
    averages: Sequence[int] = AVERAGES,
    batch: int = 16,
    fill: str = "half",
    relative: float = 0.0,
    rounds: int = ROUNDS,
    prices: bool = True,
    gains: str = "measured",
    least: int | None = None,
    quiet: bool = False,
) -> Stats:
    """The statistics with `layer_budget` and, with `prices`, `layer_price` [L, N]: what `spread` and `price` read.

    A step's time is linear in the experts fetched over all layers, so budgets minimise the loss for a given sum. The
    loss of windows [n, S + 1] is measured in decode mode, `batch` rows a step, with one layer restricted at a time;
    the sum of these curves is minimised for each of `averages`. One-layer losses do not add up, so the solution is
    compared jointly with equal budgets and with the middle of the two, and `rounds` exchanges between layers, each
    measured jointly, refine the best. Other averages lie linearly between. `gains="gradient"` starts from the
    gradients of one backward pass instead of the one-layer losses. The fill `by_layer` takes, in each layer, the
    denominator that loses least there (statistic `layer_fill`). At these averages no layer gets fewer than `least`
    experts; None: half of a token's, which costs nothing on the text and keeps tasks that the text does not show.

    Raises ValueError for bad averages, too little text, a number of `rounds` below 0, `least` above an average, or
    other `gains`.
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
    trials = Trials(model, base(1, "original" if by_layer else fill, relative), stats, windows, batch=batch)
    (dense,) = trials.measure([[experts] * layers])
    union = [min(experts, math.ceil(u)) for u in dense.fetched.tolist()]
    if by_layer:
        trials, curves = with_denominators(trials, dense, union, relative)
    else:
        curves = gradient_curves(trials, union) if gains == "gradient" else loss_curves(trials, dense, union, experts)
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
            "loss_above_dense": round(losses[-1] - dense.mean, 5),
            "one_layer_solution": first,
            "one_layer_solution_loss": round(losses[0] - dense.mean, 5),
            "equal_loss": round(losses[1] - dense.mean, 5),
        }
        console.print(
            f"{average} a layer: {budgets}, +{losses[-1] - dense.mean:.4f} (equal: +{losses[1] - dense.mean:.4f})"
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
        "window": windows.shape[1] - 1, "passes": trials.count, "dense_loss": round(dense.mean, 5), "union": union,
        "averages": report,
    }  # fmt: skip
    return dataclasses.replace(stats, tensors={**stats.tensors, **tensors}, info={**stats.info, "allocation": info})


def checked(averages: Sequence[int], facts: ModelFacts, least: int | None) -> tuple[list[int], int]:
    """The averages in order and the fewest experts of a layer; ValueError if no or an impossible average is left."""
    averages, experts = sorted(set(averages)), facts.experts
    if not averages or averages[0] < 1 or averages[-1] > experts:
        raise ValueError(f"averages={averages} must lie between 1 and the model's {experts} experts")
    if least is None:
        least = max(1, min(facts.top_k // 2, averages[0]))
    if not 1 <= least <= averages[0]:
        raise ValueError(f"least={least} experts a layer must lie between 1 and the smallest average, {averages[0]}")
    return averages, least


def capped(curves: Tensor, union: Sequence[int], least: int = 1) -> Tensor:
    """The curves [L, N] without budgets above the layer's union, which buy nothing, and those below `least`."""
    budgets, most = torch.arange(1, curves.shape[1] + 1), torch.tensor(union)[:, None]
    return curves.masked_fill((budgets > most) | (budgets < most.clamp_max(least)), torch.inf)


def middle(budgets: Sequence[int], average: int) -> list[int]:
    """Halfway between these budgets and equal ones, with the same sum."""
    return rounded((torch.tensor(budgets, dtype=torch.float64) + average) / 2, sum(budgets))


def refine(
    losses: Callable[[list[list[int]]], list[float]],
    starts: list[list[int]],
    most: Sequence[int],
    rounds: int,
    least: int = 1,
) -> tuple[list[int], list[float]]:
    """Exchanges between layers from the best of `starts` -> budgets, and the losses of the starts and the last one.

    A round measures every layer with s experts more and with s fewer, moves s from layers that miss them least to
    layers that gain most while the sum of the two measured changes falls, and keeps the move (all such pairs, or the
    best one) if it lowers the joint loss. s starts at a quarter of the mean and is halved when no move does.
    """
    found = losses(starts)
    budgets, best = starts[min(range(len(starts)), key=found.__getitem__)], min(found)
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
    return budgets, [*found, best]


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
    found = losses([*(moved((i, -step)) for i in givers), *(moved((i, step)) for i in takers)])
    lose = sorted(zip((x - now for x in found[: len(givers)]), givers, strict=True))
    gain = sorted(zip((x - now for x in found[len(givers) :]), takers, strict=True))
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
    """Removal cost above which a layer fetches an expert, float32 [L, N], and what it fetches at `averages`.

    With the layer's budget M_l, the cost that M_l experts a step exceed on average: mu / g_l. All layers' costs are
    then scaled by one factor (the price) until the measured average is the wanted one. Between the averages the
    logarithm is linear; where budgets are N it is -inf.
    """
    layers, experts = budgets.shape
    known, fetched = dict[int, Tensor](), dict[int, float]()
    for average in averages:
        costs = trials.costs(budgets[:, average - 1].tolist())
        start = torch.stack([threshold(c, m) for c, m in zip(costs, budgets[:, average - 1].tolist(), strict=True)])
        known[average], fetched[average] = scale_price(trials, start.log(), average, fill, relative)
    out = torch.full((layers, experts), -torch.inf)
    if not known:
        return out, fetched
    free = int((budgets < experts).any(0).sum())  # averages 1 to free are restricted
    for m in range(1, free + 1):
        low = max((a for a in known if a <= m), default=min(known))
        high = min((a for a in known if a >= m), default=max(known))
        share = (m - low) / (high - low) if high > low else 0.0
        out[:, m - 1] = (known[low] + share * (known[high] - known[low])).exp().float()
    return out, fetched


def threshold(costs: Tensor, budget: int) -> Tensor:
    """The cost that `budget` experts a step exceed on average; costs [steps, N]."""
    some = costs[costs > 0].sort(descending=True).values
    return some[min(budget * len(costs), len(some) - 1)]


def scale_price(trials: Trials, start: Tensor, average: int, fill: str, relative: float) -> tuple[Tensor, float]:
    """Log thresholds [L] shifted by one number so that `average` experts are fetched; and what is fetched."""
    policy: Policy = price(1, fill, relative)
    low, high, best = -2.0, 2.0, (math.inf, start, math.nan)
    shift = 0.0
    for _ in range(PRICE_STEPS):
        logs = start + shift
        at = logs.exp().float()[:, None].expand(-1, trials.stats.facts.experts)
        stats = dataclasses.replace(trials.stats, tensors={**trials.stats.tensors, "layer_price": at})
        one = Trials(trials.model, policy, stats, trials.windows, batch=trials.batch, prefill=trials.prefill)
        (found,) = one.measure([[1] * len(start)])
        trials.count += 1
        count = float(found.fetched.mean())
        best = min(best, (abs(count - average), logs, count), key=lambda b: b[0])
        if abs(count - average) < 0.005 * average:
            break
        low, high = (shift, high) if count > average else (low, shift)
        shift = (low + high) / 2
    return best[1], best[2]
