"""The unchanged model's results, measured once for several evaluations on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from moebudget.calibrate.data import TokenizerLike
from moebudget.evaluate.tasks import Item, TaskResult, evaluate_tasks
from moebudget.evaluate.text import TextResult, evaluate_text
from moebudget.policy import Policy
from moebudget.presets import dense

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Base:
    """What the unchanged model did to some windows and items, for `evaluate` on the same ones."""

    text: TextResult | None = None
    tasks: TaskResult | None = None

    @property
    def best(self) -> Tensor | None:
        """The most likely tokens [n, S] of the text."""
        return None if self.text is None else self.text.best


def unchanged(
    model: nn.Module,
    windows: Tensor,
    items: Sequence[Item],
    tokenizer: TokenizerLike,
    *,
    batch: int,
    start_id: int | None = None,
    quiet: bool = False,
) -> Base:
    """The dense model, measured once for several calls of `evaluate` at this batch size and its usual settings."""
    (text,) = evaluate_text(model, [dense()], None, windows, batch=batch, quiet=quiet)
    how: dict[str, Any] = {"batch": batch, "start_id": start_id, "quiet": quiet}
    return Base(text, evaluate_tasks(model, [dense()], None, items, tokenizer, **how)[0] if items else None)


def around(
    policies: Sequence[Policy], known: Result | None, measure: Callable[[list[Policy]], list[Result]]
) -> list[Result]:
    """`measure` of the policies, in their order; of the dense model `known` instead, where it is."""
    if known is None:
        return measure(list(policies))
    others = [p for p in policies if p.name != "dense"]
    found = iter(measure(others) if others else [])
    return [known if p.name == "dense" else next(found) for p in policies]
