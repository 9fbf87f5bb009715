"""Tuning from end to end: split the samples, search on one part, confirm on the other, write the config."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moebudget.core import provenance
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.engines.config import read_settings
from moebudget.engines.transformers.families import facts_of
from moebudget.evaluate.native import NativeRun, measure_native
from moebudget.evaluate.quality import Quality, evaluate
from moebudget.tune.ledger import Ledger, Row, setting
from moebudget.tune.search import Answer, Search, confirm, evidence, sweeps_of
from moebudget.tune.target import BY_QUALITY, Target

SEARCH_SHARE = 0.4  # of the windows; of the items half


@dataclass(frozen=True, slots=True)
class Samples:
    """Windows [n, S + 1] with their slices, if any, and task items, of the search or of the confirmation."""

    windows: Tensor
    items: list[Any]
    slices: Sequence[str] = ()


def split(windows: Tensor, items: Sequence[Any], slices: Sequence[str] = ()) -> tuple[Samples, Samples]:
    """The samples of the search, and those that confirm its choice."""
    first = int(SEARCH_SHARE * len(windows))
    mixed = list(items)
    random.Random(0).shuffle(mixed)
    half = len(mixed) // 2
    return (
        Samples(windows[:first], mixed[:half], slices[:first]),
        Samples(windows[first:], mixed[half:], slices[first:]),
    )


@dataclass(frozen=True, slots=True)
class Bench:
    """Setting in which rows are measured: the model, its name and statistics, and the file that keeps the rows."""

    model: nn.Module
    name: str
    tokenizer: Any
    start_id: int | None
    stats: Stats | None
    stats_file: Path | None
    device: str
    dtype: str
    batch: int
    rows: Path

    def ledger(self, samples: Samples) -> Ledger:
        """The ledger of these samples, with the rows of its file."""

        native_runs: list[NativeRun] = []

        def measure(policies: list[Policy]) -> list[Quality]:
            if not native_runs:
                inputs = (self.model, samples.windows, samples.items, self.tokenizer)
                native_runs.append(measure_native(*inputs, start_id=self.start_id, batch=self.batch, quiet=True))
            return evaluate(
                self.model, policies, self.stats, samples.windows, items=samples.items, tokenizer=self.tokenizer,
                start_id=self.start_id, batch=self.batch, retained_windows=0, slices=samples.slices,
                native_run=native_runs[0], quiet=True,
            )  # fmt: skip

        key = setting(
            model_hash=facts_of(self.model).router_hash,
            stats=self.stats_file,
            dtype=self.dtype,
            batch=self.batch,
            windows=samples.windows,
            items=samples.items,
            slices=samples.slices,
        )
        ledger = Ledger(self.rows, self.name, key, provenance.stamp(self.device), measure)
        ledger.read()
        return ledger


@dataclass(frozen=True, slots=True)
class Tuned:
    """The answer, all rows behind it, how many of them were measured now, and the target in experts."""

    answer: Answer
    searched: list[Row]
    confirming: list[Row]
    measured: int
    count: float | None


def tune(
    bench: Bench, target: Target, policies: Sequence[str], search: Samples, check: Samples, say: Callable[[str], None]
) -> Tuned:
    """Find a policy that meets the target; see `Search` and `confirm`."""
    facts = facts_of(bench.model)
    with_items = target.kind == "task"
    ledgers = [bench.ledger(Samples(s.windows, s.items if with_items else [], s.slices)) for s in (search, check)]
    first, second = ledgers
    say(f"search: {len(search.windows)} windows" + (f", {len(search.items)} items" if with_items else ""))
    finder = Search(sweeps_of(policies, facts), first, target, say)
    count: float | None = None
    if target.kind in BY_QUALITY:
        candidates = finder.by_quality()
        answer = Answer(None, "")
        if not candidates:
            answer = Answer(
                None,
                f"no setting of {', '.join(policies)} with fewer than the {finder.native:.1f} experts of native "
                f"routing stays within {target.bound:g} by the upper end of its 95 % interval; allow more loss, or "
                "give more samples, which narrow the interval",
            )
    else:
        limit = target.experts_at(finder.native)
        if isinstance(limit, str):
            return Tuned(Answer(None, limit), first.used(), [], first.measured, None)
        say(target.said(limit))
        count, candidates = limit, finder.by_experts(limit)
        answer = Answer(None, f"no setting of {', '.join(policies)} fetches at most {limit:.2f} experts per layer")
    if candidates:
        say(f"confirm: {len(check.windows)} other windows" + (f", {len(check.items)} items" if with_items else ""))
        answer = confirm(candidates, second, target, count or 0.0, say)
    return Tuned(answer, first.used(), second.used(), first.measured + second.measured, count)


def write_config(path: Path, tuned: Tuned, target: Target, stats_file: Path | None, extra: dict[str, Any]) -> Row:
    """Write and return the config for `attach` and vLLM's `--additional-config`, with the evidence for the choice."""
    answer = tuned.answer
    assert answer.policy is not None
    inside: Row = {"policy": answer.policy.name}
    if answer.policy.needs and stats_file is not None:
        inside["stats"] = str(stats_file.resolve())
    inside["evidence"] = evidence(answer, target, tuned.searched, {**extra, "experts": tuned.count})
    config = {"moebudget": inside}
    read_settings(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return config
