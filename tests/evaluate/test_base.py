"""The unchanged model measured once gives the numbers of measuring it every time, without its passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moebudget import parse
from moebudget.evaluate import evaluate
from moebudget.evaluate.base import around, unchanged
from tests.calibrate.fitted import built, usual_stats
from tests.evaluate.test_tasks import Letters, questions
from tests.integrations import tiny

NAME = "qwen3_moe"
WINDOWS = tiny.prompts(32, 12, seed=7)


@pytest.mark.parametrize("names", [["base:budget=2", "topk:k=1"], ["topk:k=1", "dense"], []])
def test_base_changes_a_number_or_is_measured_again(names: list[str]) -> None:
    model, stats, policies = built(NAME), usual_stats(NAME), [parse(name) for name in names]
    items, _ = questions(NAME, (1, 2, 3, 1))
    how: dict[str, Any] = {"batch": 4, "quiet": True}
    more: dict[str, Any] = {"items": items, "tokenizer": Letters(), "retained_windows": 0}
    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    base = unchanged(model, WINDOWS, items, Letters(), **how)
    once = len(passes)
    passes.clear()
    whole = evaluate(model, policies, stats, WINDOWS, **more, **how)
    every = len(passes)
    passes.clear()
    found = evaluate(model, policies, stats, WINDOWS, base=base, **more, **how)
    hook.remove()
    assert len(passes) == every - once
    assert [q.as_row("m") for q in found] == [q.as_row("m") for q in whole]


def test_known_result_takes_the_place_of_another() -> None:
    policies = [parse(name) for name in ("topk:k=1", "dense", "topk:k=2")]
    assert around(policies, "known", lambda some: [p.name for p in some]) == ["topk:k=1", "known", "topk:k=2"]
    assert around(policies, None, lambda some: [p.name for p in some]) == [p.name for p in policies]
    assert around(policies[1:2], torch.ones(1), lambda _: pytest.fail("measured")) == [torch.ones(1)]
