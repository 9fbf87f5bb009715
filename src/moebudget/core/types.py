"""Values that flow through a policy: RouterBatch -> Active -> Routing, and the statistics of a layer.

Letters used for shapes everywhere: T rows of the step, N routed experts, K routes per token, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class RowKind(IntEnum):
    """Kind of a row in a step: one enum for the core, the kernels and vLLM. Tensors hold it as int8.

    Compare tensors with the `.value`, which torch.compile can trace.
    """

    PAD = 0  # holds no token: names a fetched expert, with weight 0
    DECODE = 1  # votes, and is re-routed inside the active set
    NATIVE = 2  # keeps the native routes and does not vote: prefill, opt-out
    BROKEN = 3  # a decode row whose router input is not finite: does not vote, keeps NaN weights


@dataclass(frozen=True, slots=True)
class RouterBatch:
    """Inputs of one Mixture-of-Experts layer in one decode step, with its native routes.

    `choice` and `probs` differ for routers with a selection bias or expert groups. The native weight of expert u for
    row t is `probs[t, u] * factor[t]`, for every u, so a fill needs no knowledge of the model.
    """

    hidden: Tensor  # [T, d] what the router and the experts read (after the norm)
    choice: Tensor  # [T, N] float32, what the model ranks by; -inf for closed groups; never contradicts `ids`
    probs: Tensor  # [T, N] float32, what the model weighs by
    factor: Tensor  # [T] float32
    ids: Tensor  # [T, K] int64, the native routes, best first
    weights: Tensor  # [T, K] float32, the native weights; 0 in PAD rows, NaN in BROKEN rows
    kind: Tensor  # [T] int8, the RowKind of every row
    renormalize: bool  # whether the model divides its weights by their sum over the routes
    logits: Tensor  # [T, N] float32, the router's own numbers; `choice` where a bias makes the model rank otherwise
    request: Tensor | None = None  # [T] int64, request of a row (speculative verification); None = one row per request
    accept: Tensor | None = None  # [T] float32, probability that a draft token is accepted; None = 1 in every row
    energy: Tensor | None = None  # [T, K] float32, true squared output norms of the routes; analysis only

    @property
    def decode(self) -> Tensor:
        """[T] bool: rows of kind DECODE, which vote."""
        return self.kind == RowKind.DECODE.value


@dataclass(frozen=True, slots=True)
class Active:
    """The active set: experts that a step may fetch, and those that may replace a missing one (None: all)."""

    mask: Tensor  # [N] bool
    anchors: Tensor | None = None  # [N] bool


@dataclass(frozen=True, slots=True)
class Routing:
    """Routes that are executed. A slot of weight 0 is unused and repeats an expert that the step fetches anyway.

    Fills that replace route by route (`Substitute`, `Fold`) may name an expert twice in a row: the weights add. A fill
    with its own number of routes (OEA's k_max) may have more than K slots.
    """

    ids: Tensor  # [T, K] int64
    weights: Tensor  # [T, K] float32
    shift: Tensor | None = None  # [T, d] float32, added to the experts' output (`MeanDirection`, `LowRankSketch`)


PLACEMENT = frozenset({"placement_device", "placement_cost"})  # tensors that a Placement adds to the statistics
ALLOCATED = frozenset(
    {"layer_budget", "layer_price", "layer_fill"}
)  # tensors that `moebudget allocate` adds to the statistics

SKETCHED = frozenset({"sketch_in", "sketch_out"})  # tensors that `moebudget sketch` adds to the statistics


class MissingStatisticError(LookupError):
    """A policy needs a calibrated tensor, or a placement, that the statistics do not hold."""


def makers(needs: frozenset[str]) -> dict[str, frozenset[str]]:
    """The commands that make these statistics, each with those that it makes; "placement" for what the user says."""
    parts = {
        "calibrate": needs - ALLOCATED - SKETCHED - PLACEMENT,
        "allocate": needs & ALLOCATED,
        "sketch": needs & SKETCHED,
        "placement": needs & PLACEMENT,
    }
    return {maker: names for maker, names in parts.items() if names}


def how_to_make(name: str) -> str:
    """The way to get a missing statistic."""
    if name in PLACEMENT:
        return (
            "it says which device holds an expert and what fetching it costs: add a placement, as in "
            "`place(stats, Placement.contiguous(experts, devices=4))`, or --devices 4 to `moebudget eval`"
        )
    if name == "layer_fill":
        return (
            "it is the denominator of a layer's weights: add it with `moebudget allocate MODEL --stats "
            "stats.safetensors --data TEXT --fill by_layer -o allocated.safetensors` and pass that file"
        )
    if name in SKETCHED:
        return (
            "it replaces lost experts: add it with `moebudget sketch MODEL --stats stats.safetensors "
            "--data TEXT -o sketched.safetensors` and pass that file"
        )
    if name in ALLOCATED:
        return (
            "it is a layer's share of an average budget: add it with `moebudget allocate MODEL --stats "
            "stats.safetensors --data TEXT -o allocated.safetensors` and pass that file"
        )
    return "make it with `moebudget calibrate MODEL --data TEXT --for POLICY -o stats.safetensors` and pass that file"


@dataclass(frozen=True, slots=True)
class LayerStats(Mapping[str, Tensor]):
    """The calibrated tensors of one layer, by name; a missing one is an error that says how to make it."""

    tensors: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            have = ", ".join(sorted(self.tensors)) or "none"
            raise MissingStatisticError(
                f"this policy needs the statistic {name!r}, the statistics hold: {have}; {how_to_make(name)}"
            )
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def to(self, device: torch.device | str) -> LayerStats:
        """The same tensors on another device."""
        return LayerStats({name: tensor.to(device) for name, tensor in self.tensors.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


NO_STATS = LayerStats({})
