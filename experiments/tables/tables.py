"""Helpers that the tables of all studies share."""

from __future__ import annotations

from typing import Any

from moebudget.evaluate.quality import pm

Row = dict[str, Any]
Blocks = dict[tuple[str, str], str]  # (page, name of the block) -> text


def increase(row: Row) -> float:
    """Loss increase over native, nats per token."""
    return float(row["nll"] - row["native_nll"])


def loss(row: Row) -> str:
    """Loss increase over native with half of its 95 % interval."""
    return pm(increase(row), row["nll_delta_ci95"], 3)


def tasks(row: Row) -> str:
    """Task accuracy in per cent with half of its 95 % interval."""
    return pm(row["task_avg"], row["task_ci95"], 1)


def table(heads: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A Markdown table whose first `left` columns are left-aligned."""
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def origin(*rows: Row) -> str:
    """The results file of the rows, and every commit and device that they were measured with."""
    runs = dict.fromkeys(f"commit {row['commit']}, {row['device']}" for row in rows)
    return f"Rows: `benchmarks/results/{rows[0]['file']}`, {'; '.join(runs)}."


def last_run(rows: list[Row], bench: str) -> list[Row]:
    """The rows of the last run of a study."""
    runs = [r for r in rows if r["bench"] == bench]
    if not runs:
        raise SystemExit(f"no rows of {bench}: run experiments/studies/compare_methods.py first")
    return [r for r in runs if (r["date"], r["command"]) == (runs[-1]["date"], runs[-1]["command"])]


def of_model(rows: list[Row], model: str) -> list[Row]:
    """The rows of a model."""
    return [r for r in rows if r["model"] == model]
