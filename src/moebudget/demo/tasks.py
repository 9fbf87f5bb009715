"""Nine synthetic tasks with exact answers, for language models of a few million parameters.

Every item has a canonical key (`add:37:58` with sorted operands, a template number plus its operands for a word
problem, the expression itself for code). A hash of the key decides whether the item belongs to train, test or
few-shot, so the parts are disjoint for every seed and size. Worked solutions (tasks `chain` and `word`) also contain
facts with keys, and a training item with a held-out fact is dropped. Facts with both operands below ten are always
training items.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from moebudget.core.provenance import json_lines
from moebudget.demo.items import ANIMALS, COLORS, ITEMS, Rng, TaskItem
from moebudget.demo.stories import make_boolq, make_word

END_OF_TEXT = "<|endoftext|>"
TEST_PERMILLE, FEWSHOT_PERMILLE = 34, 6


def split_of(key: str) -> str:
    """The part of an item, `train`, `test` or `fewshot`, by its key alone."""
    parts = key.split(":")
    if parts[0] in ("add", "sub", "mul", "cmp") and int(parts[1]) < 10 and int(parts[2]) < 10:
        return "train"
    bucket = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") % 1000
    if bucket < TEST_PERMILLE:
        return "test"
    return "fewshot" if bucket < TEST_PERMILLE + FEWSHOT_PERMILLE else "train"


def step_keys(text: str) -> list[str]:
    """Keys of every fact `a op b = c` in a worked solution."""
    steps = re.findall(r"(?<![\d-])(-?\d+) ([+*-]) (-?\d+)(?= =)", text)
    names = {"+": "add", "-": "sub", "*": "mul"}
    return [_pair(names[op], abs(int(a)), abs(int(b))) for a, op, b in steps]


def _pair(name: str, a: int, b: int) -> str:
    return f"{name}:{min(a, b)}:{max(a, b)}"


def _number(rng: Rng, digits: int) -> int:
    return rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - 1)


def _sum_digits(rng: Rng) -> tuple[int, int]:
    digits = rng.choices([1, 2, 3, 4], [1, 4, 4, 3])[0]
    return digits, rng.choices([digits, max(1, digits - 1)], [3, 1])[0]


def make_add(rng: Rng) -> TaskItem:
    digits_a, digits_b = _sum_digits(rng)
    a, b = _number(rng, digits_a), _number(rng, digits_b)
    if rng.random() < 0.5:
        a, b = b, a
    return TaskItem("add", f"question: {a} + {b} = answer:", f" {a + b}", None, _pair("add", a, b))


def make_sub(rng: Rng) -> TaskItem:
    digits = rng.choices([1, 2, 3, 4], [1, 4, 4, 3])[0]
    a = _number(rng, digits)
    b = _number(rng, rng.choices([digits, max(1, digits - 1)], [3, 1])[0])
    if rng.random() < 0.75 and a < b:
        a, b = b, a
    return TaskItem("sub", f"question: {a} - {b} = answer:", f" {a - b}", None, _pair("sub", a, b))


def make_mul(rng: Rng) -> TaskItem:
    digits_a, digits_b = rng.choices([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1)], [1, 4, 4, 3, 2])[0]
    a, b = _number(rng, digits_a), _number(rng, digits_b)
    if rng.random() < 0.5:
        a, b = b, a
    return TaskItem("mul", f"question: {a} * {b} = answer:", f" {a * b}", None, _pair("mul", a, b))


def make_chain(rng: Rng) -> TaskItem:
    a, b, c = _number(rng, rng.randint(1, 2)), _number(rng, rng.randint(1, 2)), _number(rng, 1)
    form = rng.randrange(4)
    if form == 0:
        expr, value, steps = f"{a} + {b} - {c}", a + b - c, f"{a} + {b} = {a + b}, {a + b} - {c} = {a + b - c}"
    elif form == 1:
        expr, value, steps = f"{a} + {b} * {c}", a + b * c, f"{b} * {c} = {b * c}, {a} + {b * c} = {a + b * c}"
    elif form == 2:
        expr, value = f"({a} + {b}) * {c}", (a + b) * c
        steps = f"{a} + {b} = {a + b}, {a + b} * {c} = {value}"
    else:
        expr, value, steps = f"{a} - {b} + {c}", a - b + c, f"{a} - {b} = {a - b}, {a - b} + {c} = {a - b + c}"
    return TaskItem("chain", f"question: {expr} = answer:", f" {steps}. #### {value}", None, f"chain:{expr}")


def make_string(rng: Rng) -> TaskItem:
    length = rng.randint(3, 7)
    word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))
    form, spaced = rng.randrange(5), " ".join(word)
    name, ask, target = (
        ("rev", "Reverse the letters", " ".join(word[::-1])),
        ("up", "Write in capitals", " ".join(word.upper())),
        ("first", "First and last letter", f"{word[0]} {word[-1]}"),
        ("sort", "Sort the letters", " ".join(sorted(word))),
        ("len", "How many letters", str(length)),
    )[form]
    return TaskItem("string", f"{ask}: {spaced} ->", f" {target}", None, f"{name}:{word}")


def _code_expression(rng: Rng) -> str:
    form = rng.randrange(9)
    if form == 0:
        xs = [rng.randint(0, 20) for _ in range(rng.randint(2, 6))]
        return f"{rng.choice(['max', 'min', 'len', 'sum', 'sorted'])}({xs})"
    if form in (1, 2):
        xs = [rng.randint(0, 20) for _ in range(rng.randint(3, 6))]
        if form == 1:
            return f"{xs}[{rng.randrange(-2, len(xs))}]"
        start = rng.randint(0, 2)
        return f"{xs}[{start}:{rng.randint(start + 1, len(xs))}]"
    if form == 3:
        a, b = rng.randint(2, 60), rng.randint(2, 9)
        return rng.choice([f"{a} % {b}", f"{a} // {b}", f"{a} * {b}", f"{a} - {b} * 2"])
    if form == 4:
        stop = rng.randint(1, 8)
        return f"[x * {rng.randint(2, 5)} for x in range({stop})]"
    if form == 5:
        w = rng.choice(ANIMALS + COLORS + ITEMS)
        plain = [f"'{w}'.upper()", f"len('{w}')", f"'{w}'[0]", f"'{w}'[-1]", f"'{w}'[1:3]"]
        return rng.choice([*plain, f"'{w}' * {rng.randint(2, 3)}", f"'{w}' + '{rng.choice(ANIMALS)}'"])
    if form == 6:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        return f"{a} {rng.choice(['<', '>', '==', '<=', '!='])} {b}"
    if form == 7:
        a, b = rng.randint(0, 30), rng.randint(0, 30)
        return f"{a} > {rng.randint(0, 30)} {rng.choice(['and', 'or'])} {b} < {rng.randint(0, 30)}"
    xs = [rng.randint(0, 20) for _ in range(rng.randint(2, 5))]
    return f"{xs} + [{rng.randint(0, 20)}]"


def make_code(rng: Rng) -> TaskItem:
    expr = _code_expression(rng)
    builtins = {"max": max, "min": min, "len": len, "sum": sum, "sorted": sorted, "range": range}
    value = eval(expr, {"__builtins__": {}}, builtins)  # the expression is built above, from literals alone
    return TaskItem("code", f">>> {expr}\n", repr(value), None, f"code:{expr}")


def make_compare(rng: Rng) -> TaskItem:
    digits = rng.randint(1, 4)
    a, b = _number(rng, digits), _number(rng, rng.choice([digits, digits, max(1, digits - 1)]))
    if a == b:
        b += 1
    prompt = f"question: which is larger, {a} or {b}? answer:"
    return TaskItem("compare", prompt, f" {max(a, b)}", (f" {a}", f" {b}"), _pair("cmp", a, b))


def makers() -> dict[str, tuple[Callable[[Rng], TaskItem], float]]:
    """Task name -> (maker, share of the training bytes)."""
    return {
        "add": (make_add, 1.6),
        "sub": (make_sub, 1.4),
        "mul": (make_mul, 1.6),
        "chain": (make_chain, 1.2),
        "word": (make_word, 2.2),
        "boolq": (make_boolq, 2.2),
        "string": (make_string, 1.1),
        "code": (make_code, 1.2),
        "compare": (make_compare, 0.5),
    }


def held_out(part: str, per_task: int, seed: int = 0) -> list[TaskItem]:
    """`per_task` distinct items of every task from the part `test` or `fewshot`, determined by the seed."""
    if part not in ("test", "fewshot"):
        raise ValueError(f"unknown part {part!r}: the held-out parts are 'test' and 'fewshot'")
    items: list[TaskItem] = []
    for task, (make, _) in makers().items():
        rng, by_key = random.Random(f"{seed}-test-{task}"), dict[str, TaskItem]()
        while len(by_key) < per_task:
            item = make(rng)
            if split_of(item.key) == part:
                by_key.setdefault(item.key, item)
        items += by_key.values()
    return items


def training_documents(total_bytes: int, seed: int = 0) -> Iterator[str]:
    """Documents of one to twelve items of one task, about `total_bytes` in all, divided among the tasks by weight."""
    rng, table, size = random.Random(f"{seed}-train"), makers(), Counter[str]()
    while size.total() < total_bytes:
        task = min(table, key=lambda name: size[name] / table[name][1])
        count = rng.choice([1, 2, 4, 6, 8, 12]) if task != "boolq" else rng.choice([1, 1, 2, 3])
        lines: list[str] = []
        while len(lines) < count:
            item = table[task][0](rng)
            text = item.prompt + item.target
            worked = step_keys(text) if task in ("chain", "word") else []
            if all(split_of(key) == "train" for key in (item.key, *worked)):
                lines.append(text)
        document = ("\n\n" if task in ("word", "boolq") else "\n").join(lines)
        size[task] += len(document)
        yield document


def save_items(items: list[TaskItem], path: Path) -> None:
    rows = ({"task": i.task, "prompt": i.prompt, "target": i.target, "choices": i.choices} for i in items)
    lines = [json.dumps({k: v for k, v in row.items() if v is not None}, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load_items(path: Path) -> list[TaskItem]:
    """Read the format of `save_items`. Raises ValueError that names the line which is not an item."""
    items = []
    for where, row in json_lines(path):
        try:
            choices = tuple(row["choices"]) if "choices" in row else None
            items.append(TaskItem(row["task"], row["prompt"], row["target"], choices))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where}: not a task item with task, prompt, target ({error})") from error
    return items
