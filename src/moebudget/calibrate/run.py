"""calibrate(): passes over the text in groups of layers, one ridge regression an expert, alpha by held-out energy."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from moebudget.calibrate.collect import LOWEST_ENERGY, LayerSums, solve_ridge, unit
from moebudget.calibrate.data import Corpus, Packed
from moebudget.integrations.families import model_facts, moe_layers
from moebudget.integrations.transformers import model_type, observe_routes
from moebudget.provenance import versions
from moebudget.stats import ModelFacts, Stats

DEFAULT_ALPHAS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
MEMORY_SHARE = 0.6


class _LastLayerSeen(Exception):
    pass


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device (on the CPU: pages that the system could hand out now)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def layers_per_pass(facts: ModelFacts, device: torch.device, memory: int | None = None) -> int:
    """How many layers' sums fit into the given or the free memory at once. Raises MemoryError if not even one does."""
    room = int(MEMORY_SHARE * free_memory(device)) if memory is None else memory
    one = LayerSums.size_in_bytes(facts.experts, facts.hidden)
    if one > room:
        raise MemoryError(
            f"one layer's statistics take {one / 2**30:.1f} GiB ({facts.experts} experts x {facts.hidden}^2 floats), "
            f"{room / 2**30:.1f} GiB may be used on {device}; free memory or calibrate on a larger device"
        )
    return min(len(facts.layers), room // one)


def _batches(part: Packed, rows: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    for i in range(0, len(part.ids), rows):
        yield part.ids[i : i + rows].to(device), part.mask[i : i + rows].to(device)


@torch.no_grad()
def calibrate(
    model: nn.Module,
    corpus: Corpus,
    *,
    model_id: str,
    budget: int | None = None,
    batch: int = 16,
    alphas: tuple[float, ...] = DEFAULT_ALPHAS,
    rows: int = 8,
    group: int | None = None,
    resume: Path | None = None,
    quiet: bool = False,
) -> Stats:
    """Fit BASE's energy predictor and the mean statistics of every expert, teacher-forced on the corpus.

    Only tokens that the model routes to an expert count for it; padding is left out; held-out documents are used to
    choose alpha (largest retained energy with `batch` rows a step at `budget` experts, default 5/4 top-k) and to
    report R^2, never to fit. `rows` sequences go through the model at a time. Layers are handled in groups of `group`
    (default: what fits in 60 % of the free memory), one pass over the text a group; a pass ends at the last layer it
    needs. With `resume`, a finished group is kept in that file and not repeated.
    """
    layers = moe_layers(model)
    facts = model_facts(layers, model_type(model))
    device = layers[0].weight.device
    group = layers_per_pass(facts, device) if group is None else group
    budget = min(facts.experts, round(1.25 * facts.top_k)) if budget is None else budget
    if not 1 <= budget <= facts.experts:
        raise ValueError(f"budget={budget} must lie between 1 and the model's {facts.experts} experts")
    console = Console(stderr=True, quiet=quiet)
    key = {"facts": facts.config_hash, "routers": facts.router_hash, "data": corpus.id, "alphas": list(alphas)}
    found: dict[str, Tensor] = {} if resume is None else _load_partial(resume, key)
    for start in range(0, len(layers), group):
        positions = range(start, min(start + group, len(layers)))
        if all(f"{p}.slope" in found for p in positions):
            continue
        sums = _collect(model, corpus.fit, facts, positions, rows, device, console)
        for position in positions:
            slope, bias = solve_ridge(sums[position], list(alphas))
            found[f"{position}.slope"], found[f"{position}.bias"] = slope.float().cpu(), bias.float().cpu()
            found |= {f"{position}.{name}": t.cpu() for name, t in _means(sums.pop(position)).items()}
        if resume is not None:
            partial = resume.with_name(resume.name + ".partial")
            save_file(found, partial, metadata={"key": json.dumps(key)})
            partial.replace(resume)
    stacked = {
        name: torch.stack([found[f"{p}.{name}"] for p in range(len(layers))])
        for name in ("slope", "bias", "count", "energy_mean", "weight_mean", "output_norm_weighted", "mean_y")
    }
    retained, r2 = _validate(model, corpus.held_out, stacked, budget, batch, device, console)
    best = int(retained.argmax())
    tensors = {
        "predictor_weight": stacked["slope"][:, best],
        "predictor_bias": stacked["bias"][:, best],
        "r2_heldout": r2[best],
        **{n: stacked[n].float() for n in ("count", "energy_mean", "weight_mean", "output_norm_weighted")},
    }
    scored = tensors["count"] * tensors["r2_heldout"].isfinite()
    info: dict[str, Any] = {
        "model": model_id,
        "data": corpus.id,
        "documents": corpus.documents,
        "tokens": corpus.fit.tokens,
        "held_out_tokens": corpus.held_out.tokens,
        "alpha": alphas[best],
        "retained_energy_by_alpha": {str(a): round(float(r), 5) for a, r in zip(alphas, retained, strict=True)},
        "retained_energy": round(float(retained[best]), 5),
        "retained_energy_at": {"budget": budget, "batch": batch},
        "r2_heldout": round(float((scored * tensors["r2_heldout"].nan_to_num()).sum() / scored.sum()), 4),
        "experts_without_tokens": int((tensors["count"] == 0).sum()),
        "versions": versions(),
    }
    if resume is not None:
        resume.unlink(missing_ok=True)
    return Stats(facts, tensors, info)


def _collect(
    model: nn.Module,
    part: Packed,
    facts: ModelFacts,
    positions: range,
    rows: int,
    device: torch.device,
    console: Console,
) -> dict[int, LayerSums]:
    sums = {p: LayerSums(facts.experts, facts.hidden, device) for p in positions}
    keep: Tensor | slice = slice(None)

    def observe(position: int, hidden: Tensor, _logits: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:
        sums[position].add(hidden[keep], ids[keep], weights[keep], outputs[keep])
        if position == positions[-1]:
            raise _LastLayerSeen

    what = f"layers {positions[0] + 1}-{positions[-1] + 1} of {len(facts.layers)}"
    with observe_routes(model, observe, positions):
        total = -(-len(part.ids) // rows)
        for ids, mask in track(_batches(part, rows, device), f"calibrating {what}", total, console=console):
            keep = slice(None) if bool(mask.all()) else mask.flatten().nonzero().squeeze(-1)
            _forward(model, ids, mask)
    return sums


def _forward(model: nn.Module, ids: Tensor, mask: Tensor) -> None:
    backbone = getattr(model, "base_model", model)  # no language head: its logits are not needed
    try:
        backbone(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    except _LastLayerSeen:
        return


def _means(sums: LayerSums) -> dict[str, Tensor]:
    n = sums.n.clamp_min(1)
    return {
        "count": sums.n,
        "energy_mean": sums.se / n,
        "weight_mean": sums.sw / n,
        "output_norm_weighted": sums.swn / n,
        "mean_y": sums.sy / n,
    }


def _validate(
    model: nn.Module,
    part: Packed,
    found: dict[str, Tensor],
    budget: int,
    batch: int,
    device: torch.device,
    console: Console,
) -> tuple[Tensor, Tensor]:
    """Retained energy [A], mean over layers and positions, and R^2 [A, L, N], both on held-out text.

    A decode batch is `batch` sequences at one position. Retained energy of a set A of `budget` experts is
    sum_{u in A} D*_u / sum_{u in A*} D*_u, with D* the true removal costs and A* their top `budget` (BASE, eq. 12).
    """
    n_layers, n_alphas, n_experts, _ = found["slope"].shape
    slope, bias = found["slope"].to(device), found["bias"].to(device)
    mean_y = found["mean_y"].to(device)
    share, steps = torch.zeros(n_alphas, dtype=torch.float64, device=device), 0
    sse = torch.zeros(n_alphas, n_layers, n_experts, dtype=torch.float64, device=device)
    sst, seen = sse[0].clone(), sse[0].clone()
    mask = torch.empty(0)

    def observe(position: int, hidden: Tensor, _logits: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:
        nonlocal share, steps
        energy = outputs.float().square().sum(-1)  # [T, K]
        y = energy.clamp_min(LOWEST_ENERGY).log()
        log_energy = torch.einsum("td,and->atn", unit(hidden), slope[position]) + bias[position][:, None]
        guess = log_energy.gather(-1, ids.expand(n_alphas, *ids.shape))  # [A, T, K]
        live = mask.flatten()
        flat = ids[live].flatten()
        error = (guess - y)[:, live].square().flatten(1).double()
        sse[:, position] = sse[:, position].index_add(1, flat, error)
        spread = (y - mean_y[position].float()[ids])[live].square().flatten().double()
        sst[position] = sst[position].index_add(0, flat, spread)
        seen[position] = seen[position].index_add(0, flat, torch.ones_like(spread))
        vote = weights.float().square() * live[:, None]
        true = _per_expert(vote * energy, ids, n_experts, mask.shape)  # [S, N]
        guessed = _per_expert(vote * guess.exp(), ids.expand_as(guess), n_experts, mask.shape)  # [A, S, N]
        best = true.sort(dim=-1, descending=True).values[:, :budget].sum(-1)
        chosen = guessed.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
        kept = true.expand(n_alphas, *true.shape).gather(-1, chosen).sum(-1)
        some = best > 0
        share = share + (kept / best.clamp_min(LOWEST_ENERGY))[:, some].sum(-1).double()
        steps += int(some.sum())

    with observe_routes(model, observe):
        total = -(-len(part.ids) // batch)
        for ids, mask in track(_batches(part, batch, device), "held-out retained energy", total, console=console):
            _forward(model, ids, mask)
    fitted = found["count"].to(device) > 0
    r2 = torch.where(fitted & (seen > 1) & (sst > 0), 1 - sse / sst, torch.nan)
    return (share / steps).cpu(), r2.float().cpu()


def _per_expert(values: Tensor, ids: Tensor, experts: int, shape: torch.Size) -> Tensor:
    """values and ids [..., B*S, K] of B sequences -> sums over the B rows of every position, [..., S, N]."""
    spread = torch.zeros(*values.shape[:-1], experts, device=values.device).scatter(-1, ids, values)
    sums: Tensor = spread.unflatten(-2, shape).sum(-3)
    return sums


def _load_partial(path: Path, key: dict[str, Any]) -> dict[str, Tensor]:
    if not path.is_file():
        return {}
    with safe_open(path, framework="pt") as file:
        if json.loads((file.metadata() or {}).get("key", "null")) != key:
            raise ValueError(f"{path} is a partial calibration of another model, text or alpha grid; delete it first")
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
