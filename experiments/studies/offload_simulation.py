"""Simulation of offloaded experts: loss and cache traffic of policies in decode mode, without moving a weight."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moebudget.core.counters import Counters
from moebudget.core.ops import fetched_experts
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.core.types import LayerStats, RouterBatch, Routing
from moebudget.engines.transformers.attach import attach, place_experts
from moebudget.engines.transformers.expert_cache import LfuCache
from moebudget.engines.transformers.teacher_forcing import SEQUENCES, pieces, teacher_forced, window_loss
from moebudget.evaluate.text import sum_counters


@dataclass(frozen=True, slots=True)
class OffloadResult:
    """Loss and cache traffic of a policy on held-out text, with a cache of `slots` experts per layer."""

    policy: str
    nll: Tensor  # [n] float64, mean loss of a window in nats per token
    hits: float  # experts per layer per step
    misses: float
    passes: float
    counters: Counters


class StepByStep:
    """A policy that decides steps in order, each with the LFU cache that the steps before it left.

    A call takes `streams` independent sequences of steps, concatenated: [streams * S, T, ...].
    """

    def __init__(self, policy: Policy, streams: int, slots: int) -> None:
        self.policy, self.needs_energy = policy, policy.needs_energy
        self.caches = [LfuCache(slots) for _ in range(streams)]
        self.steps = self.hits = self.misses = self.passes = 0

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Routing:
        streams, experts = len(self.caches), batch.probs.shape[-1]
        missing = torch.ones(streams, experts, dtype=torch.bool, device=batch.probs.device)
        routings = []
        for s in range(batch.probs.shape[0] // streams):
            step = at(batch, streams, s)
            for row, cache in zip(missing, self.caches, strict=True):
                row.fill_(True)[list(cache.slot_of)] = False
            routing = self.policy(step, LayerStats({**stats, "placement_cost": missing}))
            routings.append(routing)
            for row, cache in zip(fetched_experts(routing, step), self.caches, strict=True):
                fetch = cache.step(row.nonzero()[:, 0].tolist())
                self.steps += 1
                self.hits, self.misses = self.hits + fetch.hits, self.misses + fetch.misses
                self.passes += fetch.passes
        ids, weights = (torch.stack([getattr(r, f) for r in routings], 1).flatten(0, 1) for f in ("ids", "weights"))
        shifts = [r.shift for r in routings if r.shift is not None]
        return Routing(ids, weights, torch.stack(shifts, 1).flatten(0, 1) if shifts else None)

    def reset(self) -> None:
        """Set the counters to zero; the caches stay as they are."""
        self.steps = self.hits = self.misses = self.passes = 0


def at(batch: RouterBatch, streams: int, step: int) -> RouterBatch:
    """Step number `step` of every stream: [streams * S, T, ...] -> [streams, T, ...]."""
    values = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    taken = {n: v.unflatten(0, (streams, -1))[:, step] for n, v in values.items() if isinstance(v, Tensor)}
    return dataclasses.replace(batch, **taken)


@torch.no_grad()
def evaluate_offloaded(
    model: nn.Module, policy: Policy, stats: Stats | None, windows: Tensor, *, slots: int, batch: int, prefill: int = 1
) -> OffloadResult:
    """Teacher-forced loss of windows [n, S + 1] with each layer's experts on the host and `slots` of them cached.

    The first piece of the text (16 windows, or one batch if that is more) fills the caches and is not counted. Each
    batch of a piece is a stream with separate caches. No weight is moved: a cache is simulated exactly as `offload`
    keeps it. Raises ValueError unless the windows are at least two whole pieces.
    """
    parts = list(pieces(windows, batch))
    size = max(batch, SEQUENCES // batch * batch)
    if len(parts) < 2 or any(len(part) != size for part in parts):
        raise ValueError(f"{len(windows)} windows at batch={batch} must be at least two whole pieces of {size}")
    placed = place_experts(model, stats, 1)
    device = next(model.parameters()).device
    layers: list[StepByStep] = []
    losses, counters = [], []
    for number, part in enumerate(parts):
        ids, targets, steps = teacher_forced(part.to(device), prefill, batch)
        with attach(model, policy, placed, finished_ids=frozenset()) as run:
            layers = layers or [StepByStep(router.policy, size // batch, slots) for router in run.routers]
            for router, layer in zip(run.routers, layers, strict=True):
                router.policy = layer  # type: ignore[assignment]
            with run.decode_steps(steps[(steps >= 0).all(-1)]):
                logits = model(input_ids=ids, use_cache=False).logits
            if number:
                counters.append(run.counters)
                losses.append(window_loss(logits, targets, prefill))
            else:
                for layer in layers:
                    layer.reset()
    count = sum(layer.steps for layer in layers)
    hits, misses, passes = (sum(getattr(x, f) for x in layers) / count for f in ("hits", "misses", "passes"))
    return OffloadResult(policy.name, torch.cat(losses), hits, misses, passes, sum_counters(counters))
