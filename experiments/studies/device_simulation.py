"""Simulation of experts on many devices, from routing recorded on one device: loads, misses and their maxima."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from experiments.studies.offload_simulation import at
from moebudget.core.ops import fetched_experts
from moebudget.core.placement import Placement
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.core.types import NO_STATS, LayerStats, RouterBatch, Routing
from moebudget.engines.transformers.attach import attach
from moebudget.engines.transformers.expert_cache import LfuCache
from moebudget.engines.transformers.teacher_forcing import teacher_forced
from moebudget.methods.native import native


class _Recorder:
    needs_energy = False

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.seen: list[RouterBatch] = []

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Routing:
        self.seen.append(batch)
        return self.policy(batch, stats)


@torch.no_grad()
def record_steps(model: nn.Module, windows: Tensor, batch: int, prefill: int = 1) -> list[RouterBatch]:
    """The batch of every layer at the decode steps of windows [n, S + 1] in native routing, [steps, batch, ...].

    A step is one position of `batch` windows; the steps of a batch follow each other. Raises ValueError unless n is a
    multiple of batch.
    """
    if not len(windows) or len(windows) % batch:
        raise ValueError(f"{len(windows)} windows are not whole batches of {batch}")
    batches: list[list[RouterBatch]] = []
    for part in windows.split(batch):
        ids, _, steps = teacher_forced(part, prefill, batch)
        with attach(model, native(), finished_ids=frozenset()) as run:
            recorders = [_Recorder(router.policy) for router in run.routers]
            for router, recorder in zip(run.routers, recorders, strict=True):
                router.policy = recorder  # type: ignore[assignment]
            with run.decode_steps(steps[(steps >= 0).all(-1)]):
                model(input_ids=ids, use_cache=False)
        batches.append([recorder.seen[0] for recorder in recorders])
    return [_joined(layer) for layer in zip(*batches, strict=True)]


def _joined(parts: Sequence[RouterBatch]) -> RouterBatch:
    first = parts[0]
    names = [name for name in first.__slots__ if isinstance(getattr(first, name), Tensor)]
    joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return RouterBatch(**joined, renormalize=first.renormalize)


@dataclass(frozen=True, slots=True)
class DeviceLoads:
    """Experts and misses of every device, at every step and layer."""

    experts: Tensor  # [S, L, D] int64, experts that a device runs
    misses: Tensor  # [S, L, D] int64, those that it has to copy first; 0 if nothing is offloaded

    @property
    def straggler(self) -> float:
        """Experts of the device that runs most, per layer per step."""
        return float(self.experts.amax(-1).double().mean())

    @property
    def straggler_misses(self) -> float:
        """Misses of the device that misses most, per layer per step."""
        return float(self.misses.amax(-1).double().mean())

    @property
    def total(self) -> float:
        """Experts run on all devices, per layer per step."""
        return float(self.experts.sum(-1).double().mean())

    @property
    def total_misses(self) -> float:
        """Misses of all devices, per layer per step."""
        return float(self.misses.sum(-1).double().mean())


def simulate_devices(
    layers: Sequence[RouterBatch], policy: Policy, stats: Stats | None, devices: int, slots: int = 0, warm: int = 0
) -> DeviceLoads:
    """Decide recorded steps under a policy, with the experts on `devices` devices in equal blocks.

    slots > 0: the experts are offloaded; each device caches `slots` experts of all its layers together (LFU, as CAEE
    describes it), and the layers of a step follow each other. The first `warm` steps fill the caches and are not
    counted. The recorded routing is native throughout: the effect of a policy's error on later layers is left out.

    Raises ValueError if there are more devices than experts, or if no step remains.
    """
    count, experts = layers[0].probs.shape[0], layers[0].probs.shape[-1]
    if not 0 <= warm < count:
        raise ValueError(f"warm={warm} must be between 0 and {count - 1}, so that some of the {count} steps count")
    placement = Placement.contiguous(experts, devices).tensors()
    home = torch.nn.functional.one_hot(placement["placement_device"], devices)  # [N, D]
    tensors = [{**(NO_STATS if stats is None else stats.layer(i)), **placement} for i in range(len(layers))]
    if not slots:
        fetched = [_fetched(policy, batch, t) for batch, t in zip(layers, tensors, strict=True)]
        loads = (torch.stack(fetched, 1)[warm:, :, :, None] & home.bool()).sum(2)
        return DeviceLoads(loads, torch.zeros_like(loads))
    where = placement["placement_device"].tolist()
    caches = [LfuCache(slots) for _ in range(devices)]
    loads, misses = (torch.zeros(count, len(layers), devices, dtype=torch.int64) for _ in range(2))
    for s in range(count):
        for i, batch in enumerate(layers):
            missing = torch.tensor([i * experts + e not in caches[where[e]].slot_of for e in range(experts)])
            ran = _fetched(policy, at(batch, 1, s), {**tensors[i], "placement_cost": missing})[0]
            loads[s, i] = ran.long() @ home
            for d in loads[s, i].nonzero()[:, 0].tolist():
                keys = [i * experts + e for e in ran.nonzero()[:, 0].tolist() if where[e] == d]
                misses[s, i, d] = caches[d].step(keys).misses
    return DeviceLoads(loads[warm:], misses[warm:])


def _fetched(policy: Policy, batch: RouterBatch, stats: dict[str, Tensor]) -> Tensor:
    """[S, N] bool."""
    return fetched_experts(policy(batch, LayerStats(stats)), batch)
