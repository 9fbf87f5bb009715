"""Native routing measured once, against measuring it in every evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moebudget import parse
from moebudget.evaluate import evaluate
from moebudget.evaluate.native import measure_native, with_native
from tests.calibrate.fitted import built, usual_stats
from tests.engines.transformers import tiny
from tests.evaluate.test_tasks import Letters, questions

NAME = "qwen3_moe"
WINDOWS = tiny.prompts(32, 12, seed=7)


@pytest.mark.parametrize("names", [["base:budget=2", "topk:k=1"], ["topk:k=1", "native"], []])
def test_native_run_saves_its_passes_and_keeps_every_number(names: list[str]) -> None:
    model, stats, policies = built(NAME), usual_stats(NAME), [parse(name) for name in names]
    items, _ = questions(NAME, (1, 2, 3, 1))
    settings: dict[str, Any] = {"batch": 4, "quiet": True}
    samples: dict[str, Any] = {"items": items, "tokenizer": Letters(), "retained_windows": 0}
    passes: list[int] = []
    hook = model.register_forward_pre_hook(lambda *_: passes.append(1))
    native_run = measure_native(model, WINDOWS, items, Letters(), **settings)
    native_passes = len(passes)
    passes.clear()
    whole = evaluate(model, policies, stats, WINDOWS, **samples, **settings)
    all_passes = len(passes)
    passes.clear()
    saved = evaluate(model, policies, stats, WINDOWS, native_run=native_run, **samples, **settings)
    hook.remove()
    assert len(passes) == all_passes - native_passes
    assert [q.as_row("m") for q in saved] == [q.as_row("m") for q in whole]


def test_native_result_takes_the_place_of_native_routing() -> None:
    policies = [parse(name) for name in ("topk:k=1", "native", "topk:k=2")]
    assert with_native(policies, "known", lambda rerun: [p.name for p in rerun]) == ["topk:k=1", "known", "topk:k=2"]
    assert with_native(policies, None, lambda rerun: [p.name for p in rerun]) == [p.name for p in policies]
    assert with_native(policies[1:2], torch.ones(1), lambda _: pytest.fail("measured")) == [torch.ones(1)]
