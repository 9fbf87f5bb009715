"""The values that flow through a policy: RouterBatch -> Active -> Routing.

Letters used for shapes everywhere: T rows of the step, N routed experts, K routes a token, d hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RouterBatch:
    """What one Mixture-of-Experts layer sees in one decode step, before anything is changed.

    `choice` and `probs` differ for routers with a selection bias or expert groups. The model's own weight of expert u
    for row t is `probs[t, u] * factor[t]`, for every u, so a fill needs no knowledge of the model.
    """

    hidden: Tensor  # [T, d] what the router and the experts read (after the norm)
    choice: Tensor  # [T, N] float32, what the model ranks by; -inf for closed groups; never contradicts `ids`
    probs: Tensor  # [T, N] float32, what the model weighs by
    factor: Tensor  # [T] float32
    ids: Tensor  # [T, K] int64, the model's own routes, best first
    weights: Tensor  # [T, K] float32, the model's own weights; 0 in padding rows, NaN in real rows that are not finite
    live: Tensor  # [T] bool, rows that vote: decode rows whose router input is finite
    renormalize: bool  # whether the model divides its weights by their sum over the routes
    logits: Tensor  # [T, N] float32, the router's own numbers; `choice` where a bias makes the model rank otherwise
    request: Tensor | None = None  # [T] int64, request of a row (speculative verification); None = one row a request
    accept: Tensor | None = None  # [T] float32, probability that a draft token is accepted; None = 1 in every row
    energy: Tensor | None = None  # [T, K] float32, true squared output norms of the routes; analysis only


@dataclass(frozen=True, slots=True)
class Active:
    """The experts that a step may fetch, and those of them that may stand in for a missing one (None: all)."""

    mask: Tensor  # [N] bool
    anchors: Tensor | None = None  # [N] bool


@dataclass(frozen=True, slots=True)
class Routing:
    """What is executed. A slot of weight 0 is unused and repeats an expert that the step fetches anyway.

    Fills that replace route by route (`Substitute`, `Fold`) may name an expert twice in a row: the weights add. A fill
    with its own number of routes (OEA's k_max) may have more than K slots.
    """

    ids: Tensor  # [T, K] int64
    weights: Tensor  # [T, K] float32
    shift: Tensor | None = None  # [T, d] float32, added to the experts' output (`StandIn`, `Sketch`)


PLACEMENT = frozenset({"placement_device", "placement_cost"})  # tensors that a Placement adds to the statistics
ALLOCATED = frozenset(
    {"layer_budget", "layer_price", "layer_fill"}
)  # tensors that `moebudget allocate` adds to the statistics

SKETCHED = frozenset({"sketch_in", "sketch_out"})  # tensors that `moebudget sketch` adds to the statistics


class MissingStatisticError(LookupError):
    """A policy needs a calibrated tensor, or a placement, that the statistics do not hold."""


def how_to_make(name: str) -> str:
    """What to do about a missing statistic."""
    if name in PLACEMENT:
        return (
            "it says on which device an expert lies and what fetching it costs: give a placement, as in "
            "`place(stats, Placement.contiguous(experts, devices=4))`, or --devices 4 to `moebudget eval`"
        )
    if name == "layer_fill":
        return (
            "it says by what a layer divides its weights: add it with `moebudget allocate MODEL --stats "
            "stats.safetensors --data TEXT --fill by_layer -o allocated.safetensors` and pass that file"
        )
    if name in SKETCHED:
        return (
            "it stands in the place of lost experts: add it with `moebudget sketch MODEL --stats stats.safetensors "
            "--data TEXT -o sketched.safetensors` and pass that file"
        )
    if name in ALLOCATED:
        return (
            "it says how a layer shares in an average budget: add it with `moebudget allocate MODEL --stats "
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
