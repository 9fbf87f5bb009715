"""How much of a difference is which samples shared a batch: the same samples again, in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from moebudget.calibrate.data import TokenizerLike
from moebudget.evaluate.paired import FEW_SAMPLES, Z95, item_weights
from moebudget.evaluate.tasks import Item, TaskResult, evaluate_tasks
from moebudget.evaluate.text import TextResult, evaluate_text
from moebudget.stats import Stats

BATCHES = 4  # of samples that are run again at most


def other_order(n: int, batch: int) -> Tensor | None:
    """An order of n samples in which a batch takes few of its samples from one old batch.

    None if all fit into one batch, or below 30 samples, in which no change may be seen by chance.
    """
    groups = -(-n // batch)
    return None if groups < 2 or n < FEW_SAMPLES else torch.cat([torch.arange(g, n, groups) for g in range(groups)])


def band(before: Tensor, after: Tensor, samples: float) -> float:
    """Half of the range that 95 of 100 batch compositions stay in, for the mean of `samples` independent ones.

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
    """The band of each result's mean loss; 0 for the dense model, which knows no batch mates; None for one batch."""
    part = windows[: max(FEW_SAMPLES, BATCHES * batch)]
    order, again = other_order(len(part), batch), [r.policy for r in results if r.policy.name != "dense"]
    if order is None or not again:
        return [0.0 if r.policy.name == "dense" else None for r in results]
    rerun = evaluate_text(model, again, stats, part[order], batch=batch, prefill=prefill, quiet=quiet)
    found = {new.policy.name: new.nll for new in rerun}
    return [0.0 if r.policy.name == "dense" else band(r.nll[order], found[r.policy.name], len(r.nll)) for r in results]


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
    order, again = other_order(len(part), batch), [r.policy for r in results if r.policy.name != "dense"]
    if order is None or not again:
        return [0.0 if r.policy.name == "dense" else None for r in results]
    moved = [part[i] for i in order.tolist()]
    rerun = evaluate_tasks(
        model, again, stats, moved, tokenizer, batch=batch, start_id=start_id, refill=refill, quiet=quiet
    )
    found = {new.policy.name: new.hits for new in rerun}
    weights = item_weights([i.task for i in items])
    samples = len(items) ** 2 / float(weights.square().sum())
    return [
        0.0 if r.policy.name == "dense" else 100 * band(r.hits[order].double(), found[r.policy.name].double(), samples)
        for r in results
    ]
