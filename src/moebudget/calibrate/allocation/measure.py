"""Joint losses of budget vectors on the same decode batches, and the removal costs of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moebudget.calibrate.allocation.solve import interpolate
from moebudget.core.counters import COUNTERS
from moebudget.core.ops import demand
from moebudget.core.policy import Policy, Select
from moebudget.core.stats import Stats
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.engines.transformers.attach import Run, attach
from moebudget.engines.transformers.teacher_forcing import pieces, teacher_forced, window_loss

GRID = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 90, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """Result of one budget vector: loss [n] of each window in nats per token, experts fetched per step [L]."""

    loss: Tensor
    fetched: Tensor

    @property
    def mean(self) -> float:
        return float(self.loss.mean())


class Trials:
    """Measures a budgeted policy with one budget per layer, on windows [n, S + 1] in decode mode.

    A layer with a budget of N keeps native routing bit for bit, so one layer can be restricted alone.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, stats: Stats, windows: Tensor, *, batch: int = 16, prefill: int = 1
    ) -> None:
        self.model, self.policy, self.stats = model, policy, stats
        self.windows, self.batch, self.prefill = windows, batch, prefill
        self.count = 0  # forward passes over all windows

    def measure(self, vectors: Sequence[Sequence[int]]) -> list[Measured]:
        """The result of every vector of budgets [L]."""
        with attach(self.model, self.policy, self.stats) as run:
            return [self._measure(run, vector) for vector in vectors]

    def costs(self, vector: Sequence[int]) -> list[Tensor]:
        """Summed removal costs [steps, N] float64 of every layer under these budgets, -inf for no candidate."""
        with attach(self.model, self.policy, self.stats) as run:
            recorders = []
            for router in run.routers:
                recorders.append(_Recorder(router.policy.select, []))
                router.policy = dataclasses.replace(router.policy, select=recorders[-1])
            for router, budget in zip(run.routers, vector, strict=True):
                assert router.budget is not None
                router.budget.fill_(budget)
            self._losses(run)
        return [torch.cat(recorder.seen) for recorder in recorders]

    def _measure(self, run: Run, vector: Sequence[int]) -> Measured:
        run.set_budget(vector)
        run.reset()
        loss = self._losses(run)
        totals = torch.stack([router.totals.cpu() for router in run.routers])  # [L, fields]
        steps, fetched = (totals[:, COUNTERS.index(name)] for name in ("steps", "fetched"))
        return Measured(loss, fetched / steps)

    def _losses(self, run: Run) -> Tensor:
        self.count += 1
        return torch.cat(list(forced_passes(self.model, run, self.windows, self.batch, self.prefill)))


@torch.no_grad()
def forced_passes(model: nn.Module, run: Run, windows: Tensor, batch: int, prefill: int) -> Iterator[Tensor]:
    """Decode windows [n, S + 1], `batch` rows per step, in pieces -> each piece's losses [b] in nats per token."""
    device = next(model.parameters()).device
    for part in pieces(windows, batch):
        ids, targets, steps = teacher_forced(part.to(device), prefill, batch)
        with run.decode_steps(steps):
            logits = model(input_ids=ids, use_cache=False).logits
        yield window_loss(logits, targets, prefill)


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorder(Select):
    """A selection that records the sums it decides by."""

    select: Select
    seen: list[Tensor]

    @property
    def needs(self) -> frozenset[str]:
        return self.select.needs

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        voting = batch.decode.any(-1)
        self.seen.append(total.masked_fill(~candidate, -torch.inf)[voting].flatten(0, -2).cpu())
        return self.select(scores, batch, stats)


def loss_curves(trials: Trials, native: Measured, union: Sequence[int], experts: int) -> Tensor:
    """Loss increase over native with one layer restricted, [L, N]: measured on GRID up to the union, then linear."""
    curves = []
    for layer, most in enumerate(union):
        grid = [m for m in GRID if m < most]
        vectors = [[m if i == layer else experts for i in range(len(union))] for m in grid]
        losses = [float((m.loss - native.loss).mean()) for m in trials.measure(vectors)]
        curves.append(interpolate({**dict(zip(grid, losses, strict=True)), most: 0.0}, experts))
    return torch.stack(curves)
