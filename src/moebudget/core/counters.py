"""Counters of decode steps: one named list, read by the kernels, the layer routers, vLLM and the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from moebudget.core.ops import executed_experts, fetched_experts, native_union
from moebudget.core.types import RouterBatch, Routing, RowKind


class Counter(IntEnum):
    """Place of every counter in a tensor of counters. `WHAT` says what each one counts."""

    STEPS = 0
    ROWS = 1
    NATIVE_UNION = 2
    FETCHED = 3
    BACKFILLED = 4
    DROPPED = 5
    DROPPED_MASS = 6
    RESCUED = 7
    NONFINITE = 8
    UNRESTRICTED = 9


WHAT: dict[Counter, str] = {
    Counter.STEPS: "decode steps with at least one voting row",
    Counter.ROWS: "voting rows",
    Counter.NATIVE_UNION: "distinct experts that native routing would have fetched",
    Counter.FETCHED: "distinct experts that were fetched",
    Counter.BACKFILLED: "experts that a row executes and that are none of its native routes, summed over rows",
    Counter.DROPPED: "native routes that were not executed",
    Counter.DROPPED_MASS: "weight of those routes as a share of the row's weight, summed over rows",
    Counter.RESCUED: "rows that kept none of their native routes",
    Counter.NONFINITE: "decode rows whose router input was not finite; they do not vote",
    Counter.UNRESTRICTED: "steps in which no route had to be left out",
}
COUNTERS: tuple[str, ...] = tuple(counter.name.lower() for counter in Counter)


def count_step(batch: RouterBatch, routing: Routing) -> Tensor:
    """The counters of each step, float64 [..., len(COUNTERS)] for a batch with leading dimensions [...]."""
    decode = batch.decode  # [..., T]
    voting = decode.any(-1)
    fetched = fetched_experts(routing, batch)
    runs = executed_experts(routing, batch)
    ran = runs.gather(-1, batch.ids)
    kept = ran | (batch.weights == 0)  # leaving out a route of weight 0 changes nothing
    routed = torch.zeros_like(runs).scatter(-1, batch.ids, True)
    mass = batch.weights.abs().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
    lost = torch.where(kept, 0.0, batch.weights.abs()).sum(-1) / mass
    native = native_union(batch).sum(-1)
    values = (
        voting,
        decode.sum(-1),
        native,
        fetched.sum(-1) * voting,
        torch.where(decode, (runs & ~routed).sum(-1), 0).sum(-1),
        torch.where(decode, (~kept).sum(-1), 0).sum(-1),
        torch.where(decode, lost, 0.0).sum(-1),
        (decode & ~ran.any(-1) & (batch.weights != 0).any(-1)).sum(-1),
        (batch.weights.isnan().any(-1) & (batch.kind != RowKind.NATIVE.value)).sum(-1),
        voting & ((~kept).sum(-1) * decode).sum(-1).eq(0),
    )
    return torch.stack([v.double() for v in values], -1)


@dataclass(frozen=True, slots=True)
class Counters:
    """What happened so far, over all layers. Means are per layer and step."""

    layers: int
    totals: dict[str, float]
    by_layer: tuple[float, ...] = ()  # distinct experts fetched in all steps, per layer

    def _mean(self, name: str, over: str = "steps") -> float:
        return self.totals[name] / self.totals[over] if self.totals[over] else float("nan")

    @property
    def steps(self) -> int:
        """Decode steps in which the policy was active (of the layer that saw most; all see the same)."""
        return round(self.totals["steps"] / self.layers) if self.layers else 0

    @property
    def fetched(self) -> float:
        """Distinct experts fetched, mean over layers and steps."""
        return self._mean("fetched")

    @property
    def fetched_by_layer(self) -> list[float]:
        """Distinct experts fetched per step, for every layer; empty if nothing was counted."""
        return [count / self.steps for count in self.by_layer] if self.steps else []

    @property
    def native_union(self) -> float:
        """Distinct experts that native routing would have fetched, mean over layers and steps."""
        return self._mean("native_union")

    @property
    def rows(self) -> float:
        """Voting rows per step."""
        return self._mean("rows")

    @property
    def dropped_mass(self) -> float:
        """Share of a row's native routing weight that was not executed, mean over rows and layers."""
        return self._mean("dropped_mass", "rows")

    def as_dict(self) -> dict[str, float]:
        """Totals by name, and the means that people read."""
        means = {"fetched_mean": self.fetched, "native_union_mean": self.native_union, "rows_mean": self.rows}
        return {"layers": self.layers, **self.totals, **means}

    def __str__(self) -> str:
        t = self.totals
        return (
            f"{self.steps} decode steps x {self.layers} layers, {self.rows:.1f} rows per step: "
            f"{self.fetched:.2f} experts fetched per layer per step (native union: {self.native_union:.2f}), "
            f"{100 * self.dropped_mass:.1f} % of the routing weight dropped, {t['backfilled']:.0f} routes backfilled, "
            f"{t['rescued']:.0f} rows rescued, {t['nonfinite']:.0f} not finite"
        )


class Counting(Protocol):
    """A layer's router, of which only the counters are read."""

    totals: Tensor  # [len(COUNTERS)] float64


def read_counters(layers: Sequence[Counting]) -> Counters:
    """Sum the layers' device counters; this is the one place that reads them on the host."""
    counts = torch.stack([torch.zeros(len(COUNTERS), dtype=torch.float64), *(layer.totals.cpu() for layer in layers)])
    by_layer = counts[1:, COUNTERS.index("fetched")].tolist()
    return Counters(len(layers), dict(zip(COUNTERS, counts.sum(0).tolist(), strict=True)), tuple(by_layer))
