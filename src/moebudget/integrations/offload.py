"""Experts in pinned host memory and a cache of them on the device: `with offload(model, slots=32, device="cuda")`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.cache import LfuCache, Load
from moebudget.integrations.families import MoeLayer, UnsupportedModelError, facts_of, moe_layers
from moebudget.integrations.transformers import MARK
from moebudget.placement import TransferFit
from moebudget.stats import Stats

IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


@dataclass(slots=True)
class CacheCounters:
    """What a layer, or a sum of layers, fetched. Calls are forward passes, prefill included."""

    calls: int = 0
    hits: int = 0  # experts that a call ran and the device held
    misses: int = 0  # experts that were copied to the device
    bytes: int = 0
    passes: int = 0  # parts that calls ran in; more than calls where the slots did not hold what one needed

    def __add__(self, other: CacheCounters) -> CacheCounters:
        return CacheCounters(*(getattr(self, f) + getattr(other, f) for f in self.__slots__))


class _Lookup:
    """Stands for a stacked weight [N, ...] that is only indexed, one expert at a time."""

    def __init__(self, slots: Tensor, slot_of: Tensor) -> None:
        self.slots, self.slot_of = slots, slot_of

    def __getitem__(self, experts: Tensor) -> Tensor:
        return self.slots[self.slot_of[experts]]


class LayerCache:
    """One layer's experts: the weights on the host, those of some on the device, and which."""

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
        self.sizes = [w[0].numel() * w.element_size() for w in self.host.values()]  # bytes of an expert's tensors
        self.stream = torch.cuda.Stream(self.device) if pin else None
        self.slot_of = torch.empty_like(missing, dtype=torch.int64)
        self.cache = LfuCache(slots)
        self.clear()

    def clear(self) -> None:
        """Nothing is cached, nothing was counted."""
        self.cache, self.counters = LfuCache(self.cache.slots), CacheCounters()
        self._publish()

    def run(self, forward: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """hidden [T, d], ids and weights [T, K] -> [T, d], as `forward` computes it with all experts at hand.

        The host waits for the device once: it must know the experts.
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
            here = torch.isin(routes, torch.tensor(group)).nonzero()[:, 0]  # routes of this pass
            at = self._pinned(here).to(self.device, non_blocking=True)
            parts = ids.flatten()[at][:, None], weights.flatten()[at][:, None]
            outputs.index_copy_(0, at, self._call(forward, hidden[at // ids.shape[-1]], *parts))
        return outputs.view(*ids.shape, -1).sum(1)

    def _pinned(self, values: Tensor) -> Tensor:
        """Values on the host in memory that is copied from while the host goes on, behind all copies before."""
        return values.pin_memory() if self.stream else values

    def _call(self, forward: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts' own forward on the slots. `eager` adds up in the order of experts, so it needs their ids."""
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
        """On the copy stream, after all that reads the slots; the computing stream waits for it, the host does not."""
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
    """A model whose experts lie on the host, with a cache for each of its layers."""

    def __init__(self, model: nn.Module, layers: list[LayerCache], missing: Tensor) -> None:
        self.model, self.layers, self._missing = model, layers, missing

    def stats(self, stats: Stats | None = None) -> Stats:
        """Statistics (without any: the model's facts alone) with this placement, for `attach`.

        `placement_cost` [L, N] bool is shared memory: at the moment a policy reads it, it is False for what is cached
        and True for what a copy would have to fetch. All experts have device 0.
        """
        stats = Stats(facts_of(self.model), {}) if stats is None else stats
        device = torch.zeros_like(self._missing, dtype=torch.int64)
        return replace(stats, tensors={**stats.tensors, "placement_cost": self._missing, "placement_device": device})

    @property
    def counters(self) -> CacheCounters:
        """Sums over the layers."""
        return sum((layer.counters for layer in self.layers), CacheCounters())

    def copy_seconds(self, link: TransferFit) -> float:
        """What the copies that were counted take by the link's fit, t0 + bytes / bandwidth for each tensor."""
        return sum(cache.counters.misses * sum(map(link.seconds, cache.sizes)) for cache in self.layers)

    def reset(self) -> None:
        """Set the counters to zero; what is cached stays."""
        for layer in self.layers:
            layer.counters = CacheCounters()

    def clear(self) -> None:
        """Forget what is cached and how often it was used, and set the counters to zero."""
        for layer in self.layers:
            layer.clear()


@contextmanager
def offload(model: nn.Module, slots: int, device: torch.device | str = "cuda") -> Iterator[Offloaded]:
    """Keep the experts in host memory and `slots` of each layer on `device`; all else of the model goes to `device`.

    The results are those of the model with all weights on the device. A step that needs more experts than there are
    slots runs in several passes over them. For inference; afterwards the model is where it was.

    Raises ValueError for slots or a device that cannot be, UnsupportedModelError for experts that are not stacked
    [N, ...] or an implementation without slots, RuntimeError if a policy is attached, before anything is changed.
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
    """Take the weights out of the experts module and let its forward run on the cache."""
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
        raise RuntimeError("the experts are offloaded, so they would be missing here: leave the offload block first")

    parameters = dict(experts._parameters)
    undo.callback(restore)
    for name, weight in parameters.items():
        weight.data = cache.host[name]  # so that the weights do not stay in memory twice
        del experts._parameters[name]
    undo.callback(experts.register_state_dict_pre_hook(refuse).remove)
    experts.__class__ = type(f"Offloaded{kind.__name__}", (kind,), {"forward": forward})


def require_device(device: torch.device | str) -> torch.device:
    """The device; ValueError if it is not there or no CPU or CUDA device."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device {str(device)!r}: experts are cached on cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise ValueError(f"device {str(device)!r} is not there: torch sees {count} GPUs")
        return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device


def require_implementation(experts: Any) -> str:
    """How the experts module computes; UnsupportedModelError if that cannot run on slots."""
    name = experts.config._experts_implementation
    if name not in IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"experts implementation {name!r} cannot run on a cache; load the model with experts_implementation= one "
            f"of {', '.join(IMPLEMENTATIONS)}"
        )
    return str(name)


def require_stacked(layer: MoeLayer, slots: int) -> None:
    """Raise unless the layer's experts are tensors [N, ...] and `slots` of them can be cached."""
    n = len(layer.weight)
    if isinstance(slots, bool) or not isinstance(slots, int) or not 1 <= slots <= n:
        raise ValueError(f"slots={slots!r} must be a whole number from 1 to {n}, the experts of a layer")
    shapes = {name: tuple(p.shape) for name, p in layer.experts.named_parameters()}
    wrong = {name: shape for name, shape in shapes.items() if "." in name or not shape or shape[0] != n}
    if wrong or not shapes or any(p.is_meta for p in layer.experts.parameters()):
        raise UnsupportedModelError(f"{layer.name}: experts must be loaded tensors of shape [{n}, ...], not {shapes}")
    require_implementation(layer.experts)
