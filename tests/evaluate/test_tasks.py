from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget import attach, parse
from moebudget.core.counters import COUNTERS, Counters
from moebudget.evaluate import TaskResult, evaluate_tasks
from moebudget.evaluate.tasks import pack_lanes
from tests.calibrate.fitted import CASES, built, usual_stats
from tests.engines.transformers import tiny

FIRST = ord("Ā")  # letter of token 0
over_models = pytest.mark.parametrize("name", CASES)


class Letters:
    """One token per letter."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - FIRST for letter in text]}

    def __len__(self) -> int:
        return tiny.VOCAB


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    target: str


def letters(ids: Tensor) -> str:
    return "".join(chr(FIRST + int(i)) for i in ids)


def next_letter(letter: str) -> str:
    return chr(FIRST + (ord(letter) - FIRST + 1) % tiny.VOCAB)


@functools.cache
def questions(name: str, lengths: tuple[int, ...], prompt: int | None = None, start: int | None = None) -> Any:
    """(items, hits of native routing): every second target is what the model generates, the others differ in a token.

    `lengths` are the lengths of the answers. Prompts have 2 to 9 tokens, or `prompt`. `start` is put before them.
    """
    model, items, hits = built(name), [], []
    for i, length in enumerate(lengths):
        answer, seed = torch.empty(0), 100 * i
        while len(answer) < length or bool((answer == tiny.EOS).any()):  # an answer that the model would not end early
            seed += 1
            ids = tiny.prompts(1, 2 + i * 5 % 8 if prompt is None else prompt, seed)
            fed = ids if start is None else torch.cat([torch.tensor([[start]]), ids], 1)
            sequence = model.generate(fed, attention_mask=torch.ones_like(fed), max_new_tokens=length, do_sample=False)
            answer = sequence[0, fed.shape[1] :]
        target = letters(answer)
        if i % 2:
            wrong = i * 3 % length
            target = target[:wrong] + next_letter(target[wrong]) + target[wrong + 1 :]
        items.append(Question("abc"[i % 3], letters(ids[0]), target))
        hits.append(i % 2 == 0)
    return items, hits


MIXED = (1, 3, 6, 2, 1, 17, 4, 20, 1, 1, 5, 2, 3, 18, 2, 1)


def evaluate(name: str, items: list[Question], *policies: str, **settings: Any) -> list[TaskResult]:
    usual = {"batch": 4, "quiet": True, **settings}
    return evaluate_tasks(built(name), [parse(p) for p in policies], usual_stats(name), items, Letters(), **usual)


# ---- lanes


@pytest.mark.parametrize("lanes", [1, 3, 4, 11])
def test_every_answer_token_is_decoded_once_and_in_order(lanes: int) -> None:
    lengths, width = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 1], 6
    steps = pack_lanes(lengths, lanes, width)
    rows = steps[steps >= 0].tolist()
    assert sorted(rows) == [i * width + j for i, n in enumerate(lengths) for j in range(n)]
    when = {row: s for s, step in enumerate(steps.tolist()) for row in step if row >= 0}
    for i, n in enumerate(lengths):
        first = when[i * width]
        assert [when[i * width + j] for j in range(n)] == list(range(first, first + n))
    for lane in steps.T.tolist():
        items = [row // width for row in lane if row >= 0]
        assert items == sorted(items)


@pytest.mark.parametrize("lanes", [1, 3, 4, 11])
def test_no_step_holds_two_tokens_of_one_answer(lanes: int) -> None:
    steps = pack_lanes([3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 1], lanes, 6)
    for step in steps.tolist():
        items = [row // 6 for row in step if row >= 0]
        assert len(items) == len(set(items))


@pytest.mark.parametrize("lengths", [[3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 1], [6, 1, 1, 1] * 4, [1] * 9])
def test_batch_is_full_until_the_last_answer_has_begun(lengths: list[int]) -> None:
    steps = pack_lanes(lengths, 4, 6)
    busy = (steps >= 0).sum(-1).tolist()
    last_begins = int((steps == 6 * (len(lengths) - 1)).any(-1).nonzero())
    assert all(n == 4 for n in busy[:last_begins])
    assert busy == sorted(busy, reverse=True)


# ---- native answers


@over_models
@pytest.mark.parametrize("batch", [1, 4, 100])
def test_native_hits_equal_greedy_generation(name: str, batch: int) -> None:
    items, hits = questions(name, MIXED)
    (result,) = evaluate(name, items, "native", batch=batch)
    assert result.hits.tolist() == hits
    assert result.tasks == tuple(item.task for item in items)
    assert result.counters.totals["rows"] == sum(MIXED) * result.counters.layers


@over_models
def test_start_token_is_put_before_every_prompt(name: str) -> None:
    items, hits = questions(name, (2, 3, 1, 4), start=63)
    (result,) = evaluate(name, items, "native", start_id=63)
    assert result.hits.tolist() == hits
    (without,) = evaluate(name, items, "native")
    assert without.hits.tolist() != hits


@over_models
def test_budget_of_all_experts_gives_native_hits(name: str) -> None:
    items, hits = questions(name, MIXED)
    for result in evaluate(name, items, *(f"{rule}:budget={tiny.EXPERTS}" for rule in ("base", "squared", "oracle"))):
        assert result.hits.tolist() == hits
        assert result.counters.fetched == result.counters.native_union


@over_models
def test_wrong_token_anywhere_is_a_miss(name: str) -> None:
    (item,), hits = questions(name, (6,))
    assert hits == [True]
    wrong = [
        Question("a", item.prompt, item.target[:i] + next_letter(item.target[i]) + item.target[i + 1 :])
        for i in range(6)
    ]
    (result,) = evaluate(name, [*wrong, item], "native")
    assert result.hits.tolist() == [False] * 6 + [True]


# ---- answers under a policy


def decode(name: str, policy: str, items: list[Question]) -> tuple[list[bool], Counters]:
    """Answer items of equal lengths, four at a time: native prefill, then decode steps with a key-value cache."""
    model, hits = built(name), list[bool]()
    with attach(model, policy, usual_stats(name), finished_ids=frozenset()) as run:
        for start in range(0, len(items), 4):
            part = items[start : start + 4]
            prompts, targets = (
                torch.tensor([Letters()(text, add_special_tokens=False)["input_ids"] for text in texts])
                for texts in ([i.prompt for i in part], [i.target for i in part])
            )
            _, cache = tiny.forward(model, prompts[:, :-1])
            fed, right = torch.cat([prompts[:, -1:], targets[:, :-1]], 1), torch.ones(len(part), dtype=torch.bool)
            for j in range(targets.shape[1]):
                logits, cache = tiny.forward(model, fed[:, j : j + 1], cache)
                right &= logits[:, 0].argmax(-1) == targets[:, j]
            hits += right.tolist()
        return hits, run.counters


@over_models
@pytest.mark.parametrize("policy", ["base:budget=4", "squared:budget=2", "topk:k=1", "oea:k0=1"])
@pytest.mark.parametrize("length", [1, 2])
def test_answers_are_decoded_under_the_policy(name: str, policy: str, length: int) -> None:
    items, native = questions(name, (length,) * 16, prompt=6)
    (result,) = evaluate(name, items, policy)
    hits, counters = decode(name, policy, items)
    assert result.hits.tolist() == hits
    assert result.hits.tolist() != native  # the policy has an effect
    for field in COUNTERS:
        assert result.counters.totals[field] == pytest.approx(counters.totals[field], abs=1e-3), field


@over_models
def test_policy_applies_to_answers_of_one_token(name: str) -> None:
    items, native = questions(name, (1,) * 24)
    for budget in (1, 2):
        (result,) = evaluate(name, items, f"squared:budget={budget}")
        assert result.counters.fetched == budget
        assert result.counters.steps == 6
        assert result.counters.totals["rows"] == 24 * result.counters.layers
        assert result.hits.tolist() != native


@over_models
def test_left_padding_changes_no_hit(name: str) -> None:
    """A row-wise policy gives an item the same answer alone and beside longer prompts."""
    items, native = questions(name, MIXED)
    (together,) = evaluate(name, items, "topk:k=2")
    assert together.hits.tolist() == [bool(evaluate(name, [item], "topk:k=2")[0].hits[0]) for item in items]
    assert together.hits.tolist() != native


@over_models
def test_chunk_size_changes_nothing(name: str) -> None:
    """For row-wise policies always; for others if a chunk holds whole batches of answers of equal length."""
    items, _ = questions(name, MIXED)
    policies = ("native", "topk:k=2")
    for chunked, whole in zip(*(evaluate(name, items, *policies, chunk=chunk) for chunk in (3, 96)), strict=True):
        assert chunked.hits.tolist() == whole.hits.tolist()
    short, _ = questions(name, (1,) * 24)
    policies = ("base:budget=2", "oracle:budget=2")
    for chunked, whole in zip(*(evaluate(name, short, *policies, chunk=chunk) for chunk in (8, 96)), strict=True):
        assert chunked.hits.tolist() == whole.hits.tolist()
        assert chunked.counters.totals == pytest.approx(whole.counters.totals, rel=1e-5)


def test_policies_share_a_prefill_without_changing_it() -> None:
    items, hits = questions("qwen3_moe", MIXED)
    first, second, third = evaluate("qwen3_moe", items, "native", "squared:budget=1", "native")
    assert first.hits.tolist() == third.hits.tolist() == hits
    assert second.hits.tolist() != hits


@pytest.mark.parametrize(("prompt", "target"), [("ĂĄ", ""), ("Ă", "ă"), ("", "ă")])
def test_error_for_an_item_that_cannot_be_decoded_names_it(prompt: str, target: str) -> None:
    with pytest.raises(ValueError, match=f"task item '{prompt}' -> '{target}': the prompt needs at least 2 tokens"):
        evaluate("qwen3_moe", [Question("a", prompt, target)], "native")


# ---- averages


def result_of(**hits: tuple[int, int]) -> TaskResult:
    """TaskResult with (correct, all) items for each task."""
    tasks = tuple(task for task, (_, n) in hits.items() for _ in range(n))
    flags = [i < right for right, n in hits.values() for i in range(n)]
    return TaskResult(parse("native"), torch.tensor(flags), tasks, Counters(1, dict.fromkeys(COUNTERS, 1.0)))


def test_tasks_weigh_the_same_whatever_their_number_of_items() -> None:
    result = result_of(a=(3, 4), b=(10, 100))
    assert result.accuracy == pytest.approx({"a": 75.0, "b": 10.0})
    assert result.average == pytest.approx(42.5)


@pytest.mark.parametrize("right", [0, 1000])
def test_interval_is_not_empty_if_all_items_agree(right: int) -> None:
    assert 0.05 < result_of(a=(right, 1000)).half_width < 0.5
    assert result_of(a=(right // 100, 10)).half_width > 5


def test_interval_is_binomial() -> None:
    assert result_of(a=(500, 1000)).half_width == pytest.approx(196 * math.sqrt(0.25 / 1000), rel=1e-3)
    both = math.hypot(result_of(a=(300, 1000)).half_width, result_of(b=(50, 400)).half_width) / 2
    assert result_of(a=(300, 1000), b=(50, 400)).half_width == pytest.approx(both)


def test_batch_drains_without_refill() -> None:
    """Lengths 3, 1, 2, 2, 1 in two lanes: pairs start together and wait for each other."""
    steps = pack_lanes([3, 1, 2, 2, 1], 2, 4, refill=False)
    assert steps.tolist() == [[0, 4], [1, -1], [2, -1], [8, 12], [9, 13], [16, -1]]
    assert len(pack_lanes([3, 1, 2, 2, 1], 2, 4)) == 5
