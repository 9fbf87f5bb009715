"""What the tables of all studies share."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def above(row: Row) -> float:
    return float(row["nll"] - row["dense_nll"])


def table(heads: list[str], rows: list[list[str]], left: int = 1) -> str:
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, rule, *rows))


def origin(*rows: Row) -> str:
    """Where rows stand, and every commit and device they are of; `rows_of` in update_tables.py says in which file."""
    runs = dict.fromkeys(f"commit {row['commit']}, {row['device']}" for row in rows)
    return f"Rows: `benchmarks/results/{rows[0]['file']}`, {'; '.join(runs)}."
