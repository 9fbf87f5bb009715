"""Sweeps of policies that differ in one number, made from the registry or from a policy string."""

from __future__ import annotations

from dataclasses import dataclass

from moebudget.core.policy import Policy
from moebudget.core.stats import ModelFacts
from moebudget.methods import Method, Tunable, get_method, parse
from moebudget.methods.registry import split_fields

GRID = 9


@dataclass(frozen=True, slots=True)
class Sweep:
    """Policies that differ in one number: `lynx:alpha={},beta=1` with the number between `low` and `high`.

    whole: the number is an integer. Floats are searched on a logarithmic grid first, because the fetched experts need
    not be monotonic in the number.
    """

    template: str
    low: float
    high: float
    whole: bool = False

    def policy(self, value: float) -> Policy:
        """The policy at one value of the number."""
        return parse(self.template.replace("{}", str(int(value)) if self.whole else f"{value:.4g}"))

    def grid(self) -> list[float]:
        """First values to try, in rising order."""
        ratio = self.high / self.low if self.low > 0 else 1.0
        if not self.whole:
            return [self.low * ratio ** (i / (GRID - 1)) for i in range(GRID)]
        step = max(1, round((self.high - self.low) / (GRID - 1)))
        return [float(v) for v in range(int(self.low), int(self.high) + 1, step)]

    @property
    def method(self) -> Method:
        return get_method(self.template.partition(":")[0])

    @property
    def tunable(self) -> Tunable:
        """The number that varies."""
        field = next(name for name, value in split_fields(self.template) if value == "{}")
        return next(t for t in self.method.tune if t.field == field)


def make_sweep(template: str, facts: ModelFacts) -> Sweep:
    """The sweep of a policy string with {} in place of a tunable number, over the range of that number."""
    tunable = Sweep(template, 0, 0).tunable
    high = {"N": facts.experts, "K": facts.top_k}[tunable.high] if isinstance(tunable.high, str) else tunable.high
    sweep = Sweep(template, tunable.low, float(high), tunable.whole)
    if tunable.low == 0:  # refused by some policies, unless their other fields keep an expert
        try:
            sweep.policy(0)
        except ValueError:
            return Sweep(template, 1, sweep.high, sweep.whole)
    return sweep


def sweep_of(text: str, facts: ModelFacts) -> Sweep | None:
    """`base`, `base:fill=geometric` or `oea:k0=2` -> the sweep over the method's first tunable number without a value.

    Other fields that the method needs are taken from its example. None if every tunable number has a value. ValueError
    for a method without tunable numbers, and as `parse`.
    """
    method = get_method(text.strip().partition(":")[0])
    if not method.tune:
        raise ValueError(f"policy {method.name!r} has no number to search; every table includes it")
    fixed = dict(split_fields(text))
    for tunable in method.tune:
        if tunable.field in fixed:
            continue
        example = {k: v for k, v in split_fields(method.example) if k != tunable.field}
        fields = {tunable.field: "{}", **example, **fixed}
        sweep = make_sweep(f"{method.name}:" + ",".join(f"{k}={v}" for k, v in fields.items()), facts)
        sweep.policy(sweep.high)
        return sweep
    parse(text)
    return None


def near(sweep: Sweep, target: float) -> Sweep:
    """If the number is the count of fetched experts: the sweep without settings that cannot fetch `target`."""
    if not sweep.tunable.counts:
        return sweep
    low = min(max(sweep.low, float(int(target))), sweep.high)
    return Sweep(sweep.template, low, min(sweep.high, low + 2), whole=True)


def caps(sweep: Sweep) -> bool:
    """Whether the sweep's number bounds the fetched experts per layer, on average over the layers."""
    return sweep.policy(sweep.high).select.caps
