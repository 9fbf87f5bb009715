"""Few evaluations to the cheapest policy within a quality bound, or to the best within a number of experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from moebudget.evaluate.families import caps, family
from moebudget.evaluate.match import Family
from moebudget.policy import Policy
from moebudget.presets import parse
from moebudget.stats import ModelFacts
from moebudget.tune.ledger import Ledger, Row
from moebudget.tune.target import BY_QUALITY, Target, upper

DEFAULTS = ("base:fill=half", "base", "spread")
CONFIRMATIONS = 3  # settings that are tried on the other half of the samples
GUESSES = 5  # evaluations of a family after which the bracket is halved
SLACK = 1.02  # of fetched experts on other text, for rules whose count depends on it


@dataclass(frozen=True, slots=True)
class Answer:
    """The chosen policy's rows on the samples of the search and on those that confirm it; or why there is none."""

    policy: Policy | None
    reason: str
    searched: Row | None = None
    confirmed: Row | None = None
    tried: int = 0


def defaults(held: Collection[str], facts: ModelFacts) -> list[str]:
    """Policies that are searched when none are named: those whose statistics are among `held`."""
    found = [text for text in DEFAULTS for f in families_of([text], facts) if f.policy(f.high).needs <= set(held)]
    return [*(found or ["squared"]), "oea"]


def families_of(texts: Sequence[str], facts: ModelFacts) -> list[Family]:
    """The families of policies as a user spells them. ValueError for one that tune cannot search."""
    found = []
    for text in texts:
        one = family(text, facts)
        if (parse(text) if one is None else one.policy(one.high)).needs_energy:
            raise ValueError(f"{text!r} needs the true output energies of a step, which only analysis has; use base")
        if one is None:
            policy = parse(text)
            found.append(Family(policy.name, 0, 0, whole=True))
        elif not one.whole:
            raise ValueError(
                f"tune searches whole numbers, and the free number of {text!r} is none; give its value, or see "
                "`moebudget compare`"
            )
        elif one.template.startswith("lynx_lat"):
            raise ValueError("tune searches numbers with which the fetched experts rise; lynx_lat's falls")
        else:
            found.append(one)
    return found


class Search:
    """Candidates of several families on one set of samples; all rows come from the ledger."""

    def __init__(self, families: Sequence[Family], ledger: Ledger, target: Target, say: Callable[[str], None]) -> None:
        self.families, self.ledger, self.target, self.say = families, ledger, target, say
        self.native = ledger.get([parse("dense")])[0]["native_union"]

    def row(self, found: Family, value: float) -> Row:
        (row,) = self.ledger.get([found.policy(value)])
        return row

    def by_experts(self, count: float) -> list[tuple[Family, int, Row]]:
        """Each family's largest setting that fetches at most `count`, the lowest loss first."""
        found = []
        for one in self.families:
            low, high = int(one.low) - 1, int(one.high) + 1  # low meets the count, high does not
            best: tuple[Family, int, Row] | None = None
            if caps(one) and one.high > one.low:
                low = min(int(count), int(one.high))
                best, high = (one, low, self.row(one, low)), low + 1
            while high - low > 1:
                middle = (low + high) // 2
                row = self.row(one, middle)
                if row["fetched"] <= count:
                    low, best = middle, (one, middle, row)
                else:
                    high = middle
            if best is not None:
                found.append(best)
                self._say(best[2])
            else:
                self.say(f"{one.template.replace('{}', str(int(one.low)))} fetches more than {count:.2f}")
        return sorted(found, key=lambda f: f[2]["nll"])

    def by_quality(self) -> list[tuple[Family, int, Row]]:
        """The setting with the fewest fetched experts within the bound, of each family that improves on the last."""
        chain: list[tuple[Family, int, Row]] = []
        for one in self.families:
            best = self._least(one, chain[-1][2]["fetched"] if chain else self.native)
            chain += [] if best is None else [best]
        return chain[::-1]

    def _least(self, one: Family, most: float) -> tuple[Family, int, Row] | None:
        """Bisection over one family for the fewest experts below `most` within the bound, by the interval's end.

        Between two settings with a known loss the next is where the logarithm of the loss would cross the bound.
        """
        low, high = int(one.low) - 1, int(one.high) + 1  # low fails the bound; high fetches too much, or is the best
        if caps(one):
            high = min(high, math.ceil(most))
        ends: dict[int, float] = {}
        best: tuple[Family, int, Row] | None = None
        stride = 1 if most < self.native and caps(one) else 0  # down from what another family needs: by 1, 2, 4, ...
        while high - low > 1:
            if stride and low not in ends:
                value, stride = max(low + 1, high - stride), 2 * stride
            else:
                value = _between(low, high, ends if len(ends) < GUESSES else {}, self.target.bound)
            row = self.row(one, value)
            self._say(row)
            ends[value] = upper(row, self.target.kind)
            within = ends[value] <= self.target.bound
            if within and row["fetched"] < most:
                best = (one, value, row)
            if within:
                high = value
            elif row["fetched"] >= most:
                break  # whatever fetches less loses more
            else:
                low = value
        return best

    def _say(self, row: Row) -> None:
        kind = "task" if self.target.kind == "task" else "loss"
        unit = "points lost" if kind == "task" else "loss above dense"
        mean, end = row["task_delta" if kind == "task" else "nll_delta"], upper(row, kind)
        most = f", at most {end:.3f} at 95 %" if end < math.inf else ""
        self.say(f"  {row['policy']}: {row['fetched']:.1f} experts, {unit} {mean:.3f}{most}")


def _between(low: int, high: int, ends: dict[int, float], bound: float) -> int:
    """The middle; or where the loss crosses the bound if its logarithm is a line through two known settings."""
    below = [v for v in ends if v < low and ends[v] > ends.get(low, math.inf)]
    other = high if ends.get(high, 0) > 0 else max(below, default=None)
    if low not in ends or other is None or ends[other] == ends[low]:
        return (low + high) // 2
    step = math.log(bound / ends[low]) / math.log(ends[other] / ends[low]) * (other - low)
    return min(high - 1, max(low + 1, math.ceil(low + step)))


def confirm(
    candidates: Sequence[tuple[Family, int, Row]],
    ledger: Ledger,
    target: Target,
    count: float,
    say: Callable[[str], None],
) -> Answer:
    """The first candidate that holds on the samples of `ledger`, which the search has not seen.

    For a quality bound the settings above a candidate that fails are tried before the next candidate.
    """
    tried = 0
    quality = target.kind in BY_QUALITY
    last = ""
    for one, value, row in candidates:
        for step in range(CONFIRMATIONS if quality and one.high > one.low else 1):
            if value + step > one.high or tried >= CONFIRMATIONS:
                break
            policy = one.policy(value + step)
            native, found = ledger.get([parse("dense"), policy])
            tried += 1
            end = upper(found, target.kind if quality else "loss")
            if found["fetched"] >= native["fetched"]:
                last = f"{policy} fetches as many as the unchanged model"
                break
            if (end <= target.bound) if quality else found["fetched"] <= count * SLACK:
                return Answer(policy, "", row, found, tried)
            last = (
                f"{policy} loses up to {end:.3f} at 95 % on the samples that the search did not see"
                if quality
                else f"{policy} fetches {found['fetched']:.2f} experts on the samples that the search did not see"
            )
            say(f"  not confirmed: {last}")
    return Answer(None, last, tried=tried)


def evidence(answer: Answer, target: Target, rows: Sequence[Row], extra: dict[str, Any]) -> dict[str, Any]:
    """What goes into the config beside the policy: the target, the confirming row, and the trail of the search."""
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
    asked = {"kind": target.kind, "bound": target.bound, **extra}
    return {"target": asked, "confirmed": answer.confirmed, "settings_confirmed": answer.tried, "search": trail}
