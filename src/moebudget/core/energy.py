"""The energy predictor that calibration fits: log |E_u(z)|^2 of every expert, from the token alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moebudget.core.ops import on_routes
from moebudget.core.types import LayerStats, RouterBatch

PREDICTOR = frozenset({"predictor_weight", "predictor_bias"})  # the statistics that `log_energies` reads


def unit(hidden: Tensor) -> Tensor:
    """[T, d] -> rows of length 1, float32."""
    z = hidden.float()
    length: Tensor = z.norm(dim=-1, keepdim=True)
    return z / length.clamp_min(torch.finfo(torch.float32).tiny)


def random_features(z: Tensor, features: Tensor) -> Tensor:
    """Rows z [T, d] of length 1 and features [h, d] -> [T, d + h]: the row itself and relu(features z)."""
    return torch.cat([z, (z @ features.float().mT).relu()], -1)


def log_energies(batch: RouterBatch, stats: LayerStats) -> Tensor:
    """log e_u(z_t) = a_u . z_t/|z_t| + b_u of every expert, float32 [T, N].

    BASE, https://arxiv.org/abs/2609.36222, eq. 7. a_u is `predictor_weight` [N, d], b_u `predictor_bias` [N].
    """
    z = unit(batch.hidden)  # [T, d]
    return z @ stats["predictor_weight"].float().T + stats["predictor_bias"].float()


def removal_costs(batch: RouterBatch, stats: LayerStats) -> Tensor:
    """Predicted removal costs w_tu^2 e_u(z_t) of the native routes, float32 [T, N], 0 elsewhere."""
    energy = log_energies(batch, stats).gather(-1, batch.ids).exp()
    return on_routes(batch, batch.weights.square() * energy)
