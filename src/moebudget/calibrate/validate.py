"""Held-out retained energy, by which alpha is chosen, and R^2 of energy predictors."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from moebudget.calibrate.collect import LOWEST_ENERGY
from moebudget.calibrate.data import Packed
from moebudget.calibrate.passes import batches, forward
from moebudget.core.energy import random_features, unit
from moebudget.engines.transformers.observe import observe_routes


@torch.no_grad()
def validate(
    model: nn.Module,
    part: Packed,
    statistics: dict[str, Tensor],
    budget: int,
    batch: int,
    device: torch.device,
    console: Console,
) -> tuple[Tensor, Tensor]:
    """Retained energy [A], mean over layers and positions, and R^2 [A, L, N], both on held-out text.

    A decode batch is `batch` sequences at one position. Retained energy of a set A of `budget` experts is
    sum_{u in A} D*_u / sum_{u in A*} D*_u, with D* the true removal costs and A* their top `budget` (BASE, eq. 12).
    `statistics` holds slope [L, A, N, d'], bias [L, A, N], count and mean_y [L, N]; if d' > d, also random features.
    """
    n_layers, n_alphas, n_experts, _ = statistics["slope"].shape
    slope, bias = statistics["slope"].to(device), statistics["bias"].to(device)
    mean_y = statistics["mean_y"].to(device)
    share, steps = torch.zeros(n_alphas, dtype=torch.float64, device=device), 0
    sse = torch.zeros(n_alphas, n_layers, n_experts, dtype=torch.float64, device=device)
    sst, seen = sse[0].clone(), sse[0].clone()
    mask = torch.empty(0)

    def observe(position: int, hidden: Tensor, _logits: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:
        nonlocal share, steps
        energy = outputs.float().square().sum(-1)  # [T, K]
        y = energy.clamp_min(LOWEST_ENERGY).log()
        x = unit(hidden)
        if slope.shape[-1] > x.shape[-1]:
            x = random_features(x, statistics["nonlinear_features"][position].to(device))
        log_energy = torch.einsum("td,and->atn", x, slope[position]) + bias[position][:, None]
        guess = log_energy.gather(-1, ids.expand(n_alphas, *ids.shape))  # [A, T, K]
        unpadded = mask.flatten()
        flat = ids[unpadded].flatten()
        error = (guess - y)[:, unpadded].square().flatten(1).double()
        sse[:, position] = sse[:, position].index_add(1, flat, error)
        spread = (y - mean_y[position].float()[ids])[unpadded].square().flatten().double()
        sst[position] = sst[position].index_add(0, flat, spread)
        seen[position] = seen[position].index_add(0, flat, torch.ones_like(spread))
        vote = weights.float().square() * unpadded[:, None]
        true = _per_expert(vote * energy, ids, n_experts, mask.shape)  # [S, N]
        guessed = _per_expert(vote * guess.exp(), ids.expand_as(guess), n_experts, mask.shape)  # [A, S, N]
        best = true.sort(dim=-1, descending=True).values[:, :budget].sum(-1)
        chosen = guessed.sort(dim=-1, descending=True, stable=True).indices[..., :budget]
        kept = true.expand(n_alphas, *true.shape).gather(-1, chosen).sum(-1)
        counted = best > 0
        share = share + (kept / best.clamp_min(LOWEST_ENERGY))[:, counted].sum(-1).double()
        steps += int(counted.sum())

    with observe_routes(model, observe):
        total = -(-len(part.ids) // batch)
        for ids, mask in track(batches(part, batch, device), "held-out retained energy", total, console=console):
            forward(model, ids, mask)
    fitted = statistics["count"].to(device) > 0
    r2 = torch.where(fitted & (seen > 1) & (sst > 0), 1 - sse / sst, torch.nan)
    return (share / steps).cpu(), r2.float().cpu()


def _per_expert(values: Tensor, ids: Tensor, experts: int, shape: torch.Size) -> Tensor:
    """values and ids [..., B*S, K] of B sequences -> sums over the B rows of every position, [..., S, N]."""
    spread = torch.zeros(*values.shape[:-1], experts, device=values.device).scatter(-1, ids, values)
    sums: Tensor = spread.unflatten(-2, shape).sum(-3)
    return sums
