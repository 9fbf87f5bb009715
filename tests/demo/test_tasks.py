"""The demo's synthetic tasks: correct answers, disjoint parts, and files of items."""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from moebudget.demo.tasks import (
    TaskItem,
    held_out,
    load_items,
    makers,
    save_items,
    split_of,
    step_keys,
    training_documents,
)

GOLDEN = "a905b093bea45537b3002956dbff60b5a0e1dab5b7c49c275b590956c3547857"  # of the saved test items, 300 per task
TRAINING_BYTES = 600_000

# Beginning of an item of each task, by which training documents are recognised.
PATTERNS = {
    "add": r"question: \d+ \+ \d+ = answer:",
    "sub": r"question: \d+ - \d+ = answer:",
    "mul": r"question: \d+ \* \d+ = answer:",
    "chain": r"question: \(?\d+ [+-] \d+\)? [+*-] \d+ = answer:",
    "word": r"Question: [A-Z]",
    "boolq": r"[A-Z][a-z]+ (?:is in the \w+|has a \w+ \w+|is \d+ years old)\.",
    "string": r"[A-Z][A-Za-z ]+: [a-z]( [a-z])+ ->",
    "code": r">>> ",
    "compare": r"question: which is larger, \d+ or \d+\? answer:",
}


@pytest.fixture(scope="module")
def items() -> list[TaskItem]:
    return held_out("test", 300)


@pytest.fixture(scope="module")
def documents() -> list[str]:
    return list(training_documents(TRAINING_BYTES))


def of(items: list[TaskItem], task: str) -> list[TaskItem]:
    of_task = [item for item in items if item.task == task]
    assert of_task
    return of_task


def task_of(document: str) -> str:
    tasks = [task for task, pattern in PATTERNS.items() if re.match(pattern, document)]
    assert len(tasks) == 1, document[:200]
    return tasks[0]


def facts(text: str) -> list[tuple[str, int, int]]:
    """Every fact `a op b =` in a worked solution: (op, a, b)."""
    return [(op, int(a), int(b)) for a, op, b in re.findall(r"(-?\d+) ([-+*]) (-?\d+) = -?\d", text)]


def parts_of(pattern: str, text: str) -> tuple[str, ...]:
    """The groups of a pattern that the whole text must have."""
    match = re.fullmatch(pattern, text)
    assert match is not None, text
    return match.groups()


def calculate(op: str, a: int, b: int) -> int:
    return {"+": operator.add, "-": operator.sub, "*": operator.mul}[op](a, b)


def test_test_items_are_those_of_the_published_numbers(items: list[TaskItem], tmp_path: Path) -> None:
    save_items(items, tmp_path / "items.jsonl")
    assert len(items) == 2700
    assert hashlib.sha256((tmp_path / "items.jsonl").read_bytes()).hexdigest() == GOLDEN


def test_smaller_set_is_the_beginning_of_a_larger_one(items: list[TaskItem]) -> None:
    few = held_out("test", 20)
    assert few == [item for task in makers() for item in of(items, task)[:20]]


def test_items_of_a_part_are_distinct_and_of_that_part(items: list[TaskItem]) -> None:
    assert Counter(item.task for item in items) == dict.fromkeys(makers(), 300)
    assert len({item.key for item in items}) == len(items)
    assert {split_of(item.key) for item in items} == {"test"}


def test_test_and_fewshot_items_share_no_question(items: list[TaskItem]) -> None:
    fewshot = held_out("fewshot", 20, seed=3)
    assert not {item.prompt for item in fewshot} & {item.prompt for item in items}
    assert not {item.key for item in fewshot} & {item.key for item in items}


def test_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown part 'train': the held-out parts are 'test' and 'fewshot'"):
        held_out("train", 3)


def test_training_documents_contain_no_test_question(items: list[TaskItem], documents: list[str]) -> None:
    text = "\n".join(documents)
    asked = {line for document in documents for line in document.split("\n")}
    for item in items:
        if item.task in ("word", "boolq"):
            assert item.prompt not in text
        elif item.task == "code":
            assert item.prompt.strip() not in asked
        else:
            assert not any(item.prompt + target in asked for target in (item.target, *(item.choices or ())))


def test_sums_and_products_are_held_out_in_both_orders(items: list[TaskItem], documents: list[str]) -> None:
    """Because 7 + 85 gives away 85 + 7."""
    for task in ("add", "sub", "mul", "compare"):
        pairs = [frozenset(re.findall(r"\d+", item.prompt)) for item in of(items, task)]
        asked = [
            frozenset(re.findall(r"\d+", line.split("answer:")[0]))
            for document in documents
            if task_of(document) == task
            for line in document.split("\n")
        ]
        assert len(asked) > 300
        assert not set(pairs) & set(asked), task


def test_training_solutions_contain_no_held_out_fact(documents: list[str]) -> None:
    names = {"+": "add", "-": "sub", "*": "mul"}
    checked = 0
    for document in documents:
        if task_of(document) not in ("chain", "word"):
            continue
        for op, a, b in facts(document):
            low, high = sorted((abs(a), abs(b)))
            assert split_of(f"{names[op]}:{low}:{high}") == "train", document
            checked += 1
    assert checked > 2000


def test_step_keys_are_those_of_the_single_facts() -> None:
    text = "question: 3 - 9 + 12 = answer: 3 - 9 = -6, -6 + 12 = 6. #### 6"
    assert step_keys(text) == ["add:9:12", "sub:3:9", "add:6:12"]
    assert step_keys("so 4 * 31 = 124. Each friend gets 124 / 4 = 31") == ["mul:4:31"]


@pytest.mark.parametrize("key", ["add:3:9", "sub:0:0", "mul:7:8", "cmp:1:2"])
def test_facts_of_single_digits_are_always_trained(key: str) -> None:
    assert split_of(key) == "train"


def test_parts_have_their_stated_sizes() -> None:
    parts = Counter(split_of(f"add:{a}:{b}") for a in range(10, 210) for b in range(300, 500))
    assert parts["test"] / parts.total() == pytest.approx(0.034, abs=0.004)
    assert parts["fewshot"] / parts.total() == pytest.approx(0.006, abs=0.002)


def test_training_bytes_are_divided_by_weight(documents: list[str]) -> None:
    sizes = Counter[str]()
    for document in documents:
        sizes[task_of(document)] += len(document)
    weights = {task: weight for task, (_, weight) in makers().items()}
    largest = max(map(len, documents))
    for task, weight in weights.items():
        assert abs(sizes[task] - sizes.total() * weight / sum(weights.values())) < 2 * largest, task
    assert TRAINING_BYTES <= sizes.total() < TRAINING_BYTES + largest


def test_document_holds_items_of_one_task(documents: list[str]) -> None:
    for document in documents:
        task = task_of(document)
        if task in ("add", "sub", "mul", "chain", "compare", "string"):
            assert {task_of(line) for line in document.split("\n")} == {task}


def test_training_text_follows_its_seed() -> None:
    texts = ["\0".join(training_documents(20_000, seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_sums_differences_and_products_are_correct(items: list[TaskItem]) -> None:
    for task, op in (("add", "+"), ("sub", "-"), ("mul", "*")):
        for item in of(items, task):
            a, written, b = parts_of(r"question: (\d+) (.) (\d+) = answer:", item.prompt)
            assert written == op
            assert item.target == f" {calculate(op, int(a), int(b))}"


def test_chains_have_correct_solutions(items: list[TaskItem]) -> None:
    for item in of(items, "chain"):
        (expression,) = parts_of(r"question: ([0-9+*() -]+) = answer:", item.prompt)
        value = eval(expression)
        steps, answer = parts_of(r" (.+)\. #### (-?\d+)", item.target)
        assert int(answer) == value
        parts = [parts_of(r"(-?\d+) ([+*-]) (-?\d+) = (-?\d+)", step) for step in steps.split(", ")]
        assert len(parts) == 2
        for a, op, b, result in parts:
            assert calculate(op, int(a), int(b)) == int(result), item
        assert int(parts[-1][3]) == value


def test_larger_number_is_the_answer(items: list[TaskItem]) -> None:
    for item in of(items, "compare"):
        a, b = map(int, re.findall(r"\d+", item.prompt))
        assert a != b
        assert item.target == f" {max(a, b)}"
        assert item.choices == (f" {a}", f" {b}")


def test_word_problems_have_correct_solutions(items: list[TaskItem]) -> None:
    for item in of(items, "word"):
        worked, answer = parts_of(r" (.+) #### (-?\d+)", item.target)
        chains = re.findall(r"((?:-?\d+ [-+*/] )+-?\d+) = (-?\d+)", worked)
        assert chains, item
        for expression, value in chains:
            assert eval(expression) == int(value), item
        assert chains[-1][1] == answer, item


def test_yes_and_no_follow_from_the_passage(items: list[TaskItem]) -> None:
    answers = Counter[str]()
    for item in of(items, "boolq"):
        passage, question = parts_of(r"(.+)\nQuestion: (.+)\?\nAnswer:", item.prompt)
        words = question.split()
        if words[-2] == "than":
            ages = {name: int(age) for name, age in re.findall(r"(\w+) is (\d+) years old", passage)}
            truth = ages[words[1]] > ages[words[-1]]
        elif words[0] == "does":
            truth = re.search(rf"{words[1]} has a \w+ {words[-1]}\.", passage) is not None
        elif words[2] == "in":
            truth = f"{words[1]} is in the {words[-1]}." in passage
        else:
            truth = f"{words[-2]} has a {words[-1]} " in passage
        assert item.target == (" yes" if truth else " no"), item
        answers[item.target] += 1
    assert min(answers.values()) > 100


def test_letter_tasks_have_correct_answers(items: list[TaskItem]) -> None:
    for item in of(items, "string"):
        ask, word = parts_of(r"(.+): (.+) ->", item.prompt)
        letters = word.split(" ")
        answer = {
            "Reverse the letters": letters[::-1],
            "Write in capitals": [letter.upper() for letter in letters],
            "First and last letter": [letters[0], letters[-1]],
            "Sort the letters": sorted(letters),
            "How many letters": [str(len(letters))],
        }[ask]
        assert item.target == " " + " ".join(answer)


def test_code_items_have_the_printed_value(items: list[TaskItem]) -> None:
    for item in of(items, "code"):
        (expression,) = parts_of(r">>> (.+)\n", item.prompt)
        assert repr(eval(expression)) == item.target


def test_items_survive_a_file(items: list[TaskItem], tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    few = [*random.Random(0).sample(items, 30), TaskItem("own", "Grüße\n", " 你好")]
    save_items(few, path)
    read = load_items(path)
    fields = [(i.task, i.prompt, i.target, i.choices) for i in few]
    assert [(i.task, i.prompt, i.target, i.choices) for i in read] == fields


@pytest.mark.parametrize("line", ['{"task": "add", "prompt": "1 + 1"}', "3", '{"task": "a", "choices": 3}'])
def test_line_that_is_not_an_item_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_text(f'{{"task": "add", "prompt": "1 + 1 =", "target": " 2"}}\n{line}\n')
    with pytest.raises(ValueError, match=r"items\.jsonl, line 2: not a task item with task, prompt, target"):
        load_items(path)
