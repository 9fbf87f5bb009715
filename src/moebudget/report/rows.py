"""Read benchmark rows, refuse broken ones by file, line and key, and sort them into what is drawn together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebudget.provenance import json_lines

Row = dict[str, Any]


class BrokenRowError(ValueError):
    """A row that cannot be drawn; the message names the file, the line and the key."""


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(_number(v) for v in value)


# What a value must be, as the error says it.
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
    "dense_nll": NUMBER, "nll_delta_ci95": MAYBE, "task_avg": MAYBE, "task_ci95": MAYBE, "task_fetched": MAYBE,
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
    "transfers": {"bytes": LIST, "us": LIST, "t0_us": NUMBER, "gb_a_second": NUMBER, "largest_relative_error": NUMBER},
    "calibration": {
        "model": TEXT, "tokens": NUMBER, "seconds": NUMBER, "tokens_per_s": NUMBER, "retained_energy": NUMBER,
        "r2_heldout": NUMBER,
    },
    "draining": {
        "model": TEXT, "policy": TEXT, "batching": TEXT, "rows_a_step": NUMBER, "fetched": NUMBER, "task_avg": NUMBER,
        "task_ci95": NUMBER,
    },
    "geometry": {"model": TEXT, "B": NUMBER, "cbar": NUMBER, "cosine_abs": NUMBER, "omitted": PAIRS},
}  # fmt: skip


def read_rows(paths: Sequence[Path]) -> list[Row]:
    """All rows of .jsonl files, or of .json files that hold one list, each checked.

    Raises FileNotFoundError, ValueError for a line that is no JSON, and BrokenRowError for an empty file, a line that
    is no object, and a key that is missing or holds something else than its kind of row has there.
    """
    rows = []
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"no file of rows at {path}")
        found = list(_objects(path))
        if not found:
            raise BrokenRowError(f"{path} holds no rows; --results of moebudget's commands writes them")
        for where, row in found:
            _check(where, row)
        rows += [row for _, row in found]
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
        raise BrokenRowError(f"{where}: a row is a JSON object, not {type(row).__name__}")
    rules = STAMP | (KINDS.get(str(row.get("bench"))) or (QUALITY if is_quality(row) else {}))
    for key, (wanted, fits) in rules.items():
        kind = f"a row of kind {row['bench']!r}" if "bench" in row else "a row"
        if key not in row:
            raise BrokenRowError(f"{where}: {kind} needs the key {key!r} ({wanted}), which is missing")
        if not fits(row[key]):
            raise BrokenRowError(f"{where}: key {key!r} of {kind} must be {wanted}, not {str(row[key])[:60]!r}")


def is_quality(row: Row) -> bool:
    """Whether the row says what a policy did to held-out text, and its kind that it is comparable with its like.

    Studies that vary something else as well, as allocations or domains, have tables of their own.
    """
    return row.get("bench") in COMPARED


def of(rows: Sequence[Row], bench: str) -> list[Row]:
    """The rows of one kind."""
    return [row for row in rows if row["bench"] == bench]


def several_devices(row: Row) -> bool:
    """Whether a row's step ran on several GPUs; no chart holds such rows beside those of one."""
    return bool(row.get("tp", 1) > 1)


def above(row: Row) -> float:
    """Loss above the unchanged model, nats a token."""
    return float(row["nll"] - row["dense_nll"])


def is_bound(row: Row) -> bool:
    """Whether the policy reads the true energies, which nobody has while serving."""
    return str(row["policy"]).startswith("oracle") or "(bound)" in str(row.get("method"))


def family(row: Row) -> str:
    """What a line joins: the method where the row names one, else the policy without its numbers."""
    if row.get("method"):
        return str(row["method"])
    name, _, fields = row["policy"].partition(":")
    words = [part for part in fields.split(",") if part and not part.partition("=")[2].replace(".", "", 1).isdigit()]
    return " ".join([name, *words])


@dataclass(frozen=True, slots=True)
class Group:
    """Quality rows that compare: one kind, model, batch size and amount of text, the newest of each policy."""

    bench: str
    model: str
    batch: int
    tokens: int
    rows: tuple[Row, ...]

    @property
    def others(self) -> list[Row]:
        """The rows of policies that change something."""
        return [row for row in self.rows if row["policy"] != "dense"]

    @property
    def dense_fetched(self) -> float:
        """Experts a layer and step that the unchanged model fetches on this text, as far as the rows know."""
        return float(next((r["fetched"] for r in self.rows if r["policy"] == "dense"), self.rows[0]["native_union"]))

    @property
    def with_tasks(self) -> bool:
        return any(row["task_avg"] is not None for row in self.rows)


def groups(rows: Sequence[Row]) -> list[Group]:
    """Quality rows in groups, those of `eval` and comparisons of methods first."""
    found: dict[tuple[str, str, int, int], dict[Any, Row]] = {}
    for row in sorted(filter(is_quality, rows), key=lambda row: row["date"]):
        place = found.setdefault((row["bench"], row["model"], row["B"], row["tokens"]), {})
        place[row["policy"], row.get("method"), row.get("target")] = row
    made = [Group(*key, tuple(mine.values())) for key, mine in found.items()]
    first = ("compare", "quality", "methods")
    made = [group for group in made if group.others]
    return sorted(made, key=lambda g: first.index(g.bench) if g.bench in first else len(first))
