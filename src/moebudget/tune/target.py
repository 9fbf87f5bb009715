"""Tuning targets: one bound on fetched experts, step time, loss or task accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moebudget.bench.diagnose.timing import read_timing
from moebudget.bench.line import Line
from moebudget.core.stats import ModelFacts
from moebudget.evaluate.paired import TASKS, TEXT, paired_hits
from moebudget.evaluate.quality import Quality

OPTIONS = {
    "experts": "--experts", "speedup": "--speedup", "tpot": "--tpot", "loss": "--max-loss-increase",
    "task": "--max-task-drop",
}  # fmt: skip
BY_SPEED = ("speedup", "tpot")
BY_QUALITY = ("loss", "task")


@dataclass(slots=True)
class Target:
    """One bound. A bound on speed becomes a number of experts on a measured line, once the native union is known."""

    kind: str  # one of OPTIONS
    bound: float
    timing: Path | None = None
    line: Line | None = None

    def prepare(self, facts: ModelFacts, batch: int) -> None:
        """Read the timing and check the bound against the model. Raises ValueError or FileNotFoundError."""
        if self.kind == "experts" and not 1 <= self.bound < facts.experts:
            raise ValueError(f"--experts {self.bound:g} must be between 1 and {facts.experts - 1}")
        if self.timing is not None:
            self.line = read_timing(self.timing, facts, batch)

    def experts_at(self, union: float) -> float | str:
        """Experts per layer that meet the bound if native routing fetches `union`, or the reason why none do."""
        count = self.bound
        if self.kind in BY_SPEED:
            line = self.line
            assert line is not None
            if line.b - line.b_half <= 0:
                return (
                    f"the step time in {self.timing} does not depend on fetched experts ({line.b:.4f} ± "
                    f"{line.b_half:.4f} ms per expert), so no budget changes the speed; see `moebudget diagnose`"
                )
            now, least = line.at(union), line.at(1)
            wanted = now / self.bound if self.kind == "speedup" else self.bound
            count = (wanted - line.a) / line.b
            if count < 1:
                return (
                    f"{OPTIONS[self.kind]} {self.bound:g} needs {wanted:.3f} ms per step; with one expert per layer a "
                    f"step takes {least:.3f} ms, {now / least:.2f} times faster than native routing's {now:.3f}"
                )
        if count >= union:
            return (
                f"native routing fetches {union:.1f} experts per layer, which the target of {count:.1f} does not "
                "limit; set a lower target, or serve more requests at a time"
            )
        return count

    def said(self, count: float) -> str:
        """A sentence: the target in experts."""
        if self.kind == "experts":
            return f"target: {count:g} experts fetched per layer per step"
        return (
            f"target: {OPTIONS[self.kind]} {self.bound:g}, so at most {count:.2f} experts per layer by {self.timing}"
        )

    def times(self, fetched: float) -> dict[str, float]:
        """Milliseconds per step on the line, as a field of a row."""
        return {} if self.line is None else {"tpot_ms_by_line": round(self.line.at(fetched), 4)}

    def sentences(self, rows: Sequence[Quality]) -> list[str]:
        """Sentences: the step times on the line, native first."""
        if self.line is None:
            return []
        now = self.line.at(rows[0].fetched)
        parts = [f"{r.policy} {ms:.3f} ms ({now / ms:.2f}x)" for r in rows for ms in (self.line.at(r.fetched),)]
        return [f"step times on the line of {self.timing}: {', '.join(parts)}"]

    def judged(self, row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
        """A sentence about the confirming row; `rows` include native routing on the same samples."""
        native = next(r for r in rows if r["policy"] == "native")["fetched"]
        parts = [f"{row['fetched']:.1f} of {native:.1f} experts per layer"]
        parts += [
            f"loss increase over native {row['nll_delta']:.3f} nats per token, at most "
            f"{row['nll_delta_high']:.3f} at 95 %"
        ]
        if row["task_delta"] is not None:
            parts += [f"{row['task_delta']:.1f} points of task accuracy lost, at most {row['task_delta_high']:.1f}"]
        if self.line is not None:
            gain, half = self.line.gain(native, row["fetched"])
            parts += [
                f"{self.line.at(row['fetched']):.3f} ms per step by the line, {gain:.2f} ± {half:.2f} times faster"
            ]
        return "; ".join(parts) + f" ({row['nll_n']} windows" + (f", {row['items']} items)" if row["items"] else ")")

    def evidence(self) -> dict[str, Any]:
        """The line behind a bound on speed, for the config."""
        if self.line is None:
            return {}
        return {"a_ms": self.line.a, "b_ms": self.line.b, "b_half_ms": self.line.b_half, "r2": self.line.r2}


def read_target(*, timing: Path | None = None, **options: float | None) -> Target:
    """The bound that is not None. Raises ValueError for none, several, or a value out of range."""
    bounds = {kind: bound for kind, bound in options.items() if bound is not None}
    names = ", ".join(OPTIONS[kind] for kind in options)
    if len(bounds) != 1:
        listed = " and ".join(f"{OPTIONS[kind]} {bound:g}" for kind, bound in bounds.items()) or "none"
        raise ValueError(f"give exactly one target of {names}; given: {listed}")
    ((kind, bound),) = bounds.items()
    least = 1.0 if kind in ("experts", "speedup") else 0.0
    low = bound < least if kind == "experts" else bound <= least
    if not math.isfinite(bound) or low:
        raise ValueError(f"{OPTIONS[kind]} {bound:g} must be {'at least' if kind == 'experts' else 'above'} {least:g}")
    if kind in BY_SPEED and timing is None:
        raise ValueError(
            f"{OPTIONS[kind]} needs step times of the serving machine: use --timing timing.jsonl, made by "
            "`moebudget diagnose MODEL --engine vllm --results timing.jsonl`"
        )
    return Target(kind, bound, timing)


def require_samples(target: Target, search: int, windows: int, tasks: Sequence[str]) -> None:
    """Raise ValueError if these numbers of samples can never prove the bound.

    search: windows of the search, whose intervals matter for a bound on quality. windows, tasks: the windows, and the
    tasks of the items, that confirm the choice.
    """
    few = min(search, windows) if target.kind in BY_QUALITY else windows
    if few < TEXT.least:
        part = "search" if few == search else "confirm a choice"
        raise ValueError(
            f"{few} of {search + windows} windows are left to {part} on, and a verdict needs {TEXT.least}: give a "
            "longer text (--data), more --windows, or a shorter --length"
        )
    if target.kind != "task":
        return
    n = len(tasks)
    if n < TASKS.least:
        raise ValueError(
            f"--max-task-drop: {n} items are left to confirm a choice on, and a verdict needs {TASKS.least}: give at "
            f"least {2 * TASKS.least} items (the search uses half of them)"
        )
    best = paired_hits(torch.ones(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool), tasks).high
    if best > target.bound:
        raise ValueError(
            f"--max-task-drop {target.bound:g}: with {n} items even a policy that changes no answer may lose up to "
            f"{best:.1f} points; give about {10 * math.ceil(n * best / target.bound / 5)} items or a larger bound"
        )


def upper(row: dict[str, Any], kind: str) -> float:
    """Upper end of the 95 % interval of a row's loss increase (nats per token) or lost task accuracy (points)."""
    value = row["nll_delta_high" if kind == "loss" else "task_delta_high"]
    return float(value) if value is not None else math.inf
