"""Loops by definition, and rates of generations against transformers' generate()."""

from __future__ import annotations

import pytest
import torch

from moebudget import attach, parse
from moebudget.evaluate.generate import generate, generated_table, loops
from tests.calibrate.fitted import built, usual_stats
from tests.engines.transformers import tiny
from tests.evaluate.test_decode import Letters

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
def test_loops_follow_their_definition(tokens: list[int], loop: bool) -> None:
    assert loops(tokens) == loop


class Ending(Letters):
    """Tokens as letters; the token `end` ends a text."""

    def __init__(self, end: int) -> None:
        self.eos_token_id = end  # type: ignore[assignment]


def test_rates_are_those_of_the_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    model, stats, prompts = built(NAME), usual_stats(NAME), tiny.prompts(34, 5, seed=2)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    with attach(model, "base:budget=3", stats):
        texts = [model.generate(p, max_new_tokens=20, do_sample=False, eos_token_id=-1) for p in prompts.split(8)]
    text = torch.cat(texts)[:, 5:]
    end = int(text[3, 4])  # ends at least this continuation
    ended = int((text == end).any(-1).sum())
    rows = generate(
        model, [parse("native"), parse("base:budget=3")], stats, prompts, Ending(end), tokens=20, batch=8, quiet=True
    )
    assert [(r.policy, r.batching) for r in rows] == [
        (policy, kind) for policy in ("native", "base:budget=3") for kind in ("constant", "draining")
    ]
    full, mixed, constant, draining = rows
    assert constant.n == draining.n == 34
    assert constant.fetched <= 3 < full.fetched
    assert 0 < draining.ends <= 100
    assert draining.ends == pytest.approx(100 * ended / 34, abs=7)  # a finished row no longer votes
    assert (constant.rows, full.rows) == (8, 8)
    assert draining.rows < 8
    assert mixed.fetched < full.fetched  # fewer rows, fewer experts
    assert 0 < constant.tail < 50
    assert draining.tail == 0
    assert generated_table(rows).row_count == 4
    fields = {**constant.as_fields(), **draining.as_fields()}
    assert (fields["gen_constant_rows"], fields["gen_n"]) == (8, 34)
    assert fields["gen_draining_fetched"] == round(draining.fetched, 4)


def test_native_continuations_do_not_depend_on_the_kind_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of native routing are independent, and a batch of one row has nothing to drain."""
    model, prompts = built(NAME), tiny.prompts(32, 5, seed=2)
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    text = model.generate(prompts, max_new_tokens=16, do_sample=False, eos_token_id=-1)[:, 5:].tolist()
    end = text[3][4]
    cut = [t[: t.index(end) + 1] if end in t else t for t in text]
    rows = generate(model, [parse("native")], None, prompts, Ending(end), tokens=16, batch=8, quiet=True)
    for row in rows:
        assert row.ends == 100 * sum(t[-1] == end for t in cut) / 32
        assert row.loops == 100 * sum(t[-1] != end and loops(t) for t in cut) / 32
    (alone,) = generate(
        model, [parse("native")], None, prompts, Ending(end), tokens=16, batch=1, batchings=["constant"], quiet=True
    )
    assert (alone.tail, alone.rows, alone.ends) == (0, 1, rows[0].ends)


def test_too_few_prompts_are_refused() -> None:
    model, prompts = built(NAME), tiny.prompts(32, 5, seed=2)
    with pytest.raises(ValueError, match="29 prompts are too few for a rate: give at least 30"):
        generate(model, [parse("native")], None, prompts[:29], Ending(1))
    with pytest.raises(ValueError, match="32 prompts are too few for a rate: give at least 40"):
        generate(model, [parse("native")], None, prompts, Ending(1), batch=40)
