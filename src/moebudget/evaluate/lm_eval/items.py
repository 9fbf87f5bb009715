"""Items of the eight tasks, read from files or from the hub and checked."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebudget.core.errors import unknown
from moebudget.engines.transformers.loading import MissingExtraError

Item = dict[str, Any]


class BrokenItemError(ValueError):
    """An unusable item; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of a task's items: `file`.jsonl or .jsonl.gz in a folder, else a data set of the hub.

    `fields` are the names and types that an item must have. If the hub has one configuration per subject, `config` is
    the field that holds the name of the configuration.
    """

    file: str
    fields: dict[str, type]
    hub: str | None
    name: str | None = None
    split: str = "test"
    config: str | None = None


def _mbpp_test(item: Item) -> bool:
    """Whether the item is in the test split of MBPP; a file may also hold the other splits."""
    return 11 <= int(item["task_id"]) <= 510


TASKS = {
    "cmmlu": Source(
        "cmmlu", dict.fromkeys(("subject", "Question", "A", "B", "C", "D", "Answer"), str), "haonan-li/cmmlu",
        config="subject",
    ),
    "boolq": Source(
        "boolq_dev", {"question": str, "passage": str, "answer": bool}, "google/boolq", split="validation"
    ),
    "bbh": Source("bbh", {"task": str, "input": str, "target": str}, "SaylorTwift/bbh", config="task"),
    "math": Source("math500", {"problem": str, "solution": str, "answer": str}, "HuggingFaceH4/MATH-500"),
    "gsm8k": Source("gsm8k_test", {"question": str, "answer": str}, "openai/gsm8k", "main"),
    "math401": Source("math401", {"query": str, "response": str}, None),
    "humaneval": Source(
        "humaneval", {"task_id": str, "prompt": str, "entry_point": str, "test": str, "canonical_solution": str},
        "openai/openai_humaneval",
    ),
    "mbpp": Source(
        "mbpp", {"task_id": int, "text": str, "code": str, "test_setup_code": str, "test_list": list},
        "google-research-datasets/mbpp", "full",
    ),
}  # fmt: skip
KEEP: dict[str, Callable[[Item], bool]] = {"mbpp": _mbpp_test}


def load_items(task: str, folder: str | Path | None = None) -> list[Item]:
    """The items of one of TASKS, from `folder`, or from the hub if it is None.

    Raises ValueError for an unknown task, FileNotFoundError for a missing file or an unreachable hub, BrokenItemError
    for a line that is not a JSON object, or a field that is missing or has another type.
    """
    if task not in TASKS:
        raise ValueError(unknown("task", task, list(TASKS)))
    source = TASKS[task]
    items = list(_from_hub(task, source) if folder is None else _from_file(source, Path(folder)))
    kept = [item for item in items if task not in KEEP or KEEP[task](item)]
    if not kept:
        raise BrokenItemError(f"no items of {task} in {source.hub if folder is None else folder}")
    return kept if source.config is None else _in_turn(kept, source.config)


def _in_turn(items: list[Item], field: str) -> list[Item]:
    """Interleave the subjects, so that the first items of a task cover all of them."""
    counts: Counter[str] = Counter()
    turns = []
    for item in items:
        turns.append(counts[item[field]])
        counts[item[field]] += 1
    return [item for _, item in sorted(zip(turns, items, strict=True), key=lambda pair: pair[0])]


def _from_file(source: Source, folder: Path) -> Iterator[Item]:
    paths = [folder / f"{source.file}.jsonl", folder / f"{source.file}.jsonl.gz"]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise FileNotFoundError(f"{folder} holds neither {paths[0].name} nor {paths[1].name}")
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield checked(_parsed(line, f"{path}, line {number}"), source, f"{path}, line {number}")


def _parsed(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise BrokenItemError(f"{where}: not JSON: {error.msg}") from None


def checked(item: Any, source: Source, where: str) -> Item:
    """The fields of the item that the task needs. Raises BrokenItemError."""
    if not isinstance(item, dict):
        raise BrokenItemError(f"{where}: an item is a JSON object, not {type(item).__name__}")
    for field, kind in source.fields.items():
        if field not in item:
            raise BrokenItemError(f"{where}: an item of {source.file} needs the field {field!r}, which is missing")
        if not isinstance(item[field], kind):
            value = f"{type(item[field]).__name__} {str(item[field])[:40]!r}"
            raise BrokenItemError(f"{where}: field {field!r} must be {kind.__name__}, not {value}")
    return {field: item[field] for field in source.fields}


def _from_hub(task: str, source: Source) -> Iterator[Item]:
    if source.hub is None:
        raise FileNotFoundError(
            f"{task} is not on the hub: use --items FOLDER with a folder that holds {source.file}.jsonl"
        )
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("reading items from the hub needs datasets: pip install 'moebudget[data]'") from error
    try:
        names = [source.name] if source.config is None else datasets.get_dataset_config_names(source.hub)
        for name in names:
            for number, item in enumerate(datasets.load_dataset(source.hub, name, split=source.split), 1):
                fields = item if source.config is None else {source.config: name, **item}
                yield checked(fields, source, f"{source.hub}, {name or source.split}, item {number}")
    except BrokenItemError:
        raise
    except Exception as error:  # the hub's client raises many types, and the remedy is always the same
        raise FileNotFoundError(
            f"{task}: {source.hub} cannot be read ({type(error).__name__}: {str(error)[:200]}); use --items FOLDER "
            f"with a folder that holds {source.file}.jsonl"
        ) from error
