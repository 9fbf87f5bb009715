"""Calibration of a model: groups of layers per pass, a ridge regression per expert, alpha by held-out energy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moebudget.calibrate.collect import LayerSums, solve_ridge
from moebudget.calibrate.data import Corpus, Packed
from moebudget.calibrate.pairs import Direction, Folding, RouteRatios, Similarity
from moebudget.calibrate.passes import LastLayerSeen, batches, forward
from moebudget.calibrate.validate import validate
from moebudget.core.provenance import versions
from moebudget.core.stats import ModelFacts, Stats
from moebudget.engines.transformers.families import MoeLayer, model_facts, model_type, moe_layers
from moebudget.engines.transformers.observe import observe_routes
from moebudget.methods.sere import METRICS

DEFAULT_ALPHAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
MEMORY_SHARE = 0.6
PREDICTOR = frozenset({"predictor_weight", "predictor_bias"})
NONLINEAR = frozenset({"nonlinear_features", "nonlinear_weight", "nonlinear_bias"})
MEANS = ("count", "energy_mean", "weight_mean", "output_norm", "output_norm_weighted")
DEFAULT_NEEDS = PREDICTOR | {"energy_mean"}
KNOWN = PREDICTOR | NONLINEAR | {*MEANS, "super_expert", "route_ratio", "output_direction", "fold_scale", "fold_loss"}
KNOWN |= {f"similarity_{metric}" for metric in METRICS}
EXACT = frozenset({"count", "mean_y", *MEANS})  # kept in float64 until all layers are done
INTERNAL = frozenset({"slope", "bias", "mean_y", "output_peak", "nonlinear_slope", "nonlinear_bias"})
FEATURES = 256  # random features of the nonlinear predictor


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device (on the CPU: pages that the system could hand out now)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def layers_per_pass(
    facts: ModelFacts, device: torch.device, memory: int | None = None, needs: frozenset[str] = DEFAULT_NEEDS
) -> int:
    """Number of layers whose sums fit into `memory` (None: 60 % of the free memory). MemoryError if none fits."""
    room = int(MEMORY_SHARE * free_memory(device)) if memory is None else memory
    n, d = facts.experts, facts.hidden
    wanted = ((PREDICTOR, LayerSums.size_in_bytes(n, d)), (NONLINEAR, LayerSums.size_in_bytes(n, d + FEATURES)))
    per_layer = max(1, sum(size for names, size in wanted if names & needs))
    if per_layer > room:
        raise MemoryError(
            f"one layer's statistics take {per_layer / 2**30:.1f} GiB ({n} experts x {d}^2 floats), "
            f"{room / 2**30:.1f} GiB may be used on {device}; free memory or calibrate on a larger device"
        )
    return min(len(facts.layers), room // per_layer)


class LayerSet:
    """Collectors of one layer: the statistics that `needs` names, and the means, which cost almost nothing."""

    def __init__(self, needs: frozenset[str], facts: ModelFacts, position: int, device: torch.device) -> None:
        n, d = facts.experts, facts.hidden
        self.energy = LayerSums(n, d, device, regress=bool(needs & PREDICTOR))
        self.nonlinear: LayerSums | None = None
        if needs & NONLINEAR:
            generator = torch.Generator().manual_seed(position)
            self.nonlinear = LayerSums(n, d, device, torch.randn(FEATURES, d, generator=generator))
        metrics = frozenset(m for m in METRICS if f"similarity_{m}" in needs)
        self.pairs: list[RouteRatios | Direction | Folding | Similarity] = []
        if "route_ratio" in needs:
            self.pairs.append(RouteRatios(facts.top_k, device))
        if "output_direction" in needs:
            self.pairs.append(Direction(n, d, device))
        if needs & {"fold_scale", "fold_loss"}:
            self.pairs.append(Folding(n, device))
        if metrics:
            self.pairs.append(Similarity(n, metrics, device))

    def add(self, layer: MoeLayer, hidden: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:
        for sums in filter(None, (self.energy, self.nonlinear)):
            sums.add(hidden, ids, weights, outputs)
        for collector in self.pairs:
            collector.add(layer, hidden, ids, weights, outputs)

    def finish(self, alphas: list[float]) -> dict[str, Tensor]:
        """The layer's tensors by name; slopes [A, N, d] and biases [A, N] of every alpha."""
        tensors = self.energy.means()
        if self.energy.regress:
            tensors["slope"], tensors["bias"] = solve_ridge(self.energy, alphas)
        if self.nonlinear is not None and self.nonlinear.features is not None:
            tensors["nonlinear_slope"], tensors["nonlinear_bias"] = solve_ridge(self.nonlinear, alphas)
            tensors["nonlinear_features"] = self.nonlinear.features
        for collector in self.pairs:
            tensors |= collector.finish()
        return {name: (t if name in EXACT else t.float()).cpu() for name, t in tensors.items()}


@torch.no_grad()
def calibrate(
    model: nn.Module,
    corpus: Corpus,
    *,
    model_id: str,
    needs: Iterable[str] = DEFAULT_NEEDS,
    budget: int | None = None,
    batch: int = 16,
    alphas: tuple[float, ...] = DEFAULT_ALPHAS,
    rows: int = 8,
    group: int | None = None,
    resume: Path | None = None,
    quiet: bool = False,
) -> Stats:
    """Collect the statistics that `needs` names (a policy's `.needs`; default: BASE's) in one run over the corpus.

    An expert's statistics use only the tokens routed to it; padding is left out. Held-out documents choose a
    predictor's alpha (largest retained energy with `batch` rows per step at `budget` experts, default 5/4 top-k) and
    give the reported R^2; they are never fitted. `rows` sequences go through the model at a time. Layers are handled
    in groups of `group` (default: as many as fit in 60 % of the free memory), with one pass over the text per group;
    a pass ends at the last layer it needs. With `resume`, finished groups are saved in that file and not repeated.
    Similarities run every expert on every token, up to 51,200 tokens.

    Raises ValueError for a statistic that calibration does not make, or a budget outside 1 to N.
    """
    layers = moe_layers(model)
    facts = model_facts(layers, model_type(model))
    device = layers[0].weight.device
    needs = frozenset(needs)
    if needs - KNOWN:
        raise ValueError(f"calibration does not make {sorted(needs - KNOWN)}; it makes {', '.join(sorted(KNOWN))}")
    group = layers_per_pass(facts, device, needs=needs) if group is None else group
    budget = min(facts.experts, round(1.25 * facts.top_k)) if budget is None else budget
    if not 1 <= budget <= facts.experts:
        raise ValueError(f"budget={budget} must be between 1 and the model's {facts.experts} experts")
    console = Console(stderr=True, quiet=quiet)
    key = {
        "facts": facts.config_hash, "routers": facts.router_hash, "data": corpus.id, "alphas": list(alphas),
        "needs": sorted(needs),
    }  # fmt: skip
    collected: dict[str, Tensor] = {} if resume is None else _load_partial(resume, key)
    for start in range(0, len(layers), group):
        positions = range(start, min(start + group, len(layers)))
        if all(f"{p}.count" in collected for p in positions):
            continue
        sums = _collect(model, corpus.fit, facts, positions, rows, device, console, needs)
        for position in positions:
            finished = sums.pop(position).finish(list(alphas))
            collected |= {f"{position}.{name}": tensor for name, tensor in finished.items()}
        if resume is not None:
            partial = resume.with_name(resume.name + ".partial")
            save_file(collected, partial, metadata={"key": json.dumps(key)})
            partial.replace(resume)
    names = {name.partition(".")[2] for name in collected}
    stacked = {name: torch.stack([collected[f"{p}.{name}"] for p in range(len(layers))]) for name in sorted(names)}
    tensors = {name: stacked[name].float() for name in sorted(names - INTERNAL)}
    tensors["super_expert"] = super_experts(stacked["output_peak"])
    info: dict[str, Any] = {
        "model": model_id,
        "data": corpus.id,
        "documents": corpus.documents,
        "tokens": corpus.fit.tokens,
        "held_out_tokens": corpus.held_out.tokens,
    }
    settings = (budget, batch, device, console)
    if needs & PREDICTOR:
        best, r2, report = _choose(model, corpus, stacked, alphas, *settings)
        tensors |= {"predictor_weight": stacked["slope"][:, best], "predictor_bias": stacked["bias"][:, best]}
        tensors["r2_heldout"] = r2
        info |= report
    if needs & NONLINEAR:
        renamed = {"slope": stacked["nonlinear_slope"], "bias": stacked["nonlinear_bias"]}
        best, _, report = _choose(model, corpus, {**stacked, **renamed}, alphas, *settings)
        tensors |= {"nonlinear_weight": renamed["slope"][:, best], "nonlinear_bias": renamed["bias"][:, best]}
        info["nonlinear"] = report
    info |= {
        "statistics": sorted(tensors),
        "experts_without_tokens": int((tensors["count"] == 0).sum()),
        "versions": versions(),
    }
    if resume is not None:
        resume.unlink(missing_ok=True)
    return Stats(facts, tensors, info)


def _choose(
    model: nn.Module,
    corpus: Corpus,
    stacked: dict[str, Tensor],
    alphas: tuple[float, ...],
    budget: int,
    batch: int,
    device: torch.device,
    console: Console,
) -> tuple[int, Tensor, dict[str, Any]]:
    """Index of the alpha with the largest held-out retained energy, its R^2 [L, N], and fields for the info."""
    retained, r2 = validate(model, corpus.held_out, stacked, budget, batch, device, console)
    best = int(retained.argmax())
    scored = stacked["count"].float() * r2[best].isfinite()
    return best, r2[best], {
        "alpha": alphas[best],
        "retained_energy_by_alpha": {str(a): round(float(r), 5) for a, r in zip(alphas, retained, strict=True)},
        "retained_energy": round(float(retained[best]), 5),
        "retained_energy_at": {"budget": budget, "batch": batch},
        "r2_heldout": round(float((scored * r2[best].nan_to_num()).sum() / scored.sum()), 4),
    }  # fmt: skip


def super_experts(peak: Tensor) -> Tensor:
    """Largest |E_u(z)_i| of every expert [L, N] -> 1 for super experts, which REAP does not prune, else 0.

    They exceed the 99.5th percentile of all experts and a tenth of the largest value, and are in the first 75 % of the
    layers (REAP, https://arxiv.org/abs/2510.13999, the authors' code).
    """
    bound = max(float(torch.quantile(peak.flatten().double(), 0.995)), float(peak.max()) / 10)
    early = torch.arange(len(peak), device=peak.device) < 0.75 * len(peak)
    return ((peak > bound) & early[:, None]).float()


def _collect(
    model: nn.Module,
    part: Packed,
    facts: ModelFacts,
    positions: range,
    rows: int,
    device: torch.device,
    console: Console,
    needs: frozenset[str] = DEFAULT_NEEDS,
) -> dict[int, LayerSet]:
    sums = {p: LayerSet(needs, facts, p, device) for p in positions}
    keep: Tensor | slice = slice(None)

    def observe(position: int, hidden: Tensor, _logits: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:
        sums[position].add(layers[position], hidden[keep], ids[keep], weights[keep], outputs[keep])
        if position == positions[-1]:
            raise LastLayerSeen

    label = f"calibrating layers {positions[0] + 1}-{positions[-1] + 1} of {len(facts.layers)}"
    with observe_routes(model, observe, positions) as layers:
        total = -(-len(part.ids) // rows)
        for ids, mask in track(batches(part, rows, device), label, total, console=console):
            keep = slice(None) if bool(mask.all()) else mask.flatten().nonzero().squeeze(-1)
            forward(model, ids, mask)
    return sums


def _load_partial(path: Path, key: dict[str, Any]) -> dict[str, Tensor]:
    if not path.is_file():
        return {}
    with safe_open(path, framework="pt") as file:
        if json.loads((file.metadata() or {}).get("key", "null")) != key:
            raise ValueError(f"{path} is a partial calibration of another model, text or alpha grid; delete it first")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
