"""Tables of `scripts/study_spread.py`, from their rows alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from moebudget.evaluate.report import pm

Row = dict[str, Any]
RULES = ("BASE", "BASE, half", "BASE, half, relative", "spread", "price")


def above(row: Row) -> float:
    return float(row["nll"] - row["dense_nll"])


def counted(row: Row) -> str:
    """Loss above dense, and the experts fetched where they are not the target's within .05."""
    missed = abs(row["fetched"] - row["target"]) >= 0.05
    return pm(above(row), row["nll_delta_ci95"], 3) + (f" (at {row['fetched']:.1f})" if missed else "")


def source(row: Row) -> str:
    return f"Rows: `benchmarks/results/quality.jsonl`, commit {row['commit']}, {row['device']}."


def table(heads: list[str], cells: list[list[str]], left: int = 1) -> str:
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (heads, rule, *cells))


def reaches(rows: list[Row], loss: float) -> float | None:
    """Experts at which a rule's loss falls to `loss`, linear between its rows; None outside of them."""
    points = sorted((r["fetched"], above(r)) for r in rows)
    for (low, more), (high, less) in pairwise(points):
        if less <= loss <= more and more > less:
            return float(low + (more - loss) / (more - less) * (high - low))
    return None


def targets_table(rows: list[Row]) -> str:
    """Loss by rule and average, what the first average that BASE has costs the others, and what the numbers say."""
    dense = rows[0]
    by = {(r["method"], r["target"]): r for r in rows}
    targets = sorted({r["target"] for r in rows if r["target"]})
    cells = []
    for rule in RULES:
        equal = reaches([r for r in rows if r["method"] == rule], above(by["BASE", 16]))
        cells.append([rule, *(counted(by[rule, m]) for m in targets)])
        cells[-1].append("16.0" if rule == "BASE" else "" if equal is None else f"{equal:.1f}")
    base, spread, price = (above(by[rule, 10]) for rule in ("BASE", "spread", "price"))
    return "\n\n".join(
        [
            f"The embedded model, batch {dense['B']}, decode mode, {dense['tokens']:,} held-out tokens a row; "
            f"unchanged it fetches {dense['fetched']:.1f} experts (loss {dense['nll']:.3f}). Loss above dense, "
            "± half of a 95 % interval, by experts a layer on average; last, the experts at which a rule loses what "
            "BASE loses at 16.",
            table(["rule", *map(str, targets), "as BASE at 16"], cells),
            f"At 10 experts a layer `spread` loses {spread / base:.2f} of what BASE loses and `price` "
            f"{price / base:.2f}.",
            source(dense),
        ]
    )


def pieces_table(rows: list[Row]) -> str:
    """At 10 experts: every rule and every piece left out or added, with agreement and retained energy."""
    cells = [
        [r["method"], f"`{r['policy']}`", f"{r['fetched']:.2f}", pm(above(r), r["nll_delta_ci95"], 3),
         pm(r["agreement"], r["agreement_ci95"], 1), f"{r['retained_energy']:.3f}"]
        for r in sorted((r for r in rows if r["target"] == 10), key=above)
    ]  # fmt: skip
    heads = ["rule", "policy", "experts", "loss above dense", "same token, %", "retained energy"]
    return "\n\n".join([table(heads, cells, left=2), source(rows[0])])


def tasks_table(rows: list[Row]) -> str:
    cells = [
        [r["method"], f"`{r['policy']}`", f"{r['task_fetched']:.1f}", pm(r["task_avg"], r["task_ci95"], 1)]
        for r in rows
    ]
    heads = ["rule", "policy", "experts on tasks", "tasks, %"]
    return "\n\n".join([f"{rows[0]['items']:,} items.", table(heads, cells, left=2), source(rows[0])])


def sizes_table(rows: list[Row]) -> str:
    cells = [
        [str(r["B"]), r["method"], "" if r["method"].startswith("BASE") else str(r["allocated_at"]),
         f"{r['fetched']:.2f}", pm(above(r), r["nll_delta_ci95"], 3)]
        for r in rows if r["target"]
    ]  # fmt: skip
    heads = ["batch", "rule", "allocated at batch", "experts", "loss above dense"]
    return "\n\n".join([table(heads, cells, left=2), source(rows[0])])
