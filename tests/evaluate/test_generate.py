"""Loops by definition, and rates of generations against the model's own generate."""

from __future__ import annotations

import pytest
import torch

from moebudget import attach, parse
from moebudget.evaluate.generate import generate, generated_table, loops
from tests.calibrate.fitted import built, usual_stats
from tests.integrations import tiny

NAME = "qwen3_moe"


@pytest.mark.parametrize(
    ("tokens", "loop"),
    [
        ([5] * 12, True),
        ([9, 9, 5] + [5] * 11, True),
        ([5] * 11, False),
        ([1, 2, 3] * 4, True),
        (list(range(6)) + [1, 2, 3, 4, 5, 6] * 3, True),
        ([1, 2, 3, 4, 5, 6] * 2 + [1, 2, 3, 4, 5], False),
        ([5] * 20 + [1], False),
        (list(range(17)) * 3, False),
        ([], False),
    ],
)
def test_loop_is_overlooked_or_made_up(tokens: list[int], loop: bool) -> None:
    assert loops(tokens) == loop


def test_rates_are_not_those_of_the_generations() -> None:
    model, stats, prompts = built(NAME), usual_stats(NAME), tiny.prompts(32, 5, seed=2)
    with attach(model, "base:budget=3", stats):
        texts = [model.generate(p, max_new_tokens=20, do_sample=False, eos_token_id=-1) for p in prompts.split(16)]
    text = torch.cat(texts)[:, 5:]
    end = int(text[3, 4])  # ends at least this continuation
    ended = int((text == end).any(-1).sum())
    dense, found = generate(
        model, [parse("dense"), parse("base:budget=3")], stats, prompts, end_id=end, tokens=20, quiet=True
    )
    assert (found.n, dense.policy) == (32, "dense")
    assert found.fetched <= 3 < dense.fetched
    assert 0 < found.ends <= 100
    assert found.ends == pytest.approx(100 * ended / 32, abs=7)  # a finished row no longer votes for the others
    assert generated_table([dense, found]).row_count == 2
    assert found.as_fields()["gen_batching"] == "draining"
    with pytest.raises(ValueError, match="29 prompts are too few"):
        generate(model, [parse("dense")], stats, prompts[:29], end_id=end)
