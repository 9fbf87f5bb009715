"""Benchmark rows: reading, errors that name file, line and key, and groups that are drawn together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebudget.core.provenance import json_lines

Row = dict[str, Any]


class BrokenRowError(ValueError):
    """A row that cannot be drawn; the message names the file, the line and the key."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(_number(v) for v in value)


# Kinds of values: the words in an error message, and the check.
NUMBER = ("a finite number", _number)
MAYBE = ("a finite number or null", lambda value: value is None or _number(value))
TEXT = ("text", lambda value: isinstance(value, str))
LIST = ("a list of finite numbers", _numbers)
PAIRS = ("a list of lists of finite numbers", lambda value: isinstance(value, list) and all(map(_numbers, value)))
OBJECT = ("an object", lambda value: isinstance(value, dict))
Rule = tuple[str, Callable[[Any], bool]]

STAMP: dict[str, Rule] = {"bench": TEXT, "date": TEXT, "commit": TEXT, "command": TEXT, "device": TEXT}
STAMP["versions"] = OBJECT
QUALITY: dict[str, Rule] = {
    "model": TEXT, "B": NUMBER, "policy": TEXT, "fetched": NUMBER, "native_union": NUMBER, "nll": NUMBER,
    "native_nll": NUMBER, "nll_delta_ci95": MAYBE, "task_avg": MAYBE, "task_ci95": MAYBE, "task_fetched": MAYBE,
    "tokens": NUMBER, "items": NUMBER,
}  # fmt: skip
COMPARED = ("quality", "compare", "methods", "tune", "selection", "fill", "batch_size", "spread")  # bench of such rows
LINE: dict[str, Rule] = {"model": TEXT, "B": NUMBER, "a_ms": NUMBER, "b_ms": NUMBER, "r2": NUMBER}
KINDS: dict[str, dict[str, Rule]] = {
    "decode": {
        "model": TEXT, "weights": TEXT, "B": NUMBER, "M": MAYBE, "fetched": MAYBE, "tpot_ms": NUMBER,
        "native_union": MAYBE,
    },
    "decode_fit": {**LINE, "weights": TEXT, "native_union": NUMBER, "at_union": NUMBER},
    "diagnose": {"model": TEXT, "B": NUMBER, "engine": TEXT, "points": PAIRS, "answer": TEXT, "reason": TEXT},
    "routing": {
        "model": TEXT, "policy": TEXT, "T": NUMBER, "us_native": NUMBER, "us_added": NUMBER, "us_torch": NUMBER,
        "us_torch_native": NUMBER, "us_floor": NUMBER,
    },
    "transfers": {"bytes": LIST, "us": LIST, "t0_us": NUMBER, "gb_per_s": NUMBER, "largest_relative_error": NUMBER},
    "calibration": {
        "model": TEXT, "tokens": NUMBER, "seconds": NUMBER, "tokens_per_s": NUMBER, "retained_energy": NUMBER,
        "r2_heldout": NUMBER,
    },
    "draining": {
        "model": TEXT, "policy": TEXT, "batching": TEXT, "rows_per_step": NUMBER, "fetched": NUMBER,
        "task_avg": NUMBER, "task_ci95": NUMBER,
    },
    "geometry": {"model": TEXT, "B": NUMBER, "cbar": NUMBER, "cosine_abs": NUMBER, "omitted": PAIRS},
}  # fmt: skip


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """All rows of .jsonl files, or of .json files that hold one list, each checked.

    Raises FileNotFoundError, ValueError for a line that is not JSON, and BrokenRowError for an empty file, a line that
    is not an object, and a key that is missing or has a value of the wrong kind.
    """
    rows = []
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"there is no file of rows {path}")
        located = list(_objects(path))
        if not located:
            raise BrokenRowError(f"{path} has no rows; moebudget's commands write them with --results")
        for where, row in located:
            _check(where, row)
        rows += [row for _, row in located]
    return rows


def _objects(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        try:
            yield from ((f"{path}, row {i} of the list", row) for i, row in enumerate(json.loads(text), 1))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: not JSON ({error})") from None
        return
    yield from json_lines(path)


def _check(where: str, row: Any) -> None:
    if not isinstance(row, dict):
        raise BrokenRowError(f"{where}: a row must be a JSON object, not {type(row).__name__}")
    rules = STAMP | (KINDS.get(str(row.get("bench"))) or (QUALITY if is_quality(row) else {}))
    for key, (wanted, fits) in rules.items():
        kind = f"a row of kind {row['bench']!r}" if "bench" in row else "a row"
        if key not in row:
            raise BrokenRowError(f"{where}: {kind} needs the key {key!r} ({wanted}), which is missing")
        if not fits(row[key]):
            raise BrokenRowError(f"{where}: key {key!r} of {kind} must be {wanted}, not {str(row[key])[:60]!r}")


def is_quality(row: Row) -> bool:
    """Whether the row holds a policy's quality on held-out text and can be compared with others of its kind.

    Studies that also vary something else, such as allocations or domains, have separate tables.
    """
    return row.get("bench") in COMPARED


def of(rows: Sequence[Row], bench: str) -> list[Row]:
    """The rows of one kind."""
    return [row for row in rows if row["bench"] == bench]


def several_devices(row: Row) -> bool:
    """Whether a row's step ran on several GPUs; charts of one GPU leave such rows out."""
    return bool(row.get("tp", 1) > 1)


def above(row: Row) -> float:
    """Loss increase over native, nats per token."""
    return float(row["nll"] - row["native_nll"])


def is_bound(row: Row) -> bool:
    """Whether the policy reads the true output energies, which are unknown while serving."""
    return str(row["policy"]).startswith("oracle") or "(bound)" in str(row.get("method"))


def family(row: Row) -> str:
    """The line that a row belongs to: its method if the row names one, else the policy string without its numbers."""
    if row.get("method"):
        return str(row["method"])
    name, _, fields = row["policy"].partition(":")
    words = [part for part in fields.split(",") if part and not part.partition("=")[2].replace(".", "", 1).isdigit()]
    return " ".join([name, *words])


@dataclass(frozen=True, slots=True)
class Group:
    """Quality rows that can be compared: one kind, model, batch size and amount of text; the newest of each policy."""

    bench: str
    model: str
    batch: int
    tokens: int
    rows: tuple[Row, ...]

    @property
    def restricted(self) -> list[Row]:
        """The rows of all policies but native."""
        return [row for row in self.rows if row["policy"] != "native"]

    @property
    def native_fetched(self) -> float:
        """Experts fetched per layer per step by native routing on this text; without its row, the native union."""
        return float(next((r["fetched"] for r in self.rows if r["policy"] == "native"), self.rows[0]["native_union"]))

    @property
    def with_tasks(self) -> bool:
        return any(row["task_avg"] is not None for row in self.rows)


def groups(rows: Sequence[Row]) -> list[Group]:
    """Quality rows in groups; comparisons and the rows of `eval` come first."""
    newest: dict[tuple[str, str, int, int], dict[Any, Row]] = {}
    for row in sorted(filter(is_quality, rows), key=lambda row: row["date"]):
        group = newest.setdefault((row["bench"], row["model"], row["B"], row["tokens"]), {})
        group[row["policy"], row.get("method"), row.get("target")] = row
    made = [Group(*key, tuple(of_group.values())) for key, of_group in newest.items()]
    first = ("compare", "quality", "methods")
    made = [group for group in made if group.restricted]
    return sorted(made, key=lambda g: first.index(g.bench) if g.bench in first else len(first))
