"""From a line through step times to a verdict: its price of an expert against the memory's, and plain words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from moebudget.bench.line import Line
from moebudget.diagnose.roofline import Roofline

Answer = Literal["will help", "will not help", "cannot tell"]
LEAST_GAIN = 1.05  # below this ratio nothing is worth a change of the model's outputs
CLOSE = 0.5  # the share of the memory's price that an expert must cost before we call a step bound by expert bytes
ROWS_AN_EXPERT = 8  # mean rows that want an expert, above which a budget below KEPT of them re-routes too much
KEPT = 0.5


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, its reason, and the expected ratio of step times with half of its 95 % interval (if it helps)."""

    answer: Answer
    reason: str
    speedup: float | None = None
    speedup_half: float | None = None


def judge(line: Line, shape: Roofline, *, batch: int, union: float, budget: int, gb_s: float) -> Verdict:
    """Whether capping `union` experts a layer at `budget` makes a step of `batch` rows faster, and why or why not."""
    early = judge_shape(shape, batch=batch, union=union, budget=budget)
    if early is not None:
        return early
    price, (gain, half) = shape.expert_ms(gb_s), line.gain(union, budget)
    low, high = gain - half, gain + half
    cost = f"an expert more in every layer costs {line.b:.4f} ± {line.b_half:.4f} ms, reading it {price:.4f}"
    if line.b + line.b_half < CLOSE * price or line.b + line.b_half <= 0:
        return Verdict(
            "will not help",
            f"{cost}: the step is bound by something else (launches, the host, arithmetic), so fetching fewer experts "
            "saves little; capture CUDA graphs or look at a profile first",
        )
    rest = line.at(union) - price * (union - budget)  # of the step, if leaving experts out saves what reading costs
    most_gain = min(high, line.at(union) / rest if rest > 0 else math.inf)
    if line.b - line.b_half <= 0 and most_gain < LEAST_GAIN:
        return Verdict(
            "will not help",
            f"{cost}: fetching fewer makes no difference that can be seen, and {most_gain:.2f} times faster at most; "
            "the step is bound by something else (launches, the host, arithmetic)",
        )
    if line.b - line.b_half <= 0:
        return Verdict(
            "cannot tell",
            f"{cost}: the times scatter too much; repeat on an idle machine, with more steps (--steps)",
        )
    most = window(line, union)
    if high < LEAST_GAIN:
        lower = f"a budget of {most} or fewer would gain {LEAST_GAIN:g}" if most else "the operating window is empty"
        return Verdict(
            "will not help",
            f"{cost}, but {line.a:.2f} ms of the {line.at(union):.2f} do not depend on experts: {high:.2f} times at "
            f"most; {lower}",
        )
    crowded = too_many_rows(shape, batch=batch, budget=budget, gain=gain)
    if crowded is not None:
        return crowded
    if low < LEAST_GAIN:
        return Verdict(
            "cannot tell", f"{cost}: {gain:.2f} ± {half:.2f} times; repeat with more steps (--steps)", gain, half
        )
    return Verdict(
        "will help",
        f"{cost}; from {union:.1f} experts a layer to {budget} a step becomes {gain:.2f} ± {half:.2f} times faster; "
        f"budgets up to {most} gain at least {LEAST_GAIN:g}",
        gain,
        half,
    )


def window(line: Line, union: float) -> int | None:
    """The largest budget below the union with which a step surely becomes LEAST_GAIN times faster; None for none."""
    for budget in range(math.ceil(union) - 1, 0, -1):
        gain, half = line.gain(union, budget)
        if gain - half >= LEAST_GAIN:
            return budget
    return None


def judge_shape(shape: Roofline, *, batch: int, union: float, budget: int) -> Verdict | None:
    """The answers that need no measurement."""
    if batch == 1:
        return Verdict(
            "will not help",
            f"one row fetches its own {shape.top_k} experts and no others; serve several requests at a time",
        )
    if union <= shape.top_k + 0.5:
        return Verdict(
            "will not help",
            f"{batch} rows fetch {union:.1f} experts a layer, hardly more than the {shape.top_k} that each of them "
            "wants: the operating window is empty; serve requests that differ more, or more of them",
        )
    if union <= budget:
        return Verdict(
            "will not help",
            f"{batch} rows fetch {union:.1f} experts a layer, no more than the budget of {budget}; lower the budget",
        )
    return None


def too_many_rows(shape: Roofline, *, batch: int, budget: int, gain: float) -> Verdict | None:
    """The answer for a batch that wants all experts many times: time falls, and quality pays. No speedup."""
    wanted = batch * shape.top_k / shape.experts
    if wanted <= ROWS_AN_EXPERT or budget >= KEPT * shape.experts:
        return None
    return Verdict(
        "will not help",
        f"too large a batch: {batch} rows want each of the {shape.experts} experts {wanted:.0f} times on average, and "
        f"a budget of {budget} keeps {budget / shape.experts:.0%} of the routes if loads are equal; a step would be "
        f"{gain:.2f} times faster, of a model whose tokens are mostly re-routed; take fewer rows a step, or a budget "
        f"of {math.ceil(KEPT * shape.experts)} and more",
    )
