"""A policy against the unchanged model on the same samples: an interval, and a verdict that may be refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW_SAMPLES = 30  # fewer than this get no interval
RESAMPLES = 4000
BLOCK = 200  # resamples drawn at a time
Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Scale:
    """What is compared: its unit, its samples, the fewest that get a verdict, and the loss that still counts as none.

    `least` for tasks: where one answer in ten changes, 200 items leave 4 points either way.
    """

    unit: str
    samples: str
    least: int
    margin: float
    digits: int


TEXT = Scale("nats", "windows", 30, 0.02, 3)
TASKS = Scale("points", "items", 200, 3.0, 1)


@dataclass(frozen=True, slots=True)
class Paired:
    """Mean loss against dense (positive is worse) with the ends of its 95 % interval, over n samples."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def half(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2


def paired(differences: Tensor, added: Tensor | None = None) -> Paired:
    """Percentile bootstrap of the mean of paired differences [n], policy against dense; NaN ends below 30 samples.

    `added` samples take part in the resampling alone, see `paired_hits`. The draw is the same in every call.
    """
    values = differences.double().cpu()
    if len(values) < FEW_SAMPLES:
        return Paired(float(values.mean()), math.nan, math.nan, len(values))
    drawn = values if added is None else torch.cat([values, added.double()])
    generator = torch.Generator().manual_seed(0)
    means = [
        drawn[torch.randint(len(drawn), (BLOCK, len(drawn)), generator=generator)].mean(-1)
        for _ in range(RESAMPLES // BLOCK)
    ]
    low, high = torch.quantile(torch.cat(means), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Paired(float(values.mean()), low, high, len(values))


def by_slice(differences: Tensor, slices: Sequence[str]) -> dict[str, Paired]:
    """`paired` over the samples of each slice [n], in the order of their names."""
    marks = {name: torch.tensor([one == name for one in slices]) for name in sorted(set(slices))}
    return {name: paired(differences[mark]) for name, mark in marks.items()}


def item_weights(tasks: Sequence[str]) -> Tensor:
    """[n], mean 1: weights with which the mean over items is the unweighted mean over tasks."""
    names = list(dict.fromkeys(tasks))
    counts = {name: tasks.count(name) for name in names}
    return torch.tensor([len(tasks) / (len(names) * counts[t]) for t in tasks], dtype=torch.float64)


def paired_hits(hits: Tensor, dense: Tensor, tasks: Sequence[str]) -> Paired:
    """Points of task accuracy lost against dense, item by item (hits [n] bool of each), tasks weighing the same.

    One item lost and one won are added before resampling (Agresti and Min, https://doi.org/10.1002/sim.2148, add half
    an item to each of the four outcomes): no answer changed among n does not mean that none ever does.
    """
    lost = 100 * (dense.double() - hits.double()).cpu() * item_weights(tasks)
    return paired(lost, torch.tensor([100.0, -100.0]))


def verdict(gap: Paired, scale: Scale) -> str:
    """The difference in words, or why there is no verdict and how many samples one needs."""
    if gap.n < scale.least:
        return f"no verdict on {gap.n} {scale.samples}: at least {scale.least} are needed"
    digits, unit = scale.digits, scale.unit
    if gap.low > 0 or gap.high < 0:
        word = "loses" if gap.low > 0 else "gains"
        return f"{word} {abs(gap.mean):.{digits}f} ± {gap.half:.{digits}f} {unit}"
    if gap.high <= scale.margin:
        return f"no loss found: at most {gap.high:.{digits}f} {unit} at 95 %"
    more = math.ceil(gap.n * (gap.half / scale.margin) ** 2 / 10) * 10
    return f"cannot tell: up to {gap.high:.{digits}f} {unit}; {max(more, 2 * gap.n)} {scale.samples} would tell"
