"""Step times of a transformers model on this machine, at fixed numbers of fetched experts."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moebudget.bench.diagnose.bandwidth import synchronize
from moebudget.engines.transformers.attach import attach
from moebudget.evaluate.tasks import cache_argument
from moebudget.methods.registry import parse

REPEATS = 5


@torch.no_grad()
def step_times(
    model: nn.Module, tokens: Tensor, budgets: Sequence[int], steps: int = 8
) -> tuple[list[tuple[float, float]], float]:
    """((experts per layer, milliseconds per step) for each budget, experts of the largest), after prompts [B, S].

    The policy is `squared`, which needs no statistics. Each budget counts its fastest of REPEATS turns; the turns
    interleave, so that a slow moment of the machine affects all budgets. Raises ValueError for a prompt of fewer than
    two tokens.
    """
    if tokens.shape[1] < 2:
        raise ValueError(f"prompts of {tokens.shape[1]} tokens are too short to decode from; give at least 2")
    from transformers import DynamicCache

    name = cache_argument(model)
    prompt = DynamicCache(config=model.config)
    model(input_ids=tokens[:, :-1], use_cache=True, **{name: prompt})
    times: dict[int, list[float]] = {budget: [] for budget in budgets}
    fetched: dict[int, float] = {}
    for _ in range(REPEATS):
        for budget in budgets:
            cache, last = copy.deepcopy(prompt), tokens[:, -1:]
            with attach(model, parse(f"squared:budget={budget}"), finished_ids=frozenset()) as run:
                synchronize(tokens.device)
                start = time.perf_counter()
                for _ in range(steps):
                    last = model(input_ids=last, use_cache=True, **{name: cache}).logits[:, -1:].argmax(-1)
                synchronize(tokens.device)
                times[budget].append(1e3 * (time.perf_counter() - start) / steps)
                fetched[budget] = run.counters.fetched
    return [(fetched[budget], min(times[budget])) for budget in budgets], fetched[max(budgets)]
