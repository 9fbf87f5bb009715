"""Batches as `generate` makes them: padded on the left, with rows that end before the others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget import attach

from .tiny import (
    CASES,
    EOS,
    PAD,
    POISON,
    Call,
    available,
    build,
    forward,
    generate,
    native_routes,
    passes,
    prompts,
    recorded,
)

every_case = pytest.mark.parametrize("name", CASES)


def padded(words: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    """Prompts of several lengths, padded on the left to one width, and their mask."""
    ids, mask = (torch.full((len(words), width), fill) for fill in (PAD, 0))
    for row, prompt in enumerate(words):
        ids[row, width - len(prompt) :] = prompt
        mask[row, width - len(prompt) :] = 1
    return ids, mask


def routes_of_rows(model: Any, calls: list[Call]) -> list[list[list[list[int]]]]:
    """[steps][layers][rows]: the ids that a row executes, which have a weight."""
    return [
        [
            [
                sorted(i for i, w in zip(row_ids, row_weights, strict=True) if w)
                for row_ids, row_weights in zip(call.ids.tolist(), call.weights.tolist(), strict=True)
            ]
            for call in step
        ]
        for step in passes(model, calls)[1:]
    ]


@every_case
@pytest.mark.parametrize("policy", ["squared:budget=4", "oea:k0=1"])
def test_the_amount_of_left_padding_changes_nothing(name, policy):
    model = build(available(name))
    words = [prompts(1, length, seed=length)[0] for length in (3, 6, 5, 1)]
    results = []
    for width in (6, 7, 11):
        ids, mask = padded(words, width)
        with recorded(model) as calls, attach(model, policy) as run:
            tokens, logits = generate(model, ids, 5, attention_mask=mask)
        results.append((tokens[:, width:], logits, routes_of_rows(model, calls), run.counters.totals))
    first = results[0]
    for tokens, logits, routes, totals in results[1:]:
        assert torch.equal(tokens, first[0])
        torch.testing.assert_close(logits, first[1], rtol=0, atol=2e-5)
        assert routes == first[2]
        assert totals == pytest.approx(first[3], rel=1e-4)


@every_case
def test_a_padded_row_decodes_as_it_does_alone(name):
    """For a policy that looks at one row at a time, other rows and padding must not matter."""
    model = build(available(name))
    words = [prompts(1, length, seed=length)[0] for length in (3, 6, 5, 1)]
    ids, mask = padded(words, 6)
    with recorded(model) as calls, attach(model, "topk:k=2"):
        tokens, logits = generate(model, ids, 5, attention_mask=mask)
    together = routes_of_rows(model, calls)
    for row, prompt in enumerate(words):
        with recorded(model) as calls, attach(model, "topk:k=2"):
            alone_tokens, alone_logits = generate(model, prompt[None], 5)
        assert torch.equal(tokens[row, 6:], alone_tokens[0, len(prompt) :])
        torch.testing.assert_close(logits[row], alone_logits[0], rtol=0, atol=2e-5)
        alone = routes_of_rows(model, calls)
        assert [[layer[row] for layer in step] for step in together] == [[layer[0] for layer in s] for s in alone]
        assert all(len(layer[0]) == 2 for step in alone for layer in step)


STAY = [0, 2, 4, 5]


class EndAt:
    """Makes row r produce the end-of-sequence token at length ends[r]; no row ends by itself."""

    def __init__(self, ends: dict[int, int]) -> None:
        self.ends = ends

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, : POISON + 1] = -torch.inf
        for row, length in self.ends.items():
            if ids.shape[1] == length:
                scores[row] = -torch.inf
                scores[row, EOS] = 0.0
        return scores


class Not:
    """Makes some tokens impossible."""

    def __init__(self, tokens: set[int]) -> None:
        self.tokens = sorted(tokens)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002
        return scores.index_fill(1, torch.tensor(self.tokens), -torch.inf)


@every_case
@pytest.mark.parametrize("policy", ["squared:budget=4", "oea:k0=1"])
def test_rows_that_have_ended_neither_vote_nor_fetch(name, policy):
    """Afterwards the batch equals the batch without them, up to the rounding of matrix products of other shapes."""
    model = build(available(name))
    words = prompts(6, 5)
    with recorded(model) as calls, attach(model, policy) as run:
        tokens, logits = generate(model, words, 6, logits_processor=[EndAt({1: 5, 3: 5})], suppress_tokens=None)
    assert (tokens[[1, 3], 5] == EOS).all()
    assert (tokens[[1, 3], 6:] == PAD).all()
    assert (tokens[STAY, 5:] > PAD).all()
    with recorded(model) as calls_without, attach(model, policy) as without:
        tokens_without, logits_without = generate(
            model, words[STAY], 6, logits_processor=[EndAt({})], suppress_tokens=None
        )
    assert torch.equal(tokens[STAY], tokens_without)
    torch.testing.assert_close(logits[STAY], logits_without, rtol=0, atol=2e-5)
    steps, steps_without = passes(model, calls)[1:], passes(model, calls_without)[1:]
    assert len(steps) == 5
    for step, step_without in zip(steps, steps_without, strict=True):
        for call, call_without in zip(step, step_without, strict=True):
            assert call.fetched() == call_without.fetched()
            assert (call.weights[[1, 3]] == 0).all()
    assert run.counters.totals == pytest.approx(without.counters.totals, rel=1e-4)
    assert run.counters.rows == 4


def test_rows_that_end_one_after_the_other_leave_the_budget_to_the_last():
    model = build(CASES["qwen3_moe"])
    words = prompts(5, 4)
    ends = [EndAt({row: 4 + row for row in range(4)})]
    with recorded(model) as calls, attach(model, "squared:budget=3") as run:
        generate(model, words, 7, logits_processor=ends, suppress_tokens=None)
    steps = passes(model, calls)[1:]
    assert len(steps) == 6
    assert all(len(call.fetched()) == 3 for step in steps for call in step)
    for step in steps[3:]:  # one row is left, and its 3 native routes fit the budget
        for call in step:
            ids, weights = native_routes(model, call.layer, call.hidden)
            assert torch.equal(call.ids[4], ids[4])
            assert torch.equal(call.weights[4], weights[4])
    assert run.counters.totals["rows"] == 2 * (4 + 3 + 2 + 1 + 1 + 1)
    assert run.counters.totals["unrestricted"] == 2 * 3


def test_steps_in_which_every_row_has_ended_are_not_counted():
    model = build(CASES["qwen3_moe"])
    with recorded(model) as calls, attach(model, "squared:budget=3") as run:
        _, cache = forward(model, prompts(3, 4))
        forward(model, torch.tensor([[EOS], [PAD], [EOS]]), cache)
        assert run.counters.steps == 0
        assert run.counters.totals["fetched"] == 0
        forward(model, prompts(3, 1), cache)
    assert all((call.weights == 0).all() for call in passes(model, calls)[1])


def test_custom_loops_can_feed_end_tokens_within_a_text():
    model = build(CASES["qwen3_moe"])
    tokens = torch.tensor([[EOS], [PAD], [7], [8], [9]])
    results = []
    for finished in (None, frozenset[int](), frozenset({7, 8})):
        with recorded(model) as calls, attach(model, "squared:budget=3", finished_ids=finished) as run:
            _, cache = forward(model, prompts(5, 4))
            forward(model, tokens, cache)
        ended = [not call.weights[row].any() for call in passes(model, calls)[1] for row in range(5)]
        results.append((run.counters.rows, ended))
    assert results == [
        (3, [True, True, False, False, False] * 2),
        (5, [False] * 10),
        (3, [False, False, True, True, False] * 2),
    ]


@pytest.mark.parametrize("how", ["model", "arguments", "config"])
def test_end_tokens_are_those_of_the_generate_call(how):
    """`generate(eos_token_id=..., pad_token_id=...)` overrides the model for this call."""
    model = build(CASES["qwen3_moe"])
    ends = {"eos_token_id": [EOS, 9], "pad_token_id": 10}
    more = {}
    if how == "model":
        model.generation_config.update(**ends)
    elif how == "arguments":
        more = ends
    else:
        config = copy.deepcopy(model.generation_config)
        config.update(**ends, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, output_logits=True)
        more = {"generation_config": config}
    words = prompts(3, 4)
    end = EndAt({1: 4})
    with recorded(model) as calls, attach(model, "squared:budget=3") as run:
        tokens, _ = generate(model, words, 6, logits_processor=[end, Not({9, 10})], suppress_tokens=None, **more)
        assert tokens[1, 4:].tolist() == [EOS, 10, 10, 10, 10, 10]
        assert run.counters.rows == 2
        assert all((call.weights[1] == 0).all() for step in passes(model, calls)[1:] for call in step)
        # a custom loop uses the end tokens of the model again
        run.reset()
        _, cache = forward(model, words)
        forward(model, torch.tensor([[9], [11], [PAD]]), cache)
        assert run.counters.rows == (1 if how == "model" else 2)
