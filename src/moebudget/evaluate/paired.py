"""Paired intervals of a policy against native routing, and verdicts if there are enough samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FEW_SAMPLES = 30  # fewer samples get no interval
RESAMPLES = 4000
BLOCK = 200  # resamples drawn at a time
Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Scale:
    """Unit and samples of a measure, the fewest samples for a verdict, and the largest loss that counts as none.

    `least` for tasks: if one answer in ten changes, 200 items give an interval of 4 points either way.
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
    """Mean loss increase over native (positive is worse), with the ends of its 95 % interval, over n samples."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def half(self) -> float:
        """Half width of the interval."""
        return (self.high - self.low) / 2


def paired(differences: Tensor, added: Tensor | None = None) -> Paired:
    """Percentile bootstrap of the mean of paired differences [n], policy against native; NaN ends below 30 samples.

    `added` samples are used for the resampling only, see `paired_hits`. Every call draws the same resamples.
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
    marks = {name: torch.tensor([label == name for label in slices]) for name in sorted(set(slices))}
    return {name: paired(differences[mark]) for name, mark in marks.items()}


def item_weights(tasks: Sequence[str]) -> Tensor:
    """Weights [n] with mean 1 that turn the mean over items into the unweighted mean over tasks."""
    names = list(dict.fromkeys(tasks))
    counts = {name: tasks.count(name) for name in names}
    return torch.tensor([len(tasks) / (len(names) * counts[t]) for t in tasks], dtype=torch.float64)


def paired_hits(hits: Tensor, native: Tensor, tasks: Sequence[str]) -> Paired:
    """Points of task accuracy lost against native, paired by item (hits [n] bool of each), with equal task weights.

    One lost and one won item are added before resampling (Agresti and Min, https://doi.org/10.1002/sim.2148, add half
    an item to each of the four outcomes): no changed answer among n does not prove that answers never change.
    """
    lost = 100 * (native.double() - hits.double()).cpu() * item_weights(tasks)
    return paired(lost, torch.tensor([100.0, -100.0]))


def verdict(gap: Paired, scale: Scale) -> str:
    """The difference in words, or the reason for no verdict and the number of samples needed."""
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
