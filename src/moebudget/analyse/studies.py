"""Ablation studies: selection rule, fill, batch size, constant against draining batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from moebudget.analyse.geometry import geometry
from moebudget.calibrate.data import TokenizerLike
from moebudget.core.policy import Policy, Score
from moebudget.core.stats import Stats, require_stats
from moebudget.evaluate.quality import Quality, evaluate
from moebudget.evaluate.tasks import Item, TaskResult, evaluate_tasks
from moebudget.evaluate.text import evaluate_text
from moebudget.methods.base import NonlinearEnergy, PredictedEnergy, SquaredWeight, StaticEnergy, TrueEnergy, UnionSize
from moebudget.methods.common import RouteRank, RouterMass, Voted
from moebudget.methods.fills import Backfill
from moebudget.methods.native import native
from moebudget.methods.registry import parse

BATCHES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Setting:
    """Inputs of every study: a model, its statistics, held-out windows [n, S + 1] and optionally task items."""

    model: nn.Module
    name: str
    stats: Stats
    windows: Tensor
    items: Sequence[Item] = ()
    tokenizer: TokenizerLike | None = None
    start_id: int | None = None
    batch: int = 16
    budget: int = 10
    quiet: bool = False

    def evaluate(self, policies: Sequence[Policy], study: str) -> list[dict[str, Any]]:
        """Rows of the policies, with loss, agreement, retained energy and, if there are items, task accuracy."""
        rows = evaluate(
            self.model, policies, self.stats, self.windows, items=self.items, tokenizer=self.tokenizer,
            start_id=self.start_id, batch=self.batch, quiet=self.quiet,
        )  # fmt: skip
        return [self.row(row, study) for row in rows]

    def row(self, quality: Quality, study: str) -> dict[str, Any]:
        return {**quality.as_row(self.name), "bench": study}


def study_geometry(s: Setting) -> list[dict[str, Any]]:
    """Cosines of co-routed experts, exact against additive error, additive against greedy selection."""
    return [geometry(s.model, s.windows, budget=s.budget, batch=s.batch).as_row(s.name)]


def study_selection(s: Setting) -> list[dict[str, Any]]:
    """Selection rules with the same budget at every step, the size of the top-1 union; denominator `native`.

    BASE, https://arxiv.org/abs/2609.36222, section 5, table 2.
    """
    rules: tuple[tuple[str, Score], ...] = (
        ("weight sum", RouterMass()),
        ("squared sum", SquaredWeight()),
        ("static", StaticEnergy()),
        ("linear", PredictedEnergy()),
        ("nonlinear", NonlinearEnergy()),
        ("oracle", TrueEnergy()),
    )
    first = Policy(RouteRank(1), Voted(), Backfill("native"), "top-1 union")
    return s.evaluate([first, *(Policy(rule, UnionSize(1), Backfill("native"), n) for n, rule in rules)], "selection")


def study_fill(s: Setting) -> list[dict[str, Any]]:
    """BASE's active set with every fill: drop, substitute, backfill with three denominators (BASE, section 5)."""
    fills = ("native", "executed", "preserved", "drop", "substitute")
    return s.evaluate([parse(f"base:budget={s.budget},fill={fill}") for fill in fills], "fill")


def study_batch(s: Setting) -> list[dict[str, Any]]:
    """BASE against OEA with k0 = 1 and against weights alone, at equal fetched experts, over batch sizes.

    The budget at each batch size is the number of experts that OEA fetches at that size, rounded. Batch sizes above
    the number of windows are left out; every size sees the same windows.
    """
    rows = []
    sizes = [b for b in BATCHES if b <= len(s.windows)]
    windows = s.windows[: len(s.windows) // sizes[-1] * sizes[-1]]
    oea = parse("oea:k0=1")
    for size in sizes:
        (of_oea,) = evaluate_text(s.model, [oea], s.stats, windows, batch=size, quiet=True)
        budget = max(1, round(of_oea.counters.fetched))
        policies = [native(), oea, *(parse(f"{rule}:budget={budget}") for rule in ("squared", "static", "base"))]
        for quality in evaluate(s.model, policies, s.stats, windows, batch=size, quiet=s.quiet):
            rows.append(s.row(quality, "batch_size"))
    return rows


def study_draining(s: Setting) -> list[dict[str, Any]]:
    """Task accuracy with a constant batch (the place of a finished item is refilled) and with draining batches.

    Rules that fetch a union starve as a batch drains to one row; a fixed budget of at least K becomes exact. BASE runs
    at the budget of the other studies and at the numbers that OEA with k0 = 1 and 2 fetches on these items in a
    constant batch.
    """
    unions = [parse(p) for p in ("topk:k=1", "oea:k0=1", "oea:k0=2", "sere:s=1")]
    constant = _answers(s, unions, refill=True)
    budgets = {max(1, round(r.counters.fetched)) for r in constant[1:3]} | {s.budget}
    policies = [native(), *unions, *(parse(f"base:budget={m}") for m in sorted(budgets))]
    rows = []
    for refill in (True, False):
        for result in _answers(s, policies, refill):
            rows.append(
                {
                    "bench": "draining",
                    "model": s.name,
                    "B": s.batch,
                    "policy": result.policy.name,
                    "batching": "constant" if refill else "draining",
                    "rows_per_step": round(result.counters.rows, 3),
                    "native_union": round(result.counters.native_union, 4),
                    "fetched": round(result.counters.fetched, 4),
                    "task_avg": round(result.average, 3),
                    "task_ci95": round(result.half_width, 3),
                    "items": len(result.hits),
                }
            )
    return rows


def _answers(s: Setting, policies: Sequence[Policy], refill: bool) -> list[TaskResult]:
    if s.tokenizer is None:
        raise ValueError("task items need the model's tokenizer")
    return evaluate_tasks(
        s.model, policies, s.stats, s.items, s.tokenizer, batch=s.batch, start_id=s.start_id, refill=refill,
        quiet=s.quiet,
    )  # fmt: skip


STUDIES: dict[str, Callable[[Setting], list[dict[str, Any]]]] = {
    "geometry": study_geometry,
    "selection": study_selection,
    "fill": study_fill,
    "batch": study_batch,
    "draining": study_draining,
}
NEEDS: dict[str, frozenset[str]] = {
    "geometry": frozenset(),
    "selection": frozenset().union(*(parse(f"{n}:budget=1").needs for n in ("static", "base", "nonlinear"))),
    "fill": parse("base:budget=1,fill=substitute").needs,
    "batch": parse("base:budget=1").needs | parse("static:budget=1").needs,
    "draining": parse("base:budget=1").needs | parse("sere:s=1").needs,
}


def can_run(name: str, statistics: Collection[str], items: bool) -> bool:
    """Whether the study's statistics, and for `draining` task items, are available."""
    return NEEDS[name] <= set(statistics) and (items or name != "draining")


def require_study(name: str, statistics: Collection[str], items: bool) -> None:
    """Raise ValueError or MissingStatisticError, with the remedy, for a study that is unknown or cannot run."""
    if name not in STUDIES:
        raise ValueError(f"unknown study {name!r}; known: {', '.join(STUDIES)}")
    require_stats(f"study {name}", NEEDS[name] - set(statistics), None)
    if not can_run(name, statistics, items):
        raise ValueError(f"study {name} needs task items: use --tasks items.jsonl")


def run_study(name: str, setting: Setting) -> list[dict[str, Any]]:
    """The rows of one of STUDIES. Raises the errors of `require_study`."""
    require_study(name, setting.stats.tensors, bool(setting.items))
    return STUDIES[name](setting)
