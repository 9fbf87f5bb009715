"""Streamed sums over the routed tokens of one Mixture-of-Experts layer, and the ridge regression on them."""

from __future__ import annotations

import torch
from torch import Tensor

from moebudget.core.energy import random_features, unit

LOWEST_ENERGY = 1e-30
PRIOR_TOKENS = 8.0  # weight of the layer's pooled prediction in the mean of an expert with few tokens


class LayerSums:
    """Sums over the tokens routed to each expert u: x = z/|z|, y = log |E_u(z)|^2.

    n, sum y, sum y^2, sum e = |E_u(z)|^2, sum |E_u(z)|, sum w, sum w |E_u(z)| and the largest |E_u(z)_i|: [N] float64;
    sum x, sum x y: [N, d] float64; the Gram matrix sum (x - c)(x - c)^T: [N, d, d] float32. c [N, d] is the mean of
    the expert's first batch: without it, rounding of the component that all x share would swamp the differences that
    the regression uses. `features` [h, d] appends relu(features x) to x. Without `regress`, sums of x are left out.
    """

    def __init__(
        self,
        experts: int,
        hidden: int,
        device: torch.device | str,
        features: Tensor | None = None,
        regress: bool = True,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.features = None if features is None else features.to(device)
        self.regress = regress
        d = hidden + (0 if features is None else len(features)) if regress else 0
        self.n, self.sy, self.syy, self.se, self.sn, self.sw, self.swn = (zeros(experts) for _ in range(7))
        self.peak = zeros(experts)
        self.sx, self.sxy = zeros(experts, d), zeros(experts, d)
        self.gram = zeros(experts, d, d, dtype=torch.float32)
        self.centre = zeros(experts, d, dtype=torch.float32)
        self._seen = [False] * experts

    @staticmethod
    def size_in_bytes(experts: int, hidden: int) -> int:
        return experts * (4 * hidden * hidden + (2 * 8 + 4) * hidden + 8 * 8)

    def centred_gram(self, experts: slice) -> Tensor:
        """G_c = sum (x - m)(x - m)^T around each expert's mean m, [n, d, d] float64."""
        n = self.n[experts]
        shift = self.sx[experts] - n[:, None] * self.centre[experts]
        return self.gram[experts].double() - torch.einsum("ni,nj->nij", shift / n.clamp_min(1)[:, None], shift)

    def _inputs(self, hidden: Tensor) -> Tensor:
        x = unit(hidden)
        return x if self.features is None else random_features(x, self.features)

    def means(self) -> dict[str, Tensor]:
        """Means over each expert's tokens, by name; an expert without tokens gets the median norm of the others."""
        n = self.n.clamp_min(1)
        norm, seen = self.sn / n, self.n > 0
        return {
            "count": self.n,
            "energy_mean": self.se / n,
            "weight_mean": self.sw / n,
            "output_norm": torch.where(seen, norm, norm[seen].median()) if bool(seen.any()) else norm,
            "output_norm_weighted": self.swn / n,
            "output_peak": self.peak,
            "mean_y": self.sy / n,
        }

    def add(self, hidden: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:
        """hidden [T, d], ids and weights [T, K], outputs [T, K, d] unweighted."""
        k, experts = ids.shape[-1], len(self.n)
        energy = outputs.float().square().sum(-1)  # [T, K]
        order = ids.flatten().sort(stable=True)
        row = order.indices // k
        self.peak.scatter_reduce_(0, ids.flatten(), outputs.abs().amax(-1).flatten().double(), "amax")
        x = self._inputs(hidden)[row] if self.regress else hidden.new_zeros(len(row), 0)
        e = energy.flatten()[order.indices].double()
        w = weights.flatten()[order.indices].double()
        y = e.clamp_min(LOWEST_ENERGY).log()
        counts = torch.bincount(order.values, minlength=experts).tolist()
        start = 0
        for u, count in enumerate(counts):
            if not count:
                continue
            part = slice(start, start + count)
            start += count
            xu, yu = x[part].float(), y[part]
            if not self._seen[u]:
                self.centre[u], self._seen[u] = xu.mean(0), True
            xc = xu - self.centre[u]
            self.gram[u].addmm_(xc.T, xc)
            xd = xu.double()
            self.sx[u] += xd.sum(0)
            self.sxy[u] += yu @ xd
            self.n[u] += count
            self.sy[u] += yu.sum()
            self.syy[u] += yu @ yu
            self.se[u] += e[part].sum()
            self.sn[u] += e[part].sqrt().sum()
            self.sw[u] += w[part].sum()
            self.swn[u] += w[part] @ e[part].sqrt()


def solve_ridge(sums: LayerSums, alphas: list[float], chunk_bytes: int = 2**30) -> tuple[Tensor, Tensor]:
    """Ridge regression of y on x for every expert and alpha: (a [A, N, d], b [A, N]) float64.

    a_u = (G_c + lam I)^-1 q_c, b_u = mean y - a_u . mean x, with the centred Gram matrix G_c = sum x x^T - n m m^T and
    q_c = sum x y - n m mean y (BASE, https://arxiv.org/abs/2609.36222, eq. 9). The paper gives no lambda; here
    lam = alpha tr(G_c) / d, and alpha is chosen on held-out retained energy.

    An expert with fewer tokens than dimensions is shrunk towards the regression pooled over the layer's experts (and
    equals it at n = 0). This is our addition.
    """
    experts, d = sums.sx.shape
    step = max(1, chunk_bytes // (8 * d * d * (2 + len(alphas))))
    parts = [slice(start, start + step) for start in range(0, experts, step)]
    n, sx, sy, sxy = (s.sum(0, keepdim=True) for s in (sums.n, sums.sx, sums.sy, sums.sxy))
    between = (sums.sx / sums.n.clamp_min(1)[:, None]).T @ sums.sx - sx.T @ sx / n.clamp_min(1)  # [d, d]
    within = torch.stack([sums.centred_gram(part).sum(0) for part in parts]).sum(0)
    pooled = _ridge(n, sx, sy, sxy, (within + between)[None], alphas)  # [A, 1, d], [A, 1]
    solved = [
        _ridge(sums.n[p], sums.sx[p], sums.sy[p], sums.sxy[p], sums.centred_gram(p), alphas, pooled) for p in parts
    ]
    return torch.cat([a for a, _ in solved], 1), torch.cat([b for _, b in solved], 1)


def _ridge(
    n: Tensor,
    sx: Tensor,
    sy: Tensor,
    sxy: Tensor,
    gc: Tensor,
    alphas: list[float],
    prior: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    d = sx.shape[-1]
    count = n.clamp_min(1)
    m, mean_y = sx / count[:, None], sy / count
    qc = sxy - (n * mean_y)[:, None] * m
    scale = gc.diagonal(dim1=-2, dim2=-1).sum(-1) / d  # mean eigenvalue of the centred Gram matrix
    scale = scale.clamp_min(torch.finfo(torch.float32).eps)
    eye = torch.eye(d, dtype=gc.dtype, device=gc.device)
    slopes, biases = [], []
    for i, alpha in enumerate(alphas):
        matrix = gc + (alpha * scale)[:, None, None] * eye
        if prior is None:
            target, few, y = torch.zeros_like(m), torch.zeros_like(n, dtype=torch.bool), mean_y
        else:
            few = n < d
            target = torch.where(few[:, None], prior[0][i], 0.0)
            expected = m @ prior[0][i, 0] + prior[1][i]
            y = torch.where(few, expected + (mean_y - expected) * n / (n + PRIOR_TOKENS), mean_y)
        rhs = qc - torch.einsum("nij,nj->ni", gc, target)
        a = target + torch.cholesky_solve(rhs[..., None], torch.linalg.cholesky(matrix)).squeeze(-1)
        slopes.append(a)
        biases.append(y - (a * m).sum(-1))
    return torch.stack(slopes), torch.stack(biases)
