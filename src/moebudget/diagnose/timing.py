"""The line t = a + b * fetched from the rows of a measurement: `moebudget diagnose --results` or `bench decode`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moebudget.bench.line import Line, fit
from moebudget.provenance import json_lines
from moebudget.stats import ModelFacts


def read_timing(path: Path, facts: ModelFacts, batch: int) -> Line:
    """The last measurement of the file for `batch` rows. FileNotFoundError; ValueError if there is none.

    ValueError too if it is of a model with other layers or experts: the price of an expert would be another.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no timing at {path}; {HOW.format(batch=batch)}")
    measured = [row for _, row in json_lines(path) if isinstance(row, dict) and _points(row)]
    here = [row for row in measured if row["B"] == batch]
    if not here:
        have = ", ".join(str(b) for b in sorted({row["B"] for row in measured})) or "none"
        raise ValueError(
            f"{path} holds no step times measured at batch {batch} (measured batches: {have}); "
            + HOW.format(batch=batch)
        )
    shape = {"layers": len(facts.layers), "N": facts.experts, "K": facts.top_k}
    fitting = [row for row in here if all(row.get(field, mine) == mine for field, mine in shape.items())]
    last = (fitting or here)[-1]
    for field, mine in shape.items():
        if last.get(field, mine) != mine:
            raise ValueError(
                f"{path} times another model: {field} is {last[field]} there and {mine} here; "
                + HOW.format(batch=batch)
            )
    if last["bench"] == "diagnose":
        return fit(_points(last))
    run = (last["model"], last["date"])
    return fit([p for row in fitting if (row["model"], row.get("date")) == run for p in _points(row)])


HOW = "measure: moebudget diagnose MODEL --engine vllm --batch {batch} --results timing.jsonl"


def _points(row: dict[str, Any]) -> list[tuple[float, float]]:
    if row.get("bench") == "diagnose" and row.get("engine") != "none":
        return [(x, ms) for x, ms, _ in row["points"]]
    if row.get("bench") == "decode" and row.get("tp", 1) == 1:  # the price of an expert on one GPU
        return [(row["fetched"], row["tpot_ms"])]
    return []
