"""Joint losses of many budget vectors on the same decode batches, and the removal costs a run sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moebudget.allocate.solve import interpolate
from moebudget.evaluate.text import pieces, teacher_forced, window_loss
from moebudget.integrations.transformers import Run, attach
from moebudget.policy import Policy
from moebudget.runtime import FIELDS
from moebudget.select import Select, demand
from moebudget.stats import Stats
from moebudget.types import Active, LayerStats, RouterBatch

GRID = (2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 90, 128)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What one vector of budgets did: loss [n] of each window in nats a token, experts fetched [L] a step."""

    loss: Tensor
    fetched: Tensor

    @property
    def mean(self) -> float:
        return float(self.loss.mean())


class Trials:
    """Measures a budgeted policy with budgets of its own in every layer, on windows [n, S + 1] in decode mode.

    A layer with a budget of N is bit for bit the model's own, so one layer can be restricted alone.
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
            return [self._one(run, vector) for vector in vectors]

    def costs(self, vector: Sequence[int]) -> list[Tensor]:
        """Every layer's summed removal costs [steps, N] float64 under these budgets, -inf for no candidate."""
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

    def _one(self, run: Run, vector: Sequence[int]) -> Measured:
        run.set_budget(vector)
        run.reset()
        loss = self._losses(run)
        totals = torch.stack([router.totals.cpu() for router in run.routers])  # [L, fields]
        steps, fetched = (totals[:, FIELDS.index(name)] for name in ("steps", "fetched"))
        return Measured(loss, fetched / steps)

    def _losses(self, run: Run) -> Tensor:
        self.count += 1
        return torch.cat(list(forced_passes(self.model, run, self.windows, self.batch, self.prefill)))


@torch.no_grad()
def forced_passes(model: nn.Module, run: Run, windows: Tensor, batch: int, prefill: int) -> Iterator[Tensor]:
    """Decode windows [n, S + 1], `batch` rows a step, in pieces -> each piece's losses [b] in nats a token."""
    device = next(model.parameters()).device
    for part in pieces(windows, batch):
        ids, targets, steps = teacher_forced(part.to(device), prefill, batch)
        with run.decode_steps(steps):
            logits = model(input_ids=ids, use_cache=False).logits
        yield window_loss(logits, targets, prefill)


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorder:
    """A selection that keeps the sums it decides by."""

    select: Select
    seen: list[Tensor]

    @property
    def needs(self) -> frozenset[str]:
        return self.select.needs

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        total, candidate = demand(scores, batch)
        some = batch.live.any(-1)
        self.seen.append(total.masked_fill(~candidate, -torch.inf)[some].flatten(0, -2).cpu())
        return self.select(scores, batch, stats)


def loss_curves(trials: Trials, dense: Measured, union: Sequence[int], experts: int) -> Tensor:
    """Loss above dense with one layer restricted, [L, N]: measured on GRID up to the layer's union, linear between."""
    curves = []
    for layer, most in enumerate(union):
        grid = [m for m in GRID if m < most]
        vectors = [[m if i == layer else experts for i in range(len(union))] for m in grid]
        losses = [float((m.loss - dense.loss).mean()) for m in trials.measure(vectors)]
        curves.append(interpolate({**dict(zip(grid, losses, strict=True)), most: 0.0}, experts))
    return torch.stack(curves)
