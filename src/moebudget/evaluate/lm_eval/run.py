"""Runs of the eight tasks under several policies with one loaded model, and the harness's command line."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moebudget.core.errors import unknown
from moebudget.engines.transformers.loading import MissingExtraError
from moebudget.evaluate.lm_eval.items import TASKS, load_items
from moebudget.evaluate.paired import FEW_SAMPLES, Z95
from moebudget.methods.registry import parse

FOLDER = Path(__file__).with_name("tasks")
CODE = ("humaneval", "mbpp")


def require_harness() -> None:
    """Raise MissingExtraError if lm-evaluation-harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("this needs lm-evaluation-harness: pip install 'moebudget[lm-eval]'") from error


def run_tasks(
    model: str,
    tasks: Sequence[str],
    policies: Sequence[str],
    *,
    items: str | None = None,
    unsafe_code: bool = False,
    limit: int | None = None,
    most: int | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """One row per policy: percent correct by task, rows and experts per step. `settings` are passed to BudgetLM.

    limit: items per task. most: tokens per answer, instead of the limits of the tasks. Raises, before the model is
    loaded, MissingExtraError, ValueError for an unknown task or policy or for code without `unsafe_code`, and the
    errors of `load_items`.
    """
    require_harness()
    for task in tasks:
        if task not in TASKS:
            raise ValueError(unknown("task", task, list(TASKS)))
    if not unsafe_code and set(tasks) & set(CODE):
        raise ValueError(
            f"{' and '.join(t for t in tasks if t in CODE)} would execute code that the model writes, in a sandbox "
            "that stops accidents but not an attacker: allow it with --unsafe-code"
        )
    names = [parse(policy).name for policy in policies]
    for task in sorted(
        tasks, key=lambda name: TASKS[name].hub is not None
    ):  # tasks that are not on the hub fail first
        load_items(task, items)
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from moebudget.evaluate.lm_eval.model import BudgetLM

    rows, manager = (
        [],
        TaskManager(include_path=str(FOLDER), include_defaults=False, metadata={"items": items}, verbosity="ERROR"),
    )
    lm = BudgetLM(pretrained=model, policy=names[0], **settings)
    for name in names:
        lm.use(name)
        results = simple_evaluate(
            model=lm, tasks=[f"moebudget_{task}" for task in tasks], task_manager=manager, limit=limit,
            gen_kwargs=None if most is None else {"max_gen_toks": most}, confirm_run_unsafe_code=unsafe_code,
            log_samples=False, bootstrap_iters=0, verbosity="ERROR",
        )  # fmt: skip
        rows.append(_row(model, name, lm, tasks, results))
    return rows


def _row(model: str, policy: str, lm: Any, tasks: Sequence[str], results: Any) -> dict[str, Any]:
    by_task = {task: results["results"][f"moebudget_{task}"] for task in tasks}
    items = {task: int(results["n-samples"][f"moebudget_{task}"]["effective"]) for task in tasks}
    counted = lm.counted()
    main = counted.get("full") or counted["tail"]
    return {
        "bench": "lm_eval", "model": model, "B": lm.batch_size, "policy": policy,
        "batching": "constant" if lm.constant else "draining", "mixed": lm.mixed,
        "full_batches": "full" in counted,
        "tasks": {task: round(100 * float(r["acc,none"]), 2) for task, r in by_task.items()},
        "tasks_ci95": {task: _half(r, items[task]) for task, r in by_task.items()},
        "items": items,
        **{key: main[key] for key in ("steps", "rows_per_step", "fetched", "native_union")},
        "tail": counted.get("tail"), "prompts_cut": counted["prompts_cut"],
    }  # fmt: skip


def _half(result: dict[str, Any], items: int) -> float | None:
    """Half width of the 95 % interval of a task's percentage; None below 30 items."""
    return round(100 * Z95 * float(result["acc_stderr,none"]), 2) if items >= FEW_SAMPLES else None


def harness() -> None:
    """Run the harness's command line with the model `moebudget` and the tasks `moebudget_*` registered."""
    require_harness()
    from lm_eval.__main__ import cli_evaluate

    import moebudget.evaluate.lm_eval.model  # noqa: F401  # registers the model

    if "--include_path" not in sys.argv and sys.argv[1:2] and not {"-h", "--help"} & set(sys.argv):
        sys.argv += ["--include_path", str(FOLDER)]
    cli_evaluate()
