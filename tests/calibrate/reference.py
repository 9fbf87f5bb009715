"""Reference for calibration and evaluation: recorded expert calls, float64 and plain loops."""

from __future__ import annotations

import types
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moebudget.calibrate import Corpus, Packed
from tests.engines.transformers import tiny


@dataclass(frozen=True)
class Layer:
    """The native routes of one layer."""

    hidden: Tensor  # [B, S, d]
    ids: Tensor  # [B, S, K]
    weights: Tensor  # [B, S, K]
    energy: Tensor  # [B, S, K] squared norm of the expert's output

    def routes(self, b: int, s: int) -> list[tuple[int, float, float]]:
        """(expert, weight, energy) of one token."""
        return list(zip(self.ids[b, s].tolist(), self.weights[b, s].tolist(), self.energy[b, s].tolist(), strict=True))


@torch.no_grad()
def layers_of(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> list[Layer]:
    """Run native routing over ids [B, S] and compute the energy of every route separately."""
    with tiny.recorded(model) as calls:
        model(input_ids=ids, attention_mask=None if mask is None else mask.long(), use_cache=False)
    layers = []
    for call, module in zip(calls, tiny.experts_modules(model), strict=True):
        experts = types.SimpleNamespace(**{name: p.double() for name, p in module.named_parameters()})
        energy = [
            [float(tiny.expert_alone(experts, z, u).square().sum()) for u in chosen]
            for z, chosen in zip(call.hidden.double(), call.ids.tolist(), strict=True)
        ]
        shape = (*ids.shape, -1)
        layers.append(
            Layer(
                call.hidden.double().view(shape),
                call.ids.view(shape),
                call.weights.double().view(shape),
                torch.tensor(energy, dtype=torch.float64).view(shape),
            )
        )
    return layers


def removal_costs(layer: Layer, rows: Sequence[int], s: int, mask: Tensor | None = None) -> dict[int, float]:
    """D*_u = sum_t w^2 |E_u(z_t)|^2 over the tokens at position s of some sequences (BASE, eq. 11)."""
    costs: dict[int, float] = defaultdict(float)
    for b in rows:
        if mask is None or mask[b, s]:
            for u, w, e in layer.routes(b, s):
                costs[u] += w**2 * e
    return dict(costs)


def predicted_costs(
    layer: Layer, rows: Sequence[int], s: int, a: Tensor, b: Tensor, mask: Tensor | None = None
) -> dict[int, float]:
    """The same with log |E_u(z)|^2 ~ a_u . z/|z| + b_u (BASE, eq. 7)."""
    costs: dict[int, float] = defaultdict(float)
    for row in rows:
        if mask is None or mask[row, s]:
            z = layer.hidden[row, s]
            for u, w, _ in layer.routes(row, s):
                costs[u] += w**2 * float(torch.exp(a[u].double() @ (z / z.norm()) + b[u].double()))
    return dict(costs)


def best(costs: dict[int, float], budget: int) -> list[int]:
    """The experts with the largest costs, ties to the lower index."""
    return sorted(costs, key=lambda u: (-costs[u], u))[:budget]


def retained(true: dict[int, float], chosen: Sequence[int]) -> float:
    """RE(A) = sum_{u in A} D*_u / sum_{u in A*} D*_u with |A*| = |A| (BASE, eq. 12)."""
    return sum(true.get(u, 0.0) for u in chosen) / sum(true[u] for u in best(true, len(chosen)))


def make_part(rows: int, length: int, padding: int, seed: int, poison: int = 0) -> Packed:
    """Random text whose last row ends in padding; `poison` selects the tokens in the padding."""
    ids = tiny.prompts(rows, length, seed)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if padding:
        mask[-1, -padding:] = False
        ids[-1, -padding:] = tiny.prompts(1, padding, seed + 1000 * poison)[0] if poison else 0
    return Packed(ids, mask)


def make_corpus(name: str = "text", *, rows: int = 7, held_out: int = 5, length: int = 12, poison: int = 0) -> Corpus:
    return Corpus(
        make_part(rows, length, 5, seed=1, poison=poison),
        make_part(held_out, length, 3, seed=2, poison=poison),
        name,
        9,
    )
