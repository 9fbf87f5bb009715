"""Constant-batch decoding and log-likelihoods, against generate(), teacher forcing and single rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from moebudget import attach, parse
from moebudget.evaluate import evaluate_tasks
from moebudget.evaluate.decode import Decoded, Request, UnsupportedCacheError, decode
from moebudget.evaluate.likelihood import score_continuations
from tests.calibrate.fitted import CASES, built, usual_stats
from tests.engines.transformers import tiny

FIRST = ord("Ā")  # letter of token 0
LENGTHS = (7, 3, 5, 1, 9, 2, 6, 4, 1, 5, 8)
BATCH = 3
over_models = pytest.mark.parametrize("name", CASES)


class Letters:
    """One token per letter; no token ends a text."""

    eos_token_id = None

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(letter) - FIRST for letter in text]}

    def __len__(self) -> int:
        return tiny.VOCAB

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(FIRST + i) for i in ids)


@dataclass(frozen=True)
class Question:
    task: str
    prompt: str
    target: str


def prompt(number: int) -> tuple[int, ...]:
    return tuple(tiny.prompts(1, 2 + number * 5 % 8, 100 + number)[0].tolist())


REQUESTS = [Request(prompt(i), most) for i, most in enumerate(LENGTHS)]


@pytest.fixture(autouse=True)
def no_end_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CASES:
        monkeypatch.setattr(built(name).generation_config, "eos_token_id", None)


def run(name: str, policy: str, requests: list[Request] = REQUESTS, **settings: Any) -> Decoded:
    usual = {"batch": BATCH, "quiet": True, **settings}
    return decode(built(name), parse(policy), usual_stats(name), requests, Letters(), **usual)


@over_models
@pytest.mark.parametrize("constant", [True, False])
def test_native_answers_equal_generate_for_single_rows(name: str, constant: bool) -> None:
    decoded = run(name, "native", constant=constant)
    for request, answer in zip(REQUESTS, decoded.tokens, strict=True):
        ids = torch.tensor([request.prompt])
        alone = built(name).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.most, do_sample=False, eos_token_id=None
        )
        assert answer == alone[0, ids.shape[1] :].tolist()


@over_models
@pytest.mark.parametrize("policy", ["base:budget=3", "oea:k0=1"])
@pytest.mark.parametrize("constant", [True, False])
def test_batches_equal_those_of_teacher_forcing(name: str, policy: str, constant: bool) -> None:
    decoded = run(name, policy, constant=constant)
    letters = Letters()
    items = [
        Question("a", letters.decode(list(r.prompt), True), letters.decode(answer, True))
        for r, answer in zip(REQUESTS, decoded.tokens, strict=True)
    ]
    (forced,) = evaluate_tasks(
        built(name), [parse(policy)], usual_stats(name), items, letters, batch=BATCH, refill=constant, quiet=True
    )
    assert forced.hits.all()
    assert decoded.counters.totals == pytest.approx(forced.counters.totals)
    assert run(name, "native").tokens != decoded.tokens  # the policy has an effect


def test_batch_is_full_while_requests_wait() -> None:
    constant = run("qwen3_moe", "squared:budget=3")
    assert constant.full is not None
    assert constant.tail is not None
    assert constant.full.rows == BATCH
    assert constant.tail.rows < BATCH
    assert constant.full.steps * BATCH + constant.tail.rows * constant.tail.steps == sum(LENGTHS)
    draining = run("qwen3_moe", "squared:budget=3", constant=False)
    assert draining.full is not None
    assert draining.full.steps == 3 + 1 + 1  # the shortest of every three; the last two requests never fill the batch
    few = run("qwen3_moe", "squared:budget=3", REQUESTS[:2])
    assert few.full is None
    even = run("qwen3_moe", "squared:budget=3", [Request(prompt(i), 4) for i in range(BATCH)])
    assert even.tail is None


def test_cache_drops_columns_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths = built("qwen3_moe"), []
    step = type(model).forward

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        widths.append(kwargs["attention_mask"].shape[1])
        return step(self, *args, **kwargs)

    watched.__signature__ = __import__("inspect").signature(step)  # type: ignore[attr-defined]
    monkeypatch.setattr(type(model), "forward", watched)
    run("qwen3_moe", "native", REQUESTS * 4)
    assert max(widths) <= max(len(r.prompt) + r.most for r in REQUESTS)


def test_answers_end_at_stops_and_end_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    complete = run("qwen3_moe", "native")
    whole, text = complete.tokens[4], complete.texts[4]
    stops = [Request(r.prompt, r.most, (text[3:5],)) if i == 4 else r for i, r in enumerate(REQUESTS)]
    stopped = run("qwen3_moe", "native", stops)
    assert stopped.texts[4] == text[: text.index(text[3:5])]
    assert len(stopped.tokens[4]) == text.index(text[3:5]) + 2
    monkeypatch.setattr(built("qwen3_moe").generation_config, "eos_token_id", [whole[2]])
    ended = run("qwen3_moe", "native")
    assert ended.tokens[4] == whole[: whole.index(whole[2]) + 1]
    assert ended.texts[4] == Letters().decode(whole[: whole.index(whole[2])], True)


def test_cache_that_cannot_be_refilled_only_drains() -> None:
    model = tiny.build(tiny.available("gpt_oss"))
    with pytest.raises(UnsupportedCacheError, match=r"DynamicSlidingWindowLayer.*constant=False"):
        decode(model, parse("topk:k=1"), None, REQUESTS, Letters(), batch=BATCH, quiet=True)
    drained = decode(model, parse("topk:k=1"), None, REQUESTS, Letters(), batch=BATCH, constant=False, quiet=True)
    assert all(1 <= len(answer) <= most for answer, most in zip(drained.tokens, LENGTHS, strict=True))


@pytest.mark.parametrize("request_", [Request((5,), 3), Request((5, 6), 0)])
def test_requests_without_a_decode_step_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="at least 2 prompt tokens and 1 token to generate"):
        run("qwen3_moe", "native", [request_])
    with pytest.raises(ValueError, match="no requests"):
        run("qwen3_moe", "native", [])


PAIRS = [(prompt(i), prompt(20 + i)[: 1 + i % 3]) for i in range(8)]


@functools.cache
def alone(name: str, policy: str, pair: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[float, bool]:
    """A single pair, step by step with a cache: the last token of the context is the first decode step."""
    context, continuation = pair
    total, greedy = 0.0, True
    with attach(built(name), policy, usual_stats(name), finished_ids=frozenset()), torch.no_grad():
        _, cache = tiny.forward(built(name), torch.tensor([context[:-1]]))
        for fed, wanted in zip([context[-1], *continuation[:-1]], continuation, strict=True):
            logits, cache = tiny.forward(built(name), torch.tensor([[fed]]), cache)
            total += float(logits[0, 0].double().log_softmax(-1)[wanted])
            greedy &= int(logits[0, 0].argmax()) == wanted
    return total, greedy


@over_models
@pytest.mark.parametrize("policy", ["native", "squared:budget=2", "base:budget=2"])
def test_likelihoods_are_scored_in_decode_steps(name: str, policy: str) -> None:
    scores, counters = score_continuations(built(name), parse(policy), usual_stats(name), PAIRS, batch=1, quiet=True)
    for (value, greedy), pair in zip(scores, PAIRS, strict=True):
        expected, expected_greedy = alone(name, policy, pair)
        assert value == pytest.approx(expected, abs=1e-4)
        assert greedy == expected_greedy
    assert counters.steps == sum(len(continuation) for _, continuation in PAIRS)


def test_choices_of_a_question_share_a_row() -> None:
    letters = [(prompt(1), (token,)) for token in range(8, 12)] + [(prompt(2), (9,))]
    scores, counters = score_continuations(built("qwen3_moe"), parse("native"), None, letters, batch=4, quiet=True)
    assert (counters.steps, counters.rows) == (1, 2)
    expected = [alone("qwen3_moe", "native", pair)[0] for pair in letters]
    assert [value for value, _ in scores] == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ValueError, match="2 tokens of context"):
        score_continuations(built("qwen3_moe"), parse("native"), None, [((1,), (2,))], quiet=True)
