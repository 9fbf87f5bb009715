"""Search for the setting of a method that fetches a target number of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.evaluate.sweep import Sweep
from moebudget.evaluate.text import TextResult, evaluate_text

ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Match:
    """A policy, the experts it fetches per layer per step, and its loss on the windows of the search."""

    policy: Policy
    fetched: float
    loss: float


def match_fetched(
    model: nn.Module,
    sweeps: Sequence[Sweep],
    stats: Stats | None,
    windows: Tensor,
    target: float,
    *,
    tolerance: float = 0.5,
    batch: int = 16,
) -> Match:
    """The policy of the sweeps with the lowest loss among those that fetch `target` experts to within `tolerance`.

    Every sweep is searched separately: a grid, then bisection between neighbours on either side of the target. Use
    other windows for the comparison, because the loss on these chooses the setting. If no setting is within the
    tolerance, the closest count wins; `fetched` shows it.
    """
    measured: dict[str, Match] = {}

    def measure(policies: Sequence[Policy]) -> list[Match]:
        new = list({p.name: p for p in policies if p.name not in measured}.values())
        for result in evaluate_text(model, new, stats, windows, batch=batch, quiet=True) if new else ():
            measured[result.policy.name] = _match(result)
        return [measured[p.name] for p in policies]

    for sweep in sweeps:
        values = sweep.grid()
        counts = [m.fetched for m in measure([sweep.policy(v) for v in values])]
        for low, high, before, after in zip(values, values[1:], counts, counts[1:], strict=False):
            if (before - target) * (after - target) <= 0:
                _bisect(sweep, low, high, before < after, target, tolerance, measure)
    close = [m for m in measured.values() if abs(m.fetched - target) <= tolerance]
    return min(close, key=lambda m: m.loss) if close else min(measured.values(), key=lambda m: abs(m.fetched - target))


def _bisect(
    sweep: Sweep, low: float, high: float, rising: bool, target: float, tolerance: float, measure: object
) -> None:
    assert callable(measure)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if sweep.whole:
            middle = float(int(middle))
            if middle in (low, high):
                return
        (match,) = measure([sweep.policy(middle)])
        if not sweep.whole and abs(match.fetched - target) <= tolerance / 5:
            return
        if (match.fetched < target) == rising:
            low = middle
        else:
            high = middle


def _match(result: TextResult) -> Match:
    return Match(result.policy, result.counters.fetched, float(result.nll.mean()))
