"""Comparison of methods at equal fetched experts, on samples that the search for settings did not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moebudget.calibrate.data import TokenizerLike
from moebudget.core.policy import Policy
from moebudget.core.stats import ModelFacts, Stats
from moebudget.evaluate.match import match_fetched
from moebudget.evaluate.quality import Quality, evaluate
from moebudget.evaluate.sweep import Sweep, near, sweep_of
from moebudget.evaluate.tasks import Item
from moebudget.methods.native import native
from moebudget.methods.registry import parse

TOLERANCE = 0.5
Entry = Sequence[Sweep] | Policy


@dataclass(frozen=True, slots=True)
class Compared:
    """A method's quality at a target; `target` is None for native routing and for policies with a fixed setting."""

    method: str
    target: float | None
    quality: Quality

    @property
    def matched(self) -> bool:
        """Whether it fetches the target number of experts to within TOLERANCE on the compared samples."""
        return self.target is None or abs(self.quality.fetched - self.target) <= TOLERANCE

    def as_row(self, model: str, bench: str) -> dict[str, Any]:
        """The fields of a line in a results file, without the stamp."""
        extra = {"bench": bench, "method": self.method, "target": self.target, "matched": self.matched}
        return {**self.quality.as_row(model), **extra}


def methods_of(texts: Sequence[str], facts: ModelFacts, target: float) -> dict[str, Entry]:
    """Methods by policy string, plain top-k first: `base` is matched to the target, `base:budget=12` is fixed."""
    names = ["topk", *(t for t in texts if t not in ("topk", "native"))]
    sweeps = {name: sweep_of(name, facts) for name in names}
    return {n: parse(n) if sweep is None else [near(sweep, target)] for n, sweep in sweeps.items()}


def compare(
    model: nn.Module,
    methods: Mapping[str, Entry],
    stats: Stats | None,
    windows: Tensor,
    targets: Sequence[float],
    *,
    search: int,
    items: Sequence[Item] = (),
    tokenizer: TokenizerLike | None = None,
    start_id: int | None = None,
    batch: int = 16,
    say: Callable[[str], None] = lambda _: None,
    **settings: Any,
) -> list[Compared]:
    """Native routing first, then every method at every target; `settings` go to `evaluate`.

    The last `search` windows are used for the search alone. ValueError if no others are left.
    """
    if not 0 < search < len(windows):
        raise ValueError(f"{search} of {len(windows)} windows for the search leave none to compare on")
    search_windows, rest = windows[-search:], windows[:-search]
    chosen: list[tuple[str, float | None, Policy]] = []
    for name, method in methods.items():
        if isinstance(method, Policy):
            chosen.append((name, None, method))
            continue
        for target in targets:
            match = match_fetched(model, method, stats, search_windows, target, tolerance=TOLERANCE, batch=batch)
            say(f"{name} at {target:g}: {match.policy} fetches {match.fetched:.2f}")
            chosen.append((name, target, match.policy))
    policies = list({p.name: p for p in [native(), *(policy for _, _, policy in chosen)]}.values())
    task: dict[str, Any] = {"items": items, "tokenizer": tokenizer, "start_id": start_id, "batch": batch}
    quality = {q.policy: q for q in evaluate(model, policies, stats, rest, **task, **settings)}
    native_row = Compared("native", None, quality["native"])
    return [native_row, *(Compared(name, target, quality[policy.name]) for name, target, policy in chosen)]


def unmatched(rows: Sequence[Compared]) -> list[str]:
    """A sentence for every method without a setting near its target."""
    return [
        f"{r.method}: its nearest setting, {r.quality.policy}, fetches {r.quality.fetched:.1f} experts, not "
        f"{r.target:g} ± {TOLERANCE}; do not compare its row with the others"
        for r in rows
        if not r.matched
    ]


def distinct(rows: Sequence[Compared]) -> list[Quality]:
    """The qualities of the rows, one per policy."""
    return list({r.quality.policy: r.quality for r in rows}.values())
