"""Teacher forcing: all positions at once must equal decoding one position at a time with a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget import attach

from .tiny import CASES, EOS, PAD, POISON, Call, available, build, forward, generate, passes, prompts, recorded

every_case = pytest.mark.parametrize("name", CASES)
LENGTH = 14
PREFILL = (4, 4, 6, 7, 1)  # length of the prompt of each row
POLICIES = ("squared:budget=4", "oracle:budget=4", "topk:k=2", "oea:k0=1")


def rows_of_steps(prefill: tuple[int, ...], length: int) -> Tensor:
    """[S, B]: the s-th token after each row's prompt; -1 if the row has ended."""
    rows = torch.full((length - min(prefill), len(prefill)), -1)
    for b, start in enumerate(prefill):
        for s in range(length - start):
            rows[s, b] = b * length + start + s
    return rows


def decode_one_by_one(
    model: Any, words: Tensor, policy: str
) -> tuple[list[Tensor], list[list[Call]], dict[str, float]]:
    """Logits [B, V] and expert calls of every step. Prompts are padded on the left; rows that have ended get EOS."""
    rows, width = len(PREFILL), max(PREFILL)
    start = torch.tensor(PREFILL)
    ids = torch.full((rows, width), PAD)
    mask = torch.zeros(rows, width, dtype=torch.long)
    for b, n in enumerate(PREFILL):
        ids[b, width - n :], mask[b, width - n :] = words[b, :n], 1
    logits = []
    with recorded(model) as calls, attach(model, policy) as run:
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        _, cache = forward(model, ids, attention_mask=mask, position_ids=positions)
        for s in range(LENGTH - min(PREFILL)):
            position = start + s
            token = words.gather(1, position.clamp_max(LENGTH - 1)[:, None])
            token = torch.where(position[:, None] < LENGTH, token, EOS)
            mask = torch.cat([mask, torch.ones(rows, 1, dtype=torch.long)], 1)
            out, cache = forward(model, token, cache, attention_mask=mask, position_ids=position[:, None])
            logits.append(out[:, 0])
    return logits, passes(model, calls)[1:], run.counters.totals


@every_case
@pytest.mark.parametrize("policy", POLICIES)
def test_teacher_forcing_equals_decoding_one_by_one(name, policy):
    model = build(available(name))
    words = prompts(len(PREFILL), LENGTH, seed=3)
    one_by_one, steps, totals = decode_one_by_one(model, words, policy)
    rows = rows_of_steps(PREFILL, LENGTH)
    with recorded(model) as calls, attach(model, policy) as run, run.decode_steps(rows):
        logits, _ = forward(model, words)
    (together,) = passes(model, calls)
    assert len(rows) == len(steps) == 13
    flat = logits.flatten(0, 1)
    for s, step in enumerate(steps):
        decode = rows[s] >= 0
        named = rows[s, decode]
        torch.testing.assert_close(flat[named], one_by_one[s][decode], rtol=0, atol=1e-5)
        for forced, decoded in zip(together, step, strict=True):
            assert forced.fetched(named) == decoded.fetched()
            torch.testing.assert_close(
                forced.over_experts(named), decoded.over_experts(decode.nonzero()[:, 0]), rtol=1e-4, atol=1e-6
            )
    assert run.counters.totals == pytest.approx(totals, rel=1e-4)
    assert totals["steps"] == 13 * 2
    assert (forward(model, words)[0] - logits).abs().max() > 1e-2  # differs from native routing


@every_case
def test_tokens_that_no_step_names_keep_native_routes_bit_for_bit(name):
    model = build(available(name))
    words = prompts(5, 9)
    with recorded(model) as plain:
        forward(model, words)
    rows = torch.tensor([[3, 12, -1, 30, 44], [4, 13, 22, -1, -1]])
    named = rows[rows >= 0]
    prefill = torch.ones(45, dtype=torch.bool).index_fill(0, named, False)
    with recorded(model) as calls, attach(model, "squared:budget=2") as run, run.decode_steps(rows):
        forward(model, words)
    call, native = passes(model, calls)[0][0], passes(model, plain)[0][0]  # the first layer has the same input
    assert torch.equal(call.hidden, native.hidden)
    assert torch.equal(call.ids[prefill], native.ids[prefill])
    assert torch.equal(call.weights[prefill], native.weights[prefill])
    assert not torch.equal(call.ids[named], native.ids[named])
    for call in passes(model, calls)[0]:
        for step in rows:
            assert len(call.fetched(step[step >= 0])) == 2
    assert run.counters.steps == 2
    assert run.counters.totals["rows"] == 2 * len(named)


def test_a_step_does_not_see_the_votes_of_another():
    model = build(CASES["qwen3_moe"])
    words = prompts(4, 8)
    two_steps, one_step = torch.tensor([[1, 9, 17, 25], [2, 10, 18, 26]]), torch.tensor([[1, 9, 17, 25]])
    results = []
    for rows in (two_steps, one_step):
        with recorded(model) as calls, attach(model, "squared:budget=3") as run, run.decode_steps(rows):
            forward(model, words)
        results.append(passes(model, calls)[0][0].ids[one_step[0]])
    assert torch.equal(*results)


def test_a_budget_of_all_experts_is_exact_in_teacher_forcing():
    model = build(CASES["deepseek_v3"])
    words = prompts(5, LENGTH)
    plain, _ = forward(model, words)
    with attach(model, "squared:budget=12") as run, run.decode_steps(rows_of_steps(PREFILL, LENGTH)):
        logits, _ = forward(model, words)
    assert torch.equal(logits, plain)


def test_named_steps_hold_inside_the_block_only():
    model = build(CASES["qwen3_moe"])
    words = prompts(3, 5)
    with attach(model, "squared:budget=2") as run:
        plain, cache = forward(model, words)
        with run.decode_steps(torch.tensor([[4, 9, 14]])):
            changed, _ = forward(model, words)
        assert run.counters.steps == 1
        again, _ = forward(model, words)
        assert run.counters.steps == 1
        forward(model, words[:, -1:], cache)
        assert run.counters.steps == 2
        with pytest.raises(RuntimeError, match="on purpose"), run.decode_steps(torch.tensor([[4, 9, 14]])):
            raise RuntimeError("on purpose")
        forward(model, words)
        assert run.counters.steps == 2
    assert torch.equal(plain, again)
    assert not torch.equal(plain[:, 4], changed[:, 4])
    torch.testing.assert_close(plain[:, :4], changed[:, :4], rtol=0, atol=1e-5)


def test_verified_tokens_of_assisted_generation_count_as_prefill_unless_named():
    model = build(CASES["qwen3_moe"])
    words = prompts(3, 8)
    with recorded(model) as calls, attach(model, "squared:budget=2") as run:
        _, cache = forward(model, words[:, :4])
        forward(model, words[:, 4:6], cache)
        assert run.counters.steps == 0
        with run.decode_steps(torch.arange(6)[None]):
            forward(model, words[:, 6:8], cache)
        assert run.counters.steps == 1
    assert [len(call.fetched()) <= 2 for step in passes(model, calls) for call in step] == [False] * 4 + [True] * 2


def test_a_pass_without_decode_steps_is_prefill():
    model = build(CASES["qwen3_moe"])
    words = prompts(3, 5)
    plain, _ = forward(model, words)
    with attach(model, "squared:budget=2") as run:
        with run.decode_steps(torch.full((2, 3), -1)):
            unnamed, _ = forward(model, words)
        with run.decode_steps(torch.empty(0, 3, dtype=torch.long)):
            empty, _ = forward(model, words)
        assert run.counters.steps == 0
        generate(model, words, 2)
    assert torch.equal(unnamed, plain)
    assert torch.equal(empty, plain)
    assert POISON not in words
