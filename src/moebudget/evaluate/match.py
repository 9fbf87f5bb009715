"""Find the setting of a policy that fetches a given number of experts, so that rules compare at equal counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from moebudget.evaluate.text import TextResult, evaluate_text
from moebudget.policy import Policy
from moebudget.presets import parse
from moebudget.stats import Stats

GRID = 9
ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Family:
    """Policies that differ in one number: `lynx:alpha={},beta=1` with the number between `low` and `high`.

    whole: the number is an integer. Floats are searched on a logarithmic grid first, because what is fetched need not
    grow steadily with the number.
    """

    template: str
    low: float
    high: float
    whole: bool = False

    def policy(self, value: float) -> Policy:
        return parse(self.template.replace("{}", str(int(value)) if self.whole else f"{value:.4g}"))

    def grid(self) -> list[float]:
        """First values to try, rising."""
        ratio = self.high / self.low if self.low > 0 else 1.0
        if not self.whole:
            return [self.low * ratio ** (i / (GRID - 1)) for i in range(GRID)]
        step = max(1, round((self.high - self.low) / (GRID - 1)))
        return [float(v) for v in range(int(self.low), int(self.high) + 1, step)]


@dataclass(frozen=True, slots=True)
class Match:
    """The policy whose fetched count came closest, and its loss on the windows of the search."""

    policy: Policy
    fetched: float
    loss: float


def match_fetched(
    model: nn.Module,
    families: Sequence[Family],
    stats: Stats | None,
    windows: Tensor,
    target: float,
    *,
    tolerance: float = 0.5,
    batch: int = 16,
) -> Match:
    """The best policy of the families among those that fetch `target` experts, to within `tolerance`.

    Every family is searched by itself: a grid, then bisection between neighbours on either side of the target. Among
    settings within the tolerance the lowest loss on these windows wins, so keep them apart from the windows that the
    comparison uses. If none is within it, the closest count wins; the caller sees that in `fetched`.
    """
    found: dict[str, Match] = {}

    def measure(policies: Sequence[Policy]) -> list[Match]:
        new = list({p.name: p for p in policies if p.name not in found}.values())
        for result in evaluate_text(model, new, stats, windows, batch=batch, quiet=True) if new else ():
            found[result.policy.name] = _match(result)
        return [found[p.name] for p in policies]

    for family in families:
        values = family.grid()
        counts = [m.fetched for m in measure([family.policy(v) for v in values])]
        for low, high, before, after in zip(values, values[1:], counts, counts[1:], strict=False):
            if (before - target) * (after - target) <= 0:
                _bisect(family, low, high, before < after, target, tolerance, measure)
    close = [m for m in found.values() if abs(m.fetched - target) <= tolerance]
    return min(close, key=lambda m: m.loss) if close else min(found.values(), key=lambda m: abs(m.fetched - target))


def _bisect(
    family: Family, low: float, high: float, rising: bool, target: float, tolerance: float, measure: object
) -> None:
    assert callable(measure)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if family.whole:
            middle = float(int(middle))
            if middle in (low, high):
                return
        (match,) = measure([family.policy(middle)])
        if not family.whole and abs(match.fetched - target) <= tolerance / 5:
            return
        if (match.fetched < target) == rising:
            low = middle
        else:
            high = middle


def _match(result: TextResult) -> Match:
    return Match(result.policy, result.counters.fetched, float(result.nll.mean()))
