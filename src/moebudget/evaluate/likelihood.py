"""Log-likelihoods of continuations in decode mode: their tokens are decode steps, the contexts are prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from moebudget.core.counters import Counters
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.engines.transformers.attach import attach
from moebudget.evaluate.tasks import cache_argument, pack_lanes, prefill
from moebudget.evaluate.text import require_active, sum_counters

Pair = tuple[Sequence[int], Sequence[int]]  # tokens of a context, at least two, and of its continuation


@torch.no_grad()
def score_continuations(
    model: nn.Module,
    policy: Policy,
    stats: Stats | None,
    pairs: Sequence[Pair],
    *,
    batch: int = 16,
    chunk: int = 96,
    quiet: bool = False,
) -> tuple[list[tuple[float, bool]], Counters]:
    """(log-likelihood in nats, whether every token is the most likely one) of each pair, and the counters.

    A context is prefilled with native routing, except for its last token; that token and the continuation are decode
    steps with `batch` rows in flight, as for tasks. Continuations of one context that differ only in their last token
    (the letters of a multiple choice) share a row: separate rows would be equal and fetch almost nothing more.
    """
    rows: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for number, (context, continuation) in enumerate(pairs):
        if len(context) < 2 or not continuation:
            raise ValueError("a log-likelihood needs 2 tokens of context and 1 of continuation")
        rows.setdefault(((*context, *continuation[:-1]), len(context)), []).append(number)
    scores: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
    device = next(model.parameters()).device
    counters, keys = list[Counters](), list(rows)
    with attach(model, policy, stats) as run:
        for start in track(
            range(0, len(keys), chunk), "log-likelihoods", console=Console(stderr=True, quiet=quiet), disable=quiet
        ):
            part = keys[start : start + chunk]
            cache, mask = prefill(model, [list(fed[:length]) for fed, length in part], device)
            fed = [list(tokens[length - 1 :]) for tokens, length in part]
            width = max(map(len, fed))
            inputs = torch.tensor([f + [0] * (width - len(f)) for f in fed], device=device)
            full = torch.cat([mask, torch.ones_like(inputs)], 1)
            steps = pack_lanes([len(f) for f in fed], min(batch, len(part)), width).to(device)
            run.reset()
            with run.decode_steps(steps):
                logits = model(
                    input_ids=inputs,
                    attention_mask=full,
                    position_ids=full.cumsum(-1)[:, mask.shape[1] :] - 1,
                    use_cache=True,
                    **{cache_argument(model): cache},
                ).logits
            counters.append(run.counters)
            log_probs, best = logits.float().log_softmax(-1).cpu(), logits.argmax(-1).cpu()
            for row, key in enumerate(part):
                for number in rows[key]:
                    wanted = torch.tensor(list(pairs[number][1]))
                    positions = torch.arange(len(wanted))
                    value = float(log_probs[row, positions, wanted].double().sum())
                    scores[number] = (value, bool((best[row, : len(wanted)] == wanted).all()))
    total = sum_counters(counters)
    require_active(policy, total)
    return scores, total
