"""Statistics: calibrated tensors [L, ...] over the Mixture-of-Experts layers, in safetensors with metadata."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moebudget.core.placement import Placement
from moebudget.core.types import PLACEMENT, LayerStats, MissingStatisticError, how_to_make

SCHEMA = 1
HOW = "make new statistics with `moebudget calibrate MODEL --data TEXT -o stats.safetensors`"


class StatsError(ValueError):
    """Statistics that cannot be used: unreadable, of another schema, or of another model."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts on which statistics and the model they are used for must agree."""

    family: str
    layers: tuple[int, ...]  # indices of the Mixture-of-Experts layers
    experts: int
    top_k: int
    hidden: int
    router_hash: str  # of the first and last router matrix, rounded to bf16: tells fine-tunes apart

    @property
    def config_hash(self) -> str:
        """Twelve hex digits over everything but the weights."""
        shape = {k: v for k, v in dataclasses.asdict(self).items() if k != "router_hash"}
        return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:12]


def hash_routers(routers: Iterable[Tensor]) -> str:
    """Twelve hex digits over router matrices; the same for a checkpoint loaded in bf16 and in float32."""
    digest = hashlib.sha256()
    for router in routers:
        digest.update(router.detach().to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:12]


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """Calibrated tensors by name, each [L, N] or [L, N, ...], for the layers of `facts`, and how they were made.

    predictor_weight [L, N, d], predictor_bias [L, N]: log energy of expert u is a_u . z/|z| + b_u
    energy_mean [L, N]: mean of |E_u(z)|^2 over tokens routed to u; output_norm: of |E_u(z)|; output_norm_weighted: of
    w |E_u(z)|; super_expert [L, N]: 1 for REAP's super experts; count, weight_mean [L, N]
    output_direction [L, N, d]: mean of E_u(z) / |E_u(z)|, for the fill `mean_direction`
    route_ratio [L, K]: median of the j-th route's weight over the heaviest's
    fold_scale, fold_loss [L, N, N]: ExFold's scalars from the row's expert to the column's, and what remains
    similarity_frobenius, similarity_cosine, similarity_cka [L, N, N]: SERE's
    nonlinear_features [L, h, d], nonlinear_weight [L, N, d + h], nonlinear_bias [L, N]
    placement_device, placement_cost [L, N]: see `place`
    layer_budget, layer_price [L, N]: the layer's number of experts, and the removal cost above which it fetches one,
    for 1 to N experts per layer on average, see `layer_budgets`; layer_fill [L, N]: exponent of the fill `by_layer`
    sketch_in [L, N, r, d + 1], sketch_out [L, N, r, d]: maps that replace lost experts, for the fill `sketch`
    r2_heldout [L, N] (NaN where an expert got fewer than two held-out tokens,
    or no token to fit)
    """

    facts: ModelFacts
    tensors: Mapping[str, Tensor]
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def layer(self, position: int) -> LayerStats:
        """Statistics of the position-th Mixture-of-Experts layer."""
        return LayerStats({name: tensor[position] for name, tensor in self.tensors.items()})

    def check(self, facts: ModelFacts, needs: Iterable[str] = ()) -> None:
        """Raise StatsError unless these statistics belong to the model, MissingStatisticError if one is missing.

        An empty `router_hash` in facts (a checkpoint whose weights are not loaded yet) is not compared.
        """
        for field in dataclasses.fields(ModelFacts):
            calibrated, loaded = getattr(self.facts, field.name), getattr(facts, field.name)
            if calibrated != loaded and loaded != "":
                what = {"router_hash": "router weights", "top_k": "routes per token"}.get(field.name, field.name)
                raise StatsError(
                    f"the statistics are of another model: {what} is {calibrated!r} in the statistics "
                    f"({self.info.get('model', 'model not recorded')}) and {loaded!r} in the model; {HOW}"
                )
        for name in sorted(needs):
            if name not in self.tensors:
                have = ", ".join(sorted(self.tensors)) or "none"
                raise MissingStatisticError(
                    f"the policy needs the statistic {name!r}, the statistics hold: {have}; {how_to_make(name)}"
                )

    def save(self, path: str | Path) -> None:
        """Write atomically; the metadata holds schema, facts and info as JSON."""
        path = Path(path)
        meta = {
            "moebudget_schema": str(SCHEMA),
            "facts": json.dumps(dataclasses.asdict(self.facts)),
            "config_hash": self.facts.config_hash,
            "info": json.dumps(dict(self.info)),
        }
        partial = path.with_name(path.name + ".partial")
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.tensors.items()}
        try:
            save_file(tensors, partial, metadata=meta)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def load_stats(path: str | Path) -> Stats:
    """Read statistics. Raises FileNotFoundError, or StatsError that says what is wrong with the file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no statistics at {path}; {HOW}")
    try:
        with safe_open(path, framework="pt") as file:
            meta = file.metadata() or {}
            schema = meta.get("moebudget_schema")
            if schema is None:
                raise StatsError(f"{path} is a safetensors file, but not statistics of moebudget; {HOW}")
            if schema != str(SCHEMA):
                raise StatsError(f"{path} has schema {schema}, this version of moebudget reads schema {SCHEMA}; {HOW}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
            fields = json.loads(meta["facts"])
            facts = ModelFacts(**{**fields, "layers": tuple(fields["layers"])})
            info = json.loads(meta["info"])
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise StatsError(
            f"{path} ({size} bytes) is empty, truncated or not a safetensors file: {error}; {HOW}"
        ) from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise StatsError(f"{path} has damaged metadata ({error}); {HOW}") from error
    for name, tensor in tensors.items():
        size = {"route_ratio": facts.top_k}.get(name, facts.experts)
        shape = (len(facts.layers),) if name == "nonlinear_features" else (len(facts.layers), size)
        if tuple(tensor.shape[: len(shape)]) != shape:
            raise StatsError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, expected to start with "
                f"{' x '.join(map(str, shape))} for {shape[0]} layers of {facts.experts} experts; {HOW}"
            )
    return Stats(facts, tensors, info)


def require_stats(policy: str, needs: Iterable[str], stats: Stats | None) -> None:
    """Raise MissingStatisticError if a policy needs statistics or a placement and there are none."""
    needs = sorted(needs)
    if needs and stats is None:
        how = how_to_make(next((name for name in needs if name not in PLACEMENT), needs[0]))
        raise MissingStatisticError(f"policy {policy!r} needs {', '.join(needs)} and no statistics were given; {how}")


def place(stats: Stats | ModelFacts, placement: Placement | Sequence[Placement]) -> Stats:
    """Statistics with a placement, one for all layers or one per layer; a model without statistics is given by facts.

    Raises StatsError if the number of layers or experts is not the model's.
    """
    stats = Stats(stats, {}) if isinstance(stats, ModelFacts) else stats
    facts = stats.facts
    every = [placement] * len(facts.layers) if isinstance(placement, Placement) else list(placement)
    if len(every) != len(facts.layers):
        raise StatsError(f"{len(every)} placements for {len(facts.layers)} layers: give one, or one per layer")
    for position, layer_placement in enumerate(every):
        if len(layer_placement.device) != facts.experts:
            raise StatsError(
                f"the placement of layer {facts.layers[position]} has {len(layer_placement.device)} experts, "
                f"the model has {facts.experts}"
            )
    tensors = [layer_placement.tensors() for layer_placement in every]
    return dataclasses.replace(
        stats, tensors={**stats.tensors, **{n: torch.stack([t[n] for t in tensors]) for n in sorted(PLACEMENT)}}
    )


def layer_budgets(stats: Stats, average: int) -> tuple[int, ...]:
    """Each layer's number of experts at an average budget, for `attach(budgets=)` and vLLM's `budgets`.

    Raises MissingStatisticError without an allocation, ValueError unless average lies between 1 and N.
    """
    stats.check(stats.facts, ["layer_budget"])
    if not 1 <= average <= stats.facts.experts:
        raise ValueError(f"average={average} must be between 1 and the model's {stats.facts.experts} experts")
    return tuple(int(m) for m in stats.tensors["layer_budget"][:, average - 1].tolist())


def describe(stats: Stats) -> dict[str, Any]:
    """Everything that statistics say about themselves, for people and programs."""
    facts = dataclasses.asdict(stats.facts) | {"config_hash": stats.facts.config_hash}
    return {**stats.info, "facts": facts, "tensors": {name: list(t.shape) for name, t in stats.tensors.items()}}
