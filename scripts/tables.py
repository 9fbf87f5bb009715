"""What the tables of all studies share."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def above(row: Row) -> float:
    return float(row["nll"] - row["dense_nll"])


def table(heads: list[str], rows: list[list[str]], left: int = 1) -> str:
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def origin(row: Row) -> str:
    """Where a row stands; `rows_of` in update_tables.py says in which file."""
    return f"Rows: `benchmarks/results/{row['file']}`, commit {row['commit']}, {row['device']}."
