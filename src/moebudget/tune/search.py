"""Search with few evaluations for the cheapest policy within a quality bound, or the best at a number of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from moebudget.core.policy import Policy
from moebudget.core.stats import ModelFacts
from moebudget.evaluate.sweep import Sweep, caps, sweep_of
from moebudget.methods.registry import parse
from moebudget.tune.ledger import Ledger, Row
from moebudget.tune.target import BY_QUALITY, Target, upper

DEFAULTS = ("base:fill=geometric", "base", "spread")
CONFIRMATIONS = 3  # settings of a sweep that are tried on the confirming samples
GUESSES = 5  # evaluations of a sweep after which the search bisects
SLACK = 1.02  # factor on fetched experts on other text, for rules whose count depends on the text


@dataclass(frozen=True, slots=True)
class Answer:
    """The chosen policy with its rows on the searching and the confirming samples; or the reason for having none."""

    policy: Policy | None
    reason: str
    searched: Row | None = None
    confirmed: Row | None = None
    tried: int = 0


def defaults(held: Collection[str], facts: ModelFacts) -> list[str]:
    """Policies that are searched by default: those whose statistics are among `held`."""
    usable = [text for text in DEFAULTS for s in sweeps_of([text], facts) if s.policy(s.high).needs <= set(held)]
    return [*(usable or ["squared"]), "oea"]


def sweeps_of(texts: Sequence[str], facts: ModelFacts) -> list[Sweep]:
    """The sweeps of policy strings with a free number. Raises ValueError for a policy that tune cannot search."""
    sweeps = []
    for text in texts:
        sweep = sweep_of(text, facts)
        if (parse(text) if sweep is None else sweep.policy(sweep.high)).needs_energy:
            raise ValueError(f"{text!r} reads the true output energies of a step, which only analysis has; use base")
        if sweep is None:
            policy = parse(text)
            sweeps.append(Sweep(policy.name, 0, 0, whole=True))
        elif not sweep.whole:
            raise ValueError(
                f"tune searches whole numbers, and the free number of {text!r} is not one; give its value, or use "
                "`moebudget compare`"
            )
        elif not sweep.tunable.rises:
            raise ValueError(
                f"tune searches numbers that raise the fetched experts, and the free number of {text!r} lowers them; "
                "use `moebudget compare`"
            )
        else:
            sweeps.append(sweep)
    return sweeps


class Search:
    """Search for candidates among several sweeps on one set of samples; all rows come from the ledger."""

    def __init__(self, sweeps: Sequence[Sweep], ledger: Ledger, target: Target, say: Callable[[str], None]) -> None:
        self.sweeps, self.ledger, self.target, self.say = sweeps, ledger, target, say
        self.native = ledger.get([parse("native")])[0]["native_union"]

    def row(self, sweep: Sweep, value: float) -> Row:
        """The row of the sweep's policy at this value."""
        (row,) = self.ledger.get([sweep.policy(value)])
        return row

    def by_experts(self, count: float) -> list[tuple[Sweep, int, Row]]:
        """Each sweep's largest setting that fetches at most `count`, the lowest loss first."""
        candidates = []
        for sweep in self.sweeps:
            low, high = int(sweep.low) - 1, int(sweep.high) + 1  # low meets the count, high does not
            best: tuple[Sweep, int, Row] | None = None
            if caps(sweep) and sweep.high > sweep.low:
                low = min(int(count), int(sweep.high))
                best, high = (sweep, low, self.row(sweep, low)), low + 1
            while high - low > 1:
                middle = (low + high) // 2
                row = self.row(sweep, middle)
                if row["fetched"] <= count:
                    low, best = middle, (sweep, middle, row)
                else:
                    high = middle
            if best is not None:
                candidates.append(best)
                self._say(best[2])
            else:
                self.say(
                    f"{sweep.template.replace('{}', str(int(sweep.low)))} fetches more than {count:.2f} per layer"
                )
        return sorted(candidates, key=lambda candidate: candidate[2]["nll"])

    def by_quality(self) -> list[tuple[Sweep, int, Row]]:
        """Settings within the bound, fewest experts first: the best of each sweep that improves on the last one."""
        chain: list[tuple[Sweep, int, Row]] = []
        for sweep in self.sweeps:
            best = self._least(sweep, chain[-1][2]["fetched"] if chain else self.native)
            chain += [] if best is None else [best]
        return chain[::-1]

    def _least(self, sweep: Sweep, most: float) -> tuple[Sweep, int, Row] | None:
        """Bisect one sweep for the fewest experts below `most` whose interval stays within the bound.

        Between two settings with a known loss, the next one is where the logarithm of the loss would cross the bound.
        """
        low, high = int(sweep.low) - 1, int(sweep.high) + 1  # low fails the bound; high fetches too much, or is best
        if caps(sweep):
            high = min(high, math.ceil(most))
        ends: dict[int, float] = {}
        best: tuple[Sweep, int, Row] | None = None
        stride = (
            1 if most < self.native and caps(sweep) else 0
        )  # steps down from the best of another sweep: 1, 2, 4, ...
        while high - low > 1:
            if stride and low not in ends:
                value, stride = max(low + 1, high - stride), 2 * stride
            else:
                value = _between(low, high, ends if len(ends) < GUESSES else {}, self.target.bound)
            row = self.row(sweep, value)
            self._say(row)
            ends[value] = upper(row, self.target.kind)
            within = ends[value] <= self.target.bound
            if within and row["fetched"] < most:
                best = (sweep, value, row)
            if within:
                high = value
            elif row["fetched"] >= most:
                break  # a setting that fetches less loses more
            else:
                low = value
        return best

    def _say(self, row: Row) -> None:
        kind = "task" if self.target.kind == "task" else "loss"
        unit = "points of task accuracy lost" if kind == "task" else "loss increase over native"
        mean, end = row["task_delta" if kind == "task" else "nll_delta"], upper(row, kind)
        most = f", at most {end:.3f} at 95 %" if end < math.inf else ""
        self.say(f"  {row['policy']}: {row['fetched']:.1f} experts per layer, {unit} {mean:.3f}{most}")


def _between(low: int, high: int, ends: dict[int, float], bound: float) -> int:
    """The middle; or, with two known losses, where a line through their logarithms crosses the bound."""
    below = [v for v in ends if v < low and ends[v] > ends.get(low, math.inf)]
    second = high if ends.get(high, 0) > 0 else max(below, default=None)
    if low not in ends or second is None or ends[second] == ends[low]:
        return (low + high) // 2
    step = math.log(bound / ends[low]) / math.log(ends[second] / ends[low]) * (second - low)
    return min(high - 1, max(low + 1, math.ceil(low + step)))


def confirm(
    candidates: Sequence[tuple[Sweep, int, Row]],
    ledger: Ledger,
    target: Target,
    count: float,
    say: Callable[[str], None],
) -> Answer:
    """The first candidate that meets the target on the samples of `ledger`, which the search has not seen.

    For a quality bound, the next larger settings of a failed candidate are tried before the next candidate.
    """
    tried = 0
    quality = target.kind in BY_QUALITY
    reason = ""
    for sweep, value, row in candidates:
        for step in range(CONFIRMATIONS if quality and sweep.high > sweep.low else 1):
            if value + step > sweep.high or tried >= CONFIRMATIONS:
                break
            policy = sweep.policy(value + step)
            native, confirming = ledger.get([parse("native"), policy])
            tried += 1
            end = upper(confirming, target.kind if quality else "loss")
            if confirming["fetched"] >= native["fetched"]:
                reason = f"{policy} fetches as many experts as native routing"
                break
            if (end <= target.bound) if quality else confirming["fetched"] <= count * SLACK:
                return Answer(policy, "", row, confirming, tried)
            reason = (
                f"{policy} loses up to {end:.3f} at 95 % on samples that the search did not see"
                if quality
                else f"{policy} fetches {confirming['fetched']:.2f} experts on samples that the search did not see"
            )
            say(f"  not confirmed: {reason}")
    return Answer(None, reason, tried=tried)


def evidence(answer: Answer, target: Target, rows: Sequence[Row], extra: dict[str, Any]) -> dict[str, Any]:
    """The evidence that the config holds: the target, the confirming row, and the trail of the search."""
    trail = [
        {
            k: r[k]
            for k in (
                "policy",
                "fetched",
                "nll_delta",
                "nll_delta_low",
                "nll_delta_high",
                "task_delta_high",
                "text_hash",
            )
        }
        for r in rows
    ]
    wanted = {"kind": target.kind, "bound": target.bound, **extra}
    return {"target": wanted, "confirmed": answer.confirmed, "settings_confirmed": answer.tried, "search": trail}
