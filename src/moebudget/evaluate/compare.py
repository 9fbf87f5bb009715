"""Methods at the same measured number of fetched experts, on samples that the search for settings did not see."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moebudget.calibrate.data import TokenizerLike
from moebudget.evaluate.families import family, near
from moebudget.evaluate.match import Family, match_fetched
from moebudget.evaluate.report import Quality, evaluate
from moebudget.evaluate.tasks import Item
from moebudget.policy import Policy
from moebudget.presets import dense, parse
from moebudget.stats import ModelFacts, Stats

TOLERANCE = 0.5
Method = Sequence[Family] | Policy


@dataclass(frozen=True, slots=True)
class Compared:
    """A method's quality at a target; `target` is None for the dense model and for settings taken as given."""

    method: str
    target: float | None
    quality: Quality

    @property
    def matched(self) -> bool:
        """Whether it fetches the target to within TOLERANCE on the samples compared."""
        return self.target is None or abs(self.quality.fetched - self.target) <= TOLERANCE

    def as_row(self, model: str, bench: str) -> dict[str, Any]:
        """The fields of a line in a results file, without the stamp."""
        extra = {"bench": bench, "method": self.method, "target": self.target, "matched": self.matched}
        return {**self.quality.as_row(model), **extra}


def methods_of(texts: Sequence[str], facts: ModelFacts, target: float) -> dict[str, Method]:
    """Policies as a user spells them, plain top-k in front: `base` is matched, `base:budget=12` taken as given."""
    names = ["topk", *(t for t in texts if t not in ("topk", "dense"))]
    found = {name: family(name, facts) for name in names}
    return {name: parse(name) if one is None else [near(one, target)] for name, one in found.items()}


def compare(
    model: nn.Module,
    methods: Mapping[str, Method],
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
    """The dense model first, then every method at every target; `settings` go to `evaluate`.

    The last `search` windows serve the search alone. ValueError if that leaves none.
    """
    if not 0 < search < len(windows):
        raise ValueError(f"{search} of {len(windows)} windows for the search leave none to compare on")
    found, rest = windows[-search:], windows[:-search]
    chosen: list[tuple[str, float | None, Policy]] = []
    for name, method in methods.items():
        if isinstance(method, Policy):
            chosen.append((name, None, method))
            continue
        for target in targets:
            match = match_fetched(model, method, stats, found, target, tolerance=TOLERANCE, batch=batch)
            say(f"{name} at {target:g}: {match.policy} fetches {match.fetched:.2f}")
            chosen.append((name, target, match.policy))
    policies = list({p.name: p for p in [dense(), *(policy for _, _, policy in chosen)]}.values())
    task: dict[str, Any] = {"items": items, "tokenizer": tokenizer, "start_id": start_id, "batch": batch}
    quality = {q.policy: q for q in evaluate(model, policies, stats, rest, **task, **settings)}
    unchanged = Compared("unchanged model", None, quality["dense"])
    return [unchanged, *(Compared(name, target, quality[policy.name]) for name, target, policy in chosen)]


def unmatched(rows: Sequence[Compared]) -> list[str]:
    """A sentence for every method that has no setting near its target."""
    return [
        f"{r.method}: its nearest setting, {r.quality.policy}, fetches {r.quality.fetched:.1f} experts, not "
        f"{r.target:g} ± {TOLERANCE}; read its row apart"
        for r in rows
        if not r.matched
    ]


def distinct(rows: Sequence[Compared]) -> list[Quality]:
    """The qualities of the rows, each policy once."""
    return list({r.quality.policy: r.quality for r in rows}.values())
