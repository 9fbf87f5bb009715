"""Items, scoring and the sandbox of the eight tasks, without lm-evaluation-harness."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from moebudget.cli import app
from moebudget.evaluate.lm_eval import sandbox
from moebudget.evaluate.lm_eval.items import TASKS, BrokenItemError, load_items
from moebudget.evaluate.lm_eval.run import FOLDER, run_tasks
from moebudget.evaluate.lm_eval.sandbox import execute
from moebudget.evaluate.lm_eval.scoring import RIGHT, gold, number
from tests.evaluate.lm_eval.questions import ITEMS, RESPONSES

BY_FILE = {source.file: task for task, source in TASKS.items()}


@pytest.mark.parametrize("task", TASKS)
def test_gold_answer_is_right(task: str, folder: Path) -> None:
    items = load_items(task, folder)
    assert items
    assert [RIGHT[task](item, gold(task, item)) for item in items] == [True] * len(items)


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("humaneval", "mbpp")])
def test_gold_answer_of_another_item_is_wrong(task: str, folder: Path) -> None:
    items = load_items(task, folder)
    for item, next_item in zip(items, items[1:] + items[:1], strict=True):
        assert not RIGHT[task](item, gold(task, next_item))


@pytest.mark.parametrize(("file", "position", "response", "right"), RESPONSES)
def test_responses_are_scored(file: str, position: int, response: str, right: bool) -> None:
    assert RIGHT[BY_FILE[file]](ITEMS[file][position], response) is right


@pytest.mark.skipif("MOEBUDGET_BENCH" not in os.environ, reason="MOEBUDGET_BENCH names no folder of real items")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("task", TASKS)
def test_gold_answers_of_real_items_are_right(task: str) -> None:
    items = load_items(task, os.environ["MOEBUDGET_BENCH"])
    assert not [item for item in items if not RIGHT[task](item, gold(task, item))]


def test_numbers_are_read() -> None:
    read = {"$1,450,000 in all": 1450000, "x = -3.5": -3.5, "1e-3": 0.001, "from 3 to .5": 0.5, "−7": -7, "5.": 5}
    assert {text: float(number(text) or 0) for text in read} == read
    assert number("none") is None


def test_subjects_are_interleaved(tmp_path: Path) -> None:
    items = [{"task": task, "input": f"{task}{i}", "target": "x"} for task in "abc" for i in range(2)]
    (tmp_path / "bbh.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    assert [item["input"] for item in load_items("bbh", tmp_path)] == ["a0", "b0", "c0", "a1", "b1", "c1"]


def test_mbpp_uses_its_test_split_only(folder: Path) -> None:
    assert [item["task_id"] for item in load_items("mbpp", folder)] == [11]


@pytest.mark.parametrize("task", TASKS)
def test_missing_field_is_named(task: str, tmp_path: Path) -> None:
    source = TASKS[task]
    for field in source.fields:
        first = {**ITEMS[source.file][0]}
        second = {key: value for key, value in first.items() if key != field}
        path = tmp_path / f"{source.file}.jsonl"
        path.write_text(f"{json.dumps(first)}\n\n{json.dumps(second)}\n", encoding="utf-8")
        with pytest.raises(
            BrokenItemError, match=rf"{source.file}.jsonl, line 3: .* field '{field}', which is missing"
        ):
            load_items(task, tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "q", "answer": 7}', r"gsm8k_test.jsonl, line 1: field 'answer' must be str, not int '7'"),
        ("[]", r"line 1: an item is a JSON object, not list"),
        ("{", r"line 1: not JSON"),
        ("", r"no items of gsm8k"),
    ],
)
def test_broken_item_is_named(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(BrokenItemError, match=message):
        load_items("gsm8k", tmp_path)


def test_errors_name_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither gsm8k_test.jsonl nor gsm8k_test.jsonl.gz"):
        load_items("gsm8k", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"math401 is not on the hub: use --items FOLDER .* math401.jsonl"):
        load_items("math401")
    with pytest.raises(ValueError, match="gsm8"):
        load_items("gsm8")
    datasets = pytest.importorskip("datasets")

    def unreachable(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        FileNotFoundError, match=r"openai/gsm8k cannot be read \(ConnectionError: no route\); use --items"
    ):
        load_items("gsm8k")


def test_default_tasks_without_items_are_those_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[list[str]] = []

    def refuse(_model: str, tasks: list[str], *_: Any, **__: Any) -> None:
        requested.append(tasks)
        raise ValueError("stop")

    monkeypatch.setattr("moebudget.evaluate.lm_eval.run.run_tasks", refuse)
    for options in ([], ["--items", str(tmp_path)]):
        CliRunner().invoke(app, ["lm-eval", "model", "--policy", "native", *options])
    assert requested == [
        ["cmmlu", "boolq", "bbh", "math", "gsm8k"],
        ["cmmlu", "boolq", "bbh", "math", "gsm8k", "math401"],
    ]


def test_task_without_items_is_refused_before_data_sets_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moebudget.evaluate.lm_eval.run.require_harness", lambda: None)
    with pytest.raises(FileNotFoundError, match="math401 is not on the hub"):
        run_tasks("no-model", ["gsm8k", "math401"], ["native"])


def test_items_of_the_hub_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    requested: list[Any] = []

    def load(path: str, name: str | None, split: str) -> list[dict[str, Any]]:
        requested.append((path, name, split))
        return [{"input": "x", "target": "y", "more": 1}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_config_names", lambda _: ["navigate", "snarks"])
    assert load_items("bbh") == [{"task": name, "input": "x", "target": "y"} for name in ("navigate", "snarks")]
    assert requested == [("SaylorTwift/bbh", "navigate", "test"), ("SaylorTwift/bbh", "snarks", "test")]
    with pytest.raises(BrokenItemError, match=r"openai/gsm8k, main, item 1: .*'question'"):
        load_items("gsm8k")


HARMLESS = (
    "import math, re, collections, itertools, heapq, random, typing, functools",
    "open('a', 'w').write('x')",
    "print('x' * 10**6)",
)
REFUSED = {
    "import socket; socket.socket()": "socket",
    "import subprocess; subprocess.run(['ls'])": "subprocess",
    "import os; os.system('ls')": "os.system",
    "import os; os.fork()": "os.fork",
    "import os; os.kill(os.getppid(), 9)": "os.kill",
    "open('/tmp/moebudget-outside', 'w')": "outside",
    "import os; os.unlink('/tmp/moebudget-nothing')": "os.remove",
    "x = bytearray(3 << 30)": "MemoryError",
    "raise SystemExit(0)": "code 0",
    "import os; os._exit(0)": "code 0",
    "import os; assert os.environ": "AssertionError",
    "import numpy": "No module",
    "1 +": "SyntaxError",
}


@pytest.mark.parametrize("code", HARMLESS)
def test_harmless_code_passes(code: str) -> None:
    assert execute(code).reason == ""
    assert execute(code).passed


@pytest.mark.parametrize("code", REFUSED)
def test_sandbox_refuses(code: str) -> None:
    outcome = execute(code)
    assert not outcome.passed
    assert REFUSED[code] in outcome.reason or (REFUSED[code] == "SyntaxError" and "invalid syntax" in outcome.reason)


def test_network_is_out_of_reach() -> None:
    if not sandbox.without_network():
        pytest.skip("this kernel gives ordinary users no network namespace")
    guarded = sandbox.GUARD
    try:
        sandbox.GUARD = "import os  # {seconds} {megabytes}\n"
        outcome = execute("import socket\nassert {name for _, name in socket.if_nameindex()} <= {'lo'}")
    finally:
        sandbox.GUARD = guarded
    assert outcome.passed, outcome.reason


def test_endless_code_times_out() -> None:
    start = time.perf_counter()
    assert execute("while True: pass", seconds=1).reason == "timed out after 1 s"
    assert execute("import time; time.sleep(60)", seconds=1).reason == "timed out after 1 s"
    assert time.perf_counter() - start < 20


def test_task_files_and_functions_agree() -> None:
    functions = {
        target.id
        for node in ast.parse((FOLDER / "functions.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in ast.walk(node)
        if isinstance(target, ast.Name)
    }
    for task in TASKS:
        text = (FOLDER / f"{task}.yaml").read_text(encoding="utf-8")
        assert f"task: moebudget_{task}\n" in text
        assert f"custom_dataset: !function functions.{task}_items\n" in text
        assert f"process_results: !function functions.{task}\n" in text
        assert {task, f"{task}_items"} <= functions
        assert ("unsafe_code: true" in text) == (task in ("humaneval", "mbpp"))
    assert len(list(FOLDER.glob("*.yaml"))) == len(TASKS)
