"""Results of native routing, measured once for several evaluations on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from moebudget.calibrate.data import TokenizerLike
from moebudget.core.policy import Policy
from moebudget.evaluate.tasks import Item, TaskResult, evaluate_tasks
from moebudget.evaluate.text import TextResult, evaluate_text
from moebudget.methods.native import native

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class NativeRun:
    """Results of native routing on windows and items, for `evaluate` on the same samples."""

    text: TextResult | None = None
    tasks: TaskResult | None = None

    @property
    def best(self) -> Tensor | None:
        """The most likely tokens [n, S] of the text."""
        return None if self.text is None else self.text.best


def measure_native(
    model: nn.Module,
    windows: Tensor,
    items: Sequence[Item],
    tokenizer: TokenizerLike,
    *,
    batch: int,
    start_id: int | None = None,
    quiet: bool = False,
) -> NativeRun:
    """Measure native routing for several calls of `evaluate` with this batch size and its default settings."""
    (text,) = evaluate_text(model, [native()], None, windows, batch=batch, quiet=quiet)
    settings: dict[str, Any] = {"batch": batch, "start_id": start_id, "quiet": quiet}
    return NativeRun(text, evaluate_tasks(model, [native()], None, items, tokenizer, **settings)[0] if items else None)


def with_native(
    policies: Sequence[Policy], native_result: Result | None, measure: Callable[[list[Policy]], list[Result]]
) -> list[Result]:
    """`measure` of the policies, in their order; for native routing, `native_result` if there is one."""
    if native_result is None:
        return measure(list(policies))
    rerouting = [p for p in policies if p.name != "native"]
    results = iter(measure(rerouting) if rerouting else [])
    return [native_result if p.name == "native" else next(results) for p in policies]
