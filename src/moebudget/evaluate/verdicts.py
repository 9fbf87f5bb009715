"""Table of verdicts: the difference of each policy to native routing, its interval and its noise."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from moebudget.evaluate.paired import TASKS, TEXT, Paired, Scale, verdict
from moebudget.evaluate.quality import Quality


def verdict_table(rows: Sequence[Quality]) -> Table:
    """Loss and task accuracy against native routing: 95 % interval, noise of the batch composition, verdict."""
    batching = f", {rows[0].batching} batch" if rows[0].items else ""
    table = Table(
        title=f"difference to native routing on the same samples{batching}",
        caption="\\[low, high] paired bootstrap, 95 %; noise: the same samples with other batch mates, 95 %; "
        "quarters: same token as native, %, in the four quarters of the window",
    )
    table.add_column("policy", no_wrap=True)
    for name in ("measure", "loss", "noise", "verdict", "quarters"):
        table.add_column(name, no_wrap=name != "verdict")
    for r in rows:
        if r.loss_gap is None:
            continue
        quarters = " ".join(f"{a:.0f}" for a in r.by_quarter)
        table.add_row(r.policy, "text", *_cells(r.loss_gap, r.loss_noise, TEXT), quarters)
        for name, gap in r.slices.items():
            interval, _, words = _cells(gap, None, TEXT)
            table.add_row("", f"text, {name}", interval, "", words if gap.n >= TEXT.least else f"{gap.n} windows", "")
        if r.task_gap is not None:
            table.add_row("", "tasks", *_cells(r.task_gap, r.task_noise, TASKS), "")
    return table


def _cells(gap: Paired, noise: float | None, scale: Scale) -> tuple[str, str, str]:
    digits = scale.digits
    interval = f"{gap.mean:+.{digits}f}"
    interval += f" [{gap.low:+.{digits}f}, {gap.high:+.{digits}f}]" if gap.low == gap.low else ""
    return interval, "" if noise is None else f"± {noise:.{digits}f}", verdict(gap, scale)
