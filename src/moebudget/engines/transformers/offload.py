"""Experts in pinned host memory, with a cache on the device: `with offload(model, slots=32, device="cuda")`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.core.stats import Stats
from moebudget.engines.transformers.attach import MARK
from moebudget.engines.transformers.expert_cache import LfuCache, Load
from moebudget.engines.transformers.families import MoeLayer, UnsupportedModelError, facts_of, moe_layers
from moebudget.engines.transformers.transfers import TransferFit

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


@dataclass(slots=True)
class CacheCounters:
    """Cache hits and copies of a layer, or of a sum of layers. Calls are forward passes, prefill included."""

    calls: int = 0
    hits: int = 0  # experts that a call executed and that were in the cache
    misses: int = 0  # experts that were copied to the device
    bytes: int = 0
    passes: int = 0  # parts in which calls ran; more than `calls` if a call needed more experts than there are slots

    def __add__(self, other: CacheCounters) -> CacheCounters:
        return CacheCounters(*(getattr(self, f) + getattr(other, f) for f in self.__slots__))


class _Lookup:
    """Replacement for a stacked weight [N, ...]. It supports indexing by expert only, and reads the slots."""

    def __init__(self, slots: Tensor, slot_of: Tensor) -> None:
        self.slots, self.slot_of = slots, slot_of

    def __getitem__(self, experts: Tensor) -> Tensor:
        return self.slots[self.slot_of[experts]]


class LayerCache:
    """One layer's experts: all weights on the host, those of the cached experts on the device."""

    def __init__(self, layer: MoeLayer, slots: int, missing: Tensor) -> None:
        self.experts: Any = layer.experts
        self.device, self.missing = missing.device, missing  # [N] bool, read by policies
        self.names = [name for name, _ in self.experts.named_parameters(recurse=False)]
        pin = self.device.type == "cuda"
        self.host: dict[str, Tensor] = {}
        for name in self.names:
            weight = self.experts.get_parameter(name).detach()
            self.host[name] = torch.empty_like(weight, device="cpu", pin_memory=pin).copy_(weight)
        self.slots = {name: torch.zeros_like(w[:slots], device=self.device) for name, w in self.host.items()}
        self.sizes = [w[0].numel() * w.element_size() for w in self.host.values()]  # bytes of one expert, per tensor
        self.stream = torch.cuda.Stream(self.device) if pin else None
        self.slot_of = torch.empty_like(missing, dtype=torch.int64)
        self.cache = LfuCache(slots)
        self.clear()

    def clear(self) -> None:
        """Empty the cache and set the counters to zero."""
        self.cache, self.counters = LfuCache(self.cache.slots), CacheCounters()
        self._publish()

    def run(self, forward: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, d], ids and weights [T, K] -> [T, d], as `forward` computes it with all experts on the device.

        The host waits for the device once, because it must know the experts.
        """
        routes = ids.flatten().cpu()  # [T * K]
        needed = routes.unique().tolist()
        passes = self.cache.plan(needed)
        self.counters += CacheCounters(calls=1, passes=len(passes))
        if len(passes) <= 1:
            self._load(needed)
            return self._call(forward, hidden, ids, weights)
        outputs = hidden.new_zeros(len(routes), hidden.shape[-1])
        for group in passes:
            self._load(group)
            on_host = torch.isin(routes, torch.tensor(group)).nonzero()[:, 0]  # indices of the routes of this pass
            index = self._pinned(on_host).to(self.device, non_blocking=True)
            parts = ids.flatten()[index][:, None], weights.flatten()[index][:, None]
            outputs.index_copy_(0, index, self._call(forward, hidden[index // ids.shape[-1]], *parts))
        return outputs.view(*ids.shape, -1).sum(1)

    def _pinned(self, values: Tensor) -> Tensor:
        """Host values in pinned memory, so that copying them to the device does not block the host."""
        return values.pin_memory() if self.stream else values

    def _call(self, forward: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run `forward` on the slots. `eager` sums in the order of experts, so it needs expert ids, not slots."""
        eager = require_implementation(self.experts) == "eager"
        for name, slots in self.slots.items():
            setattr(self.experts, name, _Lookup(slots, self.slot_of) if eager else slots)
        self.experts.num_experts = len(self.missing) if eager else self.cache.slots
        output: Tensor = forward(self.experts, hidden, ids if eager else self.slot_of[ids], weights)
        return output

    def _load(self, group: list[int]) -> None:
        loads = self.cache.reserve(group)
        self.counters += CacheCounters(hits=len(group) - len(loads), misses=len(loads))
        if not loads:
            return
        try:
            self._copy(loads)
            self.cache.commit(loads)
            self.counters += CacheCounters(bytes=len(loads) * sum(self.sizes))
        finally:
            self._publish()

    def _copy(self, loads: list[Load]) -> None:
        """Copy on the copy stream, after all reads of the slots. The compute stream waits, the host does not."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            for expert, slot in loads:
                for name in self.names:
                    self.slots[name][slot].copy_(self.host[name][expert], non_blocking=True)
        if self.stream:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def _publish(self) -> None:
        table = [self.cache.slot_of.get(expert, -1) for expert in range(len(self.missing))]
        self.slot_of.copy_(self._pinned(torch.tensor(table)), non_blocking=True)
        torch.lt(self.slot_of, 0, out=self.missing)


class Offloaded:
    """A model with its experts on the host and one cache per layer."""

    def __init__(self, model: nn.Module, layers: list[LayerCache], missing: Tensor) -> None:
        self.model, self.layers, self._missing = model, layers, missing

    def stats(self, stats: Stats | None = None) -> Stats:
        """Statistics with this placement, for `attach`; without any, the model's facts alone.

        `placement_cost` [L, N] bool is shared memory. When a policy reads it, it is False for experts in the cache and
        True for experts that would have to be copied. All experts have device 0.
        """
        stats = Stats(facts_of(self.model), {}) if stats is None else stats
        device = torch.zeros_like(self._missing, dtype=torch.int64)
        return replace(stats, tensors={**stats.tensors, "placement_cost": self._missing, "placement_device": device})

    @property
    def counters(self) -> CacheCounters:
        """Sums over the layers."""
        return sum((layer.counters for layer in self.layers), CacheCounters())

    def copy_seconds(self, link: TransferFit) -> float:
        """Time of the counted copies by the link's fit, t0 + bytes / bandwidth for each tensor."""
        return sum(cache.counters.misses * sum(map(link.seconds, cache.sizes)) for cache in self.layers)

    def reset(self) -> None:
        """Set the counters to zero; the cache keeps its experts."""
        for layer in self.layers:
            layer.counters = CacheCounters()

    def clear(self) -> None:
        """Empty the caches, forget how often experts were used, and set the counters to zero."""
        for layer in self.layers:
            layer.clear()


@contextmanager
def offload(model: nn.Module, slots: int, device: torch.device | str = "cuda") -> Iterator[Offloaded]:
    """Keep the experts in host memory, and `slots` per layer on `device`. The rest of the model moves to `device`.

    The results are those of the model with all weights on the device. A step that needs more experts than there are
    slots runs in several passes. For inference only; afterwards the model returns to the device that it was on.

    Raises ValueError for an impossible number of slots or device, UnsupportedModelError for experts that are not
    stacked [N, ...] or an experts implementation that cannot run on slots, RuntimeError if a policy is attached; all
    before anything is changed.
    """
    device = require_device(device)
    layers = moe_layers(model)
    for layer in layers:
        require_stacked(layer, slots)
    if getattr(model, MARK, None) is not None:
        raise RuntimeError("a policy is attached to this model; offload first, then attach inside the block")
    before = layers[0].weight.device
    missing = torch.ones(len(layers), len(layers[0].weight), dtype=torch.bool, device=device)
    with ExitStack() as undo:
        undo.callback(model.to, before)
        caches: list[LayerCache] = []
        for layer, row in zip(layers, missing, strict=True):
            caches.append(LayerCache(layer, slots, row))
            _take(caches[-1], undo)
        model.to(device)
        yield Offloaded(model, caches, missing)


def _take(cache: LayerCache, undo: ExitStack) -> None:
    """Remove the weights from the experts module, and make its forward run on the cache."""
    experts, kind = cache.experts, type(cache.experts)
    signature = inspect.signature(kind.forward)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        hidden, ids, weights = list(signature.bind(self, *args, **kwargs).arguments.values())[1:4]
        return cache.run(kind.forward, hidden, ids, weights)

    def restore() -> None:
        experts.__class__, experts.num_experts = kind, len(cache.missing)
        for name, weight in parameters.items():
            experts.__dict__.pop(name, None)
            experts.register_parameter(name, weight)

    def refuse(*_: Any) -> None:
        raise RuntimeError(
            "the experts are offloaded and would be missing from the state dict: leave the offload block first"
        )

    parameters = dict(experts._parameters)
    undo.callback(restore)
    for name, weight in parameters.items():
        weight.data = cache.host[name]  # so that memory does not hold the weights twice
        del experts._parameters[name]
    undo.callback(experts.register_state_dict_pre_hook(refuse).remove)
    experts.__class__ = type(f"Offloaded{kind.__name__}", (kind,), {"forward": forward})


def require_device(device: torch.device | str) -> torch.device:
    """The device; ValueError if it does not exist or is neither a CPU nor a CUDA device."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: experts can be cached on cpu or cuda only")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device {str(device)!r} does not exist: torch sees {count} GPUs")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def require_implementation(experts: Any) -> str:
    """Name of the experts implementation; UnsupportedModelError if it cannot run on slots."""
    name = experts.config._experts_implementation
    if name not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"experts implementation {name!r} cannot run on a cache; load the model with experts_implementation set "
            f"to one of {', '.join(IMPLEMENTATIONS)}"
        )
    return str(name)


def require_stacked(layer: MoeLayer, slots: int) -> None:
    """Raise unless the layer's experts are tensors [N, ...] and `slots` of them can be cached."""
    n = len(layer.weight)
    if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= n:
        raise ValueError(f"slots={slots!r} must be a whole number from 1 to {n}, the number of experts per layer")
    shapes = {name: tuple(p.shape) for name, p in layer.experts.named_parameters()}
    wrong = {name: shape for name, shape in shapes.items() if "." in name or not shape or shape[0] != n}
    if wrong or not shapes or any(p.is_meta for p in layer.experts.parameters()):
        raise UnsupportedModelError(f"{layer.name}: experts must be loaded tensors of shape [{n}, ...], not {shapes}")
    require_implementation(layer.experts)
