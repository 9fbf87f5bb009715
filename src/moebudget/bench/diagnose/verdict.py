"""Verdict on a budget, in words: the price of an expert on the line of step times against the memory's price."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moebudget.bench.diagnose.roofline import Roofline
from moebudget.bench.line import Line

Answer = Literal["will help", "will not help", "cannot tell"]
LEAST_GAIN = 1.05  # a smaller speedup is not worth a change of the model's outputs
CLOSE = 0.5  # a step is bound by expert bytes if an expert costs at least this share of the memory's price
ROWS_PER_EXPERT = 8  # mean rows routed to an expert, above which a budget below KEPT of the experts re-routes too much
KEPT = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, its reason, and the expected ratio of step times with half of its 95 % interval (if it helps)."""

    answer: Answer
    reason: str
    speedup: float | None = None
    speedup_half: float | None = None


def judge(line: Line, shape: Roofline, *, batch: int, union: float, budget: int, gb_s: float) -> Verdict:
    """Whether a budget below `union` experts per layer makes a step of `batch` rows faster, and why or why not."""
    early = judge_shape(shape, batch=batch, union=union, budget=budget)
    if early is not None:
        return early
    price, (gain, half) = shape.expert_ms(gb_s), line.gain(union, budget)
    low, high = gain - half, gain + half
    cost = f"one more expert in every layer costs {line.b:.4f} ± {line.b_half:.4f} ms (reading it: {price:.4f} ms)"
    if line.b + line.b_half < CLOSE * price or line.b + line.b_half <= 0:
        return Verdict(
            "will not help",
            f"{cost}: the step is bound by something else (launches, the host, arithmetic), so fetching fewer experts "
            "saves little; capture CUDA graphs or profile the step first",
        )
    rest = line.at(union) - price * (union - budget)  # of the step, if each expert left out saves the time to read it
    most_gain = min(high, line.at(union) / rest if rest > 0 else math.inf)
    if line.b - line.b_half <= 0 and most_gain < LEAST_GAIN:
        return Verdict(
            "will not help",
            f"{cost}: fetching fewer makes no measurable difference, at most {most_gain:.2f} times faster; "
            "the step is bound by something else (launches, the host, arithmetic)",
        )
    if line.b - line.b_half <= 0:
        return Verdict(
            "cannot tell",
            f"{cost}: the times scatter too much; repeat on an idle machine, with more steps (--steps)",
        )
    most = window(line, union)
    if high < LEAST_GAIN:
        lower = f"a budget of at most {most} would be {LEAST_GAIN:g} times faster" if most else "no budget helps"
        return Verdict(
            "will not help",
            f"{cost}, but {line.a:.2f} ms of the {line.at(union):.2f} do not depend on experts: at most {high:.2f} "
            f"times faster; {lower}",
        )
    crowded = too_many_rows(shape, batch=batch, budget=budget, gain=gain)
    if crowded is not None:
        return crowded
    if low < LEAST_GAIN:
        return Verdict(
            "cannot tell",
            f"{cost}: {gain:.2f} ± {half:.2f} times faster; repeat with more steps (--steps)",
            gain,
            half,
        )
    return Verdict(
        "will help",
        f"{cost}; with {budget} instead of {union:.1f} experts per layer a step is {gain:.2f} ± {half:.2f} times "
        f"faster; with budgets up to {most} at least {LEAST_GAIN:g} times",
        gain,
        half,
    )


def window(line: Line, union: float) -> int | None:
    """The largest budget below the union whose speedup is LEAST_GAIN by the interval's lower end; None if none is."""
    for budget in range(math.ceil(union) - 1, 0, -1):
        gain, half = line.gain(union, budget)
        if gain - half >= LEAST_GAIN:
            return budget
    return None


def judge_shape(shape: Roofline, *, batch: int, union: float, budget: int) -> Verdict | None:
    """The verdict if it follows from the shape and the union alone, else None."""
    if batch == 1:
        return Verdict(
            "will not help",
            f"one row fetches only its {shape.top_k} native experts; serve several requests at a time",
        )
    if union <= shape.top_k + 0.5:
        return Verdict(
            "will not help",
            f"{batch} rows fetch {union:.1f} experts per layer, hardly more than the {shape.top_k} routes of a row: "
            "no budget helps; serve requests that differ more, or more of them",
        )
    if union <= budget:
        return Verdict(
            "will not help",
            f"{batch} rows fetch {union:.1f} experts per layer, which the budget of {budget} does not limit; lower it",
        )
    return None


def too_many_rows(shape: Roofline, *, batch: int, budget: int, gain: float) -> Verdict | None:
    """The verdict for a batch that uses all experts many times, where a budget costs too much quality; else None."""
    rows_per_expert = batch * shape.top_k / shape.experts
    if rows_per_expert <= ROWS_PER_EXPERT or budget >= KEPT * shape.experts:
        return None
    return Verdict(
        "will not help",
        f"the batch is too large: {batch} rows route to each of the {shape.experts} experts {rows_per_expert:.0f} "
        f"times on average, and a budget of {budget} keeps {budget / shape.experts:.0%} of the routes if loads are "
        f"equal; a step would be {gain:.2f} times faster, but most tokens would be re-routed; use fewer rows per "
        f"step, or a budget of at least {math.ceil(KEPT * shape.experts)}",
    )
