"""Low-rank sketches of the experts that a budget leaves out, fitted in decode mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from moebudget.calibrate.allocation.measure import forced_passes
from moebudget.core.ops import executed_experts
from moebudget.core.policy import Fill
from moebudget.core.stats import Stats
from moebudget.core.types import Active, LayerStats, RouterBatch, Routing
from moebudget.engines.transformers.attach import attach
from moebudget.engines.transformers.families import MoeLayer
from moebudget.methods.base import base

RANK = 4
KEPT = 0.02  # weight of a route that runs, relative to one that does not
ALPHA = 1e-2  # ridge, as a share of the mean eigenvalue


def sketch(
    model: nn.Module,
    stats: Stats,
    windows: Tensor,
    *,
    budget: int = 10,
    rank: int = RANK,
    batch: int = 16,
    group: int | None = None,
    quiet: bool = False,
) -> Stats:
    """Add `sketch_in` [L, N, r, d + 1] and `sketch_out` [L, N, r, d] to the statistics, for the fill `sketch`.

    windows [n, S + 1] are decoded, `batch` rows per step, under `base:budget=`. A linear map of rank r is fitted to
    the outputs of each expert u, with most of the weight on steps that leave it out:

        min sum_t c_tu w_tu^2 |E_u(z_t) - B_u^T A_u [z_t, 1]|^2,   c = 1 for routes that do not run, .02 for others

    A pass holds the sums of `group` layers (None: all), 8 N d^2 bytes per layer. The maps of a smaller rank are slices
    of those of a larger rank. Raises ValueError for a rank, budget or group out of range, or too little text.
    """
    facts = stats.facts
    if not 1 <= rank <= facts.hidden:
        raise ValueError(f"rank={rank} must be between 1 and the model's hidden size of {facts.hidden}")
    if not 1 <= budget < facts.experts:
        raise ValueError(f"budget={budget} must be between 1 and {facts.experts - 1}, or nothing is left out")
    if len(windows) < batch:
        raise ValueError(f"{len(windows)} windows of text for a batch of {batch}: give more text or a smaller batch")
    layers = len(facts.layers)
    group = layers if group is None else group
    if group < 1:
        raise ValueError(f"group={group} must be at least 1: it is the number of layers per pass")
    console = Console(stderr=True, quiet=quiet)
    maps, explained = list[tuple[Tensor, Tensor]](), list[float]()
    for start in range(0, layers, group):
        for sums in _collect(model, stats, windows, budget, batch, range(start, min(start + group, layers)), console):
            maps.append(sums.solve(rank))
            explained.append(sums.explained(*maps[-1]))
    tensors = {name: torch.stack([m[i] for m in maps]).cpu() for i, name in enumerate(("sketch_in", "sketch_out"))}
    info = {
        "budget": budget, "batch": batch, "rank": rank, "windows": len(windows), "window": windows.shape[1] - 1,
        "explained_where_fitted": [round(share, 4) for share in explained],
    }  # fmt: skip
    return dataclasses.replace(stats, tensors={**stats.tensors, **tensors}, info={**stats.info, "sketch": info})


class SketchSums:
    """Weighted sums over the routes to each expert u: x = [z, 1], y = E_u(z), c = w^2, or .02 w^2 if the route runs.

    sum c x x^T [N, d + 1, d + 1], sum c x y^T [N, d + 1, d] float32, sum c |y|^2 [N] float64.
    """

    def __init__(self, experts: int, hidden: int, device: torch.device | str) -> None:
        self.gram = torch.zeros(experts, hidden + 1, hidden + 1, device=device)
        self.cross = torch.zeros(experts, hidden + 1, hidden, device=device)
        self.energy = torch.zeros(experts, dtype=torch.float64, device=device)

    def add(self, hidden: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor, runs: Tensor) -> None:
        """hidden [T, d], ids, weights and runs (bool) [T, K], outputs [T, K, d] unweighted."""
        x = torch.cat([hidden.float(), hidden.new_ones(len(hidden), 1, dtype=torch.float32)], -1)
        order = ids.flatten().sort(stable=True)
        row = order.indices // ids.shape[-1]
        c = (weights.float().square() * torch.where(runs, KEPT, 1.0)).flatten()[order.indices, None]
        y = outputs.float().flatten(0, 1)[order.indices]
        start = 0
        for u, count in enumerate(torch.bincount(order.values, minlength=len(self.energy)).tolist()):
            part = slice(start, start + count)
            start += count
            if count:
                weighted = c[part] * x[row[part]]
                self.gram[u].addmm_(weighted.T, x[row[part]])
                self.cross[u].addmm_(weighted.T, y[part])
                self.energy[u] += (c[part] * y[part].square()).sum().double()

    def solve(self, rank: int) -> tuple[Tensor, Tensor]:
        """A [N, r, d + 1] and B [N, r, d]: ridge regression C = (G + lam I)^-1 X, then the best map of rank r.

        With G = R R^T the weighted error of a map C' above that of C is |R^T (C - C')|^2, so C' keeps the r largest
        singular values of R^T C: B holds the right singular vectors, A = B C^T.
        """
        read, written = [], []
        for gram, cross in zip(self.gram.double(), self.cross.double(), strict=True):
            size = gram.diagonal()[:-1].mean()
            ridge = torch.full_like(gram.diagonal(), ALPHA) * size
            ridge[-1] *= 1e-4  # the mean is not shrunk
            root = torch.linalg.cholesky(gram + ridge.clamp_min(1e-30).diag())
            full = torch.cholesky_solve(cross, root)  # [d + 1, d]
            top = torch.linalg.svd(root.mT @ full, full_matrices=False).Vh[:rank]
            read.append(top @ full.mT)
            written.append(top)
        return torch.stack(read).float(), torch.stack(written).float()

    def explained(self, read: Tensor, written: Tensor) -> float:
        """Share of the weighted output energy that the maps explain on the text they were fitted on."""
        maps = (read.mT @ written).double()  # [N, d + 1, d]
        explained = 2 * (self.cross * maps).sum() - ((self.gram.double() @ maps) * maps).sum()
        return float(explained / self.energy.sum().clamp_min(1e-300))


@dataclasses.dataclass(frozen=True, slots=True)
class _Collector(Fill):
    """A fill that adds every step's routes to the sums of its layer."""

    fill: Fill
    layer: MoeLayer
    sums: SketchSums

    @property
    def needs(self) -> frozenset[str]:
        return self.fill.needs

    def __call__(self, active: Active, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Routing:
        routing = self.fill(active, scores, batch, stats)
        runs = executed_experts(routing, batch).gather(-1, batch.ids)
        rows = batch.decode
        hidden, ids = batch.hidden[rows], batch.ids[rows]
        self.sums.add(hidden, ids, batch.weights[rows], self.layer.route_outputs(hidden, ids), runs[rows])
        return routing


def _collect(
    model: nn.Module,
    stats: Stats,
    windows: Tensor,
    budget: int,
    batch: int,
    positions: Sequence[int],
    console: Console,
) -> list[SketchSums]:
    with attach(model, base(budget), stats) as run:
        sums = []
        for position in positions:
            router, layer = run.routers[position], run.layers[position]
            sums.append(SketchSums(stats.facts.experts, stats.facts.hidden, layer.weight.device))
            router.policy = dataclasses.replace(router.policy, fill=_Collector(router.policy.fill, layer, sums[-1]))
        label = f"sketching layers {positions[0] + 1}-{positions[-1] + 1} of {len(run.layers)}"
        passes = forced_passes(model, run, windows, batch, 1)
        for _ in track(passes, label, -(-len(windows) // max(batch, 16)), console=console):
            pass
    return sums
