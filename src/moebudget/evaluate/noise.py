"""Noise of the batch composition: the same samples, measured again in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moebudget.calibrate.data import TokenizerLike
from moebudget.core.stats import Stats
from moebudget.evaluate.paired import FEW_SAMPLES, Z95, item_weights
from moebudget.evaluate.tasks import Item, TaskResult, evaluate_tasks
from moebudget.evaluate.text import TextResult, evaluate_text

BATCHES = 4  # maximum number of batches that are run again


def other_order(n: int, batch: int) -> Tensor | None:
    """An order of n samples in which every batch takes few of its samples from the same old batch.

    None if all samples fit into one batch, or below 30 samples, which may show no change by chance.
    """
    groups = -(-n // batch)
    return None if groups < 2 or n < FEW_SAMPLES else torch.cat([torch.arange(g, n, groups) for g in range(groups)])


def band(before: Tensor, after: Tensor, samples: float) -> float:
    """Half width of the range that covers 95 % of batch compositions, for the mean of `samples` independent samples.

    before, after [m]: the same samples under two compositions; half of the mean squared difference is the variance.
    """
    return Z95 * float(((after - before).double().square().mean() / 2 / samples).sqrt())


def text_noise(
    model: nn.Module,
    results: Sequence[TextResult],
    stats: Stats | None,
    windows: Tensor,
    *,
    batch: int,
    prefill: int,
    quiet: bool = False,
) -> list[float | None]:
    """The band of each result's mean loss; 0 for native routing, whose rows are independent; None for one batch."""
    part = windows[: max(FEW_SAMPLES, BATCHES * batch)]
    order, again = other_order(len(part), batch), [r.policy for r in results if r.policy.name != "native"]
    if order is None or not again:
        return [0.0 if r.policy.name == "native" else None for r in results]
    rerun = evaluate_text(model, again, stats, part[order], batch=batch, prefill=prefill, quiet=quiet)
    losses = {new.policy.name: new.nll for new in rerun}
    return [
        0.0 if r.policy.name == "native" else band(r.nll[order], losses[r.policy.name], len(r.nll)) for r in results
    ]


def task_noise(
    model: nn.Module,
    results: Sequence[TaskResult],
    stats: Stats | None,
    items: Sequence[Item],
    tokenizer: TokenizerLike,
    *,
    batch: int,
    start_id: int | None,
    refill: bool = True,
    quiet: bool = False,
) -> list[float | None]:
    """The band of each result's average accuracy, in points, as `text_noise`."""
    part = list(items[: max(FEW_SAMPLES, BATCHES * batch)])
    order, again = other_order(len(part), batch), [r.policy for r in results if r.policy.name != "native"]
    if order is None or not again:
        return [0.0 if r.policy.name == "native" else None for r in results]
    reordered = [part[i] for i in order.tolist()]
    rerun = evaluate_tasks(
        model, again, stats, reordered, tokenizer, batch=batch, start_id=start_id, refill=refill, quiet=quiet
    )
    hits = {new.policy.name: new.hits for new in rerun}
    weights = item_weights([i.task for i in items])
    samples = len(items) ** 2 / float(weights.square().sum())
    return [
        0.0 if r.policy.name == "native" else 100 * band(r.hits[order].double(), hits[r.policy.name].double(), samples)
        for r in results
    ]
