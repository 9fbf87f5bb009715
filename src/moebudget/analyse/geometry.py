"""Geometry of co-routed experts: how orthogonal their outputs are, and the cost of ignoring cross terms of the error.

The study behind BASE's additive removal cost (https://arxiv.org/abs/2609.36222, sections 3.1 and 4, figure 1), on
hidden states of native routing: a decode batch is `batch` windows at one position.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.engines.transformers.observe import observe_routes

COSINE_BINS = 100
FEWEST = 100  # least samples of a bin that takes part in the fit
TINY = 1e-300


@dataclass(frozen=True, slots=True)
class Geometry:
    """Results: cosines and fit over the inner layers (all but the first and the last), the ratio over all layers."""

    batch: int
    budget: int
    tokens: int
    cosine_abs: float  # mean |cos(E_u, E_v)| over co-routed pairs, weighted by w_u w_v
    cosine_histogram: tuple[float, ...]  # weight in equal bins over -1..1
    cosine_abs_by_layer: tuple[float, ...]
    omitted: tuple[tuple[int, int, float, float], ...]  # |U|, tokens, mean rho, mean effective size
    cbar: float  # slope of rho - 1 = cbar (U_eff - 1)
    fit_error: float  # largest |fitted - mean rho| / mean rho over the bins
    identity_error: float  # largest |rho - 1 - cbar_t (U_eff - 1)| over tokens; only rounding
    ratio: dict[str, float]  # p50, p95, p99 of Err(additive set) / Err(greedy set with cross terms)

    def as_row(self, model: str) -> dict[str, Any]:
        """The fields of a row in benchmarks/results/analysis.jsonl, without the stamp."""
        return {
            "bench": "geometry",
            "model": model,
            "B": self.batch,
            "budget": self.budget,
            "tokens": self.tokens,
            "cosine_abs": round(self.cosine_abs, 5),
            "cosine_abs_by_layer": [round(c, 5) for c in self.cosine_abs_by_layer],
            "cosine_histogram": [round(h, 6) for h in self.cosine_histogram],
            "omitted": [[k, n, round(rho, 5), round(size, 5)] for k, n, rho, size in self.omitted],
            "cbar": round(self.cbar, 6),
            "fit_error": round(self.fit_error, 6),
            "identity_error": self.identity_error,
            "ratio": {name: round(value, 5) for name, value in self.ratio.items()},
        }


class _Sums:
    """Running sums over layers and batches."""

    def __init__(self, layers: int, top_k: int, device: torch.device) -> None:
        self.histogram = torch.zeros(COSINE_BINS, dtype=torch.float64, device=device)
        self.cosine, self.pairs = torch.zeros(2, layers, dtype=torch.float64, device=device)
        self.count, self.rho, self.size = torch.zeros(3, top_k + 1, dtype=torch.float64, device=device)
        self.identity = torch.zeros((), dtype=torch.float64, device=device)
        self.ratios: list[Tensor] = []


@torch.no_grad()
def geometry(model: nn.Module, windows: Tensor, *, budget: int, batch: int = 16) -> Geometry:
    """Run the study on windows [n, S + 1]; `budget` is the size of the additive and the greedy set.

    A is the union of the rows' first routes, U_t the routes of row t outside it, a_tu = w_tu E_u(z_t):
    rho_t = |sum_U a|^2 / sum_U |a|^2, U_eff = (sum_U |a|)^2 / sum_U |a|^2 and, exactly, rho_t - 1 = cbar_t (U_eff - 1)
    with cbar_t the mean cosine over pairs of U weighted by |a_u| |a_v|. Raises ValueError for fewer windows than
    `batch` or a budget below 1.
    """
    if len(windows) < batch:
        raise ValueError(f"{len(windows)} windows are fewer than the batch of {batch}: give more text")
    if budget < 1:
        raise ValueError(f"budget={budget} must be at least 1")
    device = next(model.parameters()).device
    sums: _Sums | None = None
    shape = (0, 0)

    def observe(position: int, hidden: Tensor, _logits: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:
        nonlocal sums
        sums = _Sums(len(layers), ids.shape[-1], hidden.device) if sums is None else sums
        inner = len(layers) < 3 or 0 < position < len(layers) - 1
        steps = [x.unflatten(0, shape).transpose(0, 1) for x in (ids, weights.double(), outputs)]  # [S, B, K, ...]
        step_ids, w, out = steps[0], steps[1], steps[2].double()
        gram = out @ out.mT  # [S, B, K, K] of unweighted outputs
        error = gram * w[..., :, None] * w[..., None, :]
        experts = layers[position].spec.num_experts
        _cosines(sums, position, gram, w, inner)
        if inner:
            _omissions(sums, step_ids, error, experts)
        sums.ratios.append(error_ratio(step_ids, error, experts, budget))

    with observe_routes(model, observe) as layers:
        for start in range(0, len(windows) - batch + 1, batch):
            ids = windows[start : start + batch, :-1].to(device)
            shape = (ids.shape[0], ids.shape[1])
            getattr(model, "base_model", model)(input_ids=ids, use_cache=False)
    assert sums is not None
    return _result(sums, batch, budget, len(windows) // batch * batch * (windows.shape[1] - 1))


def _cosines(sums: _Sums, position: int, gram: Tensor, w: Tensor, inner: bool) -> None:
    norm = gram.diagonal(dim1=-2, dim2=-1).clamp_min(TINY).sqrt()
    upper = torch.ones_like(gram[0, 0], dtype=torch.bool).triu(1)
    cosine = (gram / (norm[..., :, None] * norm[..., None, :]))[..., upper]
    weight = (w[..., :, None] * w[..., None, :])[..., upper]
    sums.cosine[position] += (cosine.abs() * weight).sum()
    sums.pairs[position] += weight.sum()
    if inner:
        bins = ((cosine + 1) / 2 * COSINE_BINS).long().clamp(0, COSINE_BINS - 1)
        sums.histogram += torch.bincount(bins.flatten(), weight.flatten(), minlength=COSINE_BINS)


def _omissions(sums: _Sums, ids: Tensor, error: Tensor, experts: int) -> None:
    first = torch.zeros(ids.shape[0], experts, dtype=torch.bool, device=ids.device).scatter(-1, ids[..., 0], True)
    out = ~first[:, None].expand(*ids.shape[:2], experts).gather(-1, ids)  # [S, B, K]
    pair = error * (out[..., :, None] & out[..., None, :])
    energy = pair.diagonal(dim1=-2, dim2=-1)
    norm = energy.sqrt()
    additive = energy.sum(-1)
    rho = pair.sum((-2, -1)) / additive.clamp_min(TINY)
    size = norm.sum(-1).square() / additive.clamp_min(TINY)
    weight = norm.sum(-1).square() - additive  # sum over u != v of |a_u| |a_v|
    cbar = (pair.sum((-2, -1)) - additive) / weight.clamp_min(TINY)
    omitted = out.sum(-1)
    valid = (omitted > 1) & (additive > 0)
    gap = (rho - 1 - cbar * (size - 1)).abs()
    sums.identity = torch.maximum(sums.identity, torch.where(valid, gap, 0.0).max())
    for total, value in ((sums.count, torch.ones_like(rho)), (sums.rho, rho), (sums.size, size)):
        total += torch.bincount(omitted.flatten(), value.flatten(), minlength=len(total))


def error_ratio(ids: Tensor, error: Tensor, experts: int, budget: int) -> Tensor:
    """ids [S, B, K], error [S, B, K, K] the Gram matrices of the weighted outputs -> Err(A_add) / Err(A_cross) [S].

    Err(A) = sum_t |sum_{u in R_t outside A} a_tu|^2. A_add holds the `budget` largest sum_t |a_tu|^2; A_cross starts
    empty and adds, one at a time, the expert that lowers Err most (BASE, section 4). 1 for steps that lose nothing.
    """
    steps = ids.shape[0]

    def per_expert(values: Tensor) -> Tensor:
        return torch.zeros(steps, experts, dtype=values.dtype, device=values.device).scatter_add(
            -1, ids.flatten(1), values.flatten(1)
        )

    def lost(active: Tensor) -> Tensor:
        out = ~active[:, None].expand(-1, ids.shape[1], -1).gather(-1, ids)
        return (error * (out[..., :, None] & out[..., None, :])).sum((-3, -2, -1))

    energy = error.diagonal(dim1=-2, dim2=-1)
    order = per_expert(energy).sort(dim=-1, descending=True, stable=True).indices[:, :budget]
    additive = torch.zeros(steps, experts, dtype=torch.bool, device=ids.device).scatter(-1, order, True)
    greedy = torch.zeros_like(additive)
    for _ in range(min(budget, experts)):
        out = ~greedy[:, None].expand(-1, ids.shape[1], -1).gather(-1, ids)
        residual = (error * out[..., None, :]).sum(-1)  # <a_u, sum of the a_v still left out>
        gain = per_expert(2 * residual - energy).masked_fill(greedy, -torch.inf)
        best = gain.argmax(-1, keepdim=True)
        greedy = greedy.scatter(-1, best, True)
    most, least = lost(additive), lost(greedy)
    nothing = (most <= TINY) & (least <= TINY)
    return torch.where(nothing, 1.0, most / least.clamp_min(TINY))


def _result(sums: _Sums, batch: int, budget: int, tokens: int) -> Geometry:
    layers = len(sums.cosine)
    inner = range(1, layers - 1) if layers >= 3 else range(layers)
    count, rho, size = (x.cpu() for x in (sums.count, sums.rho / sums.count, sums.size / sums.count))
    bins = [k for k in range(1, len(count)) if count[k] >= FEWEST]
    gaps = [(float(rho[k]) - 1, float(size[k]) - 1) for k in bins]
    spread = sum(e * e for _, e in gaps)
    cbar = sum(r * e for r, e in gaps) / spread if spread else float("nan")
    ratios = torch.cat(sums.ratios).cpu()
    quantiles = {f"p{q}": float(torch.quantile(ratios, q / 100)) for q in (50, 95, 99)}
    return Geometry(
        batch=batch,
        budget=budget,
        tokens=tokens,
        cosine_abs=float(sums.cosine[list(inner)].sum() / sums.pairs[list(inner)].sum()),
        cosine_histogram=tuple((sums.histogram / sums.histogram.sum()).tolist()),
        cosine_abs_by_layer=tuple((sums.cosine / sums.pairs).tolist()),
        omitted=tuple((k, int(count[k]), float(rho[k]), float(size[k])) for k in range(1, len(count)) if count[k]),
        cbar=cbar,
        fit_error=max((abs(cbar * e - r) / (1 + r) for r, e in gaps), default=float("nan")),
        identity_error=float(sums.identity),
        ratio=quantiles,
    )
