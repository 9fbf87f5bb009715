"""Tiny models and their statistics, made once per test process."""

from __future__ import annotations

import functools
from typing import Any

from moebudget.calibrate import Corpus, calibrate
from moebudget.core.stats import Stats
from tests.calibrate import reference
from tests.engines.transformers import tiny

CASES = ("qwen3_moe", "qwen2_moe", "deepseek_v3")
BUDGET, BATCH, ROWS = 3, 2, 3
ALPHAS = (1e-3, 1e-1, 10.0)


@functools.cache
def built(name: str) -> Any:
    """A model with outputs so large that leaving out experts changes its most likely token."""
    model = tiny.build(tiny.available(name))
    for experts in tiny.experts_modules(model):
        experts.down_proj.data *= 4
    return model


def fit(model: Any, corpus: Corpus, **settings: Any) -> Stats:
    usual = {"model_id": "tiny", "budget": BUDGET, "batch": BATCH, "rows": ROWS, "alphas": ALPHAS, "quiet": True}
    return calibrate(model, corpus, **{**usual, **settings})


@functools.cache
def usual_stats(name: str) -> Stats:
    return fit(built(name), reference.make_corpus())
