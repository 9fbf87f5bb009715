"""Line t = a + b * fetched from the rows of `moebudget diagnose --results` or `moebudget bench decode --results`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moebudget.bench.line import Line, fit
from moebudget.core.provenance import json_lines
from moebudget.core.stats import ModelFacts


def read_timing(path: Path, facts: ModelFacts, batch: int) -> Line:
    """The line of the file's last measurement for `batch` rows.

    Raises FileNotFoundError without the file, and ValueError if it has no such measurement or only one of a model with
    different layers or experts, for which an expert has a different price.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no timing file {path}; {HOW.format(batch=batch)}")
    measured = [row for _, row in json_lines(path) if isinstance(row, dict) and _points(row)]
    candidates = [row for row in measured if row["B"] == batch]
    if not candidates:
        have = ", ".join(str(b) for b in sorted({row["B"] for row in measured})) or "none"
        raise ValueError(
            f"{path} has no step times measured at batch size {batch} (measured batch sizes: {have}); "
            + HOW.format(batch=batch)
        )
    shape = {"layers": len(facts.layers), "N": facts.experts, "K": facts.top_k}
    fitting = [row for row in candidates if all(row.get(field, value) == value for field, value in shape.items())]
    last = (fitting or candidates)[-1]
    for field, value in shape.items():
        if last.get(field, value) != value:
            raise ValueError(
                f"{path} times a different model: {field} is {last[field]} in the file and {value} in this model; "
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
