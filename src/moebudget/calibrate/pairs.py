"""Statistics of published methods: weight ratios, output directions, folding and similarity of expert pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from moebudget.core.energy import unit
from moebudget.engines.transformers.families import MoeLayer
from moebudget.methods.exfold import UNSEEN

RATIO_BINS = 4096
FOLD_EPS, FOLD_CLIP = 1e-3, 4.0
SIMILARITY_TOKENS = 400 * 128
CKA_TOKENS = 1024
OUTPUTS_AT_ONCE = 2**17  # (token, expert) pairs


class RouteRatios:
    """Median ratio of the j-th route's weight to the row's largest, [K], from a histogram with steps of 1/4096.

    Lu et al., https://arxiv.org/abs/2402.14800, section 3.3, for the second of two routes.
    """

    def __init__(self, top_k: int, device: torch.device | str) -> None:
        self.counts = torch.zeros(top_k, RATIO_BINS + 1, dtype=torch.int64, device=device)

    def add(self, layer: MoeLayer, hidden: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:  # noqa: ARG002
        """weights [T, K], in any order of the routes."""
        w = weights.float().sort(dim=-1, descending=True).values
        ratio = w / w[:, :1].clamp_min(torch.finfo(torch.float32).tiny)
        bins = (ratio * RATIO_BINS).round().long().clamp(0, RATIO_BINS)
        k = self.counts.shape[0]
        flat = (bins + torch.arange(k, device=bins.device) * (RATIO_BINS + 1)).flatten()
        self.counts += torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)

    def finish(self) -> dict[str, Tensor]:
        below = self.counts.cumsum(-1) < (self.counts.sum(-1, keepdim=True) + 1) // 2
        return {"route_ratio": below.sum(-1).double() / RATIO_BINS}


class Folding:
    """ExFold's scalars for every pair of experts routed together: s[u, v] E_v(z) is the closest to E_u(z).

    With omega = |x_u|: s = sum omega <x_u, x_v> / (sum omega |x_v|^2 + 1e-3), clipped to [-4, 4], and the relative
    residual loss = (uu - 2 s uv + s^2 vv) / uu. Pairs never routed together and the diagonal have loss 1e30. ExFold,
    https://arxiv.org/abs/2608.24938, and the authors' code.
    """

    def __init__(self, experts: int, device: torch.device | str) -> None:
        self.experts = experts
        self.uv, self.vv, self.uu = torch.zeros(3, experts * experts, dtype=torch.float64, device=device)

    def add(self, layer: MoeLayer, hidden: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:  # noqa: ARG002
        """ids [T, K], outputs [T, K, d] unweighted."""
        x = outputs.float()
        gram = (x @ x.mT).double()  # [T, K, K]
        energy = gram.diagonal(dim1=-2, dim2=-1)
        omega = energy.sqrt()[..., :, None]
        pair = (ids[..., :, None] * self.experts + ids[..., None, :]).flatten()
        for total, value in (
            (self.uv, gram),
            (self.vv, energy[..., None, :].expand_as(gram)),
            (self.uu, energy[..., :, None].expand_as(gram)),
        ):
            total += torch.bincount(pair, (omega * value).flatten(), minlength=total.numel())

    def finish(self) -> dict[str, Tensor]:
        n = self.experts
        uv, vv, uu = (total.view(n, n) for total in (self.uv, self.vv, self.uu))
        scale = (uv / (vv + FOLD_EPS)).clamp(-FOLD_CLIP, FOLD_CLIP)
        seen = uu > 0
        loss = torch.where(seen, (uu - 2 * scale * uv + scale.square() * vv) / uu.clamp_min(1e-300), UNSEEN)
        itself = torch.eye(n, dtype=torch.bool, device=uv.device)
        scale = torch.where(seen, scale, 0.0).masked_fill(itself, 1.0)
        return {"fold_scale": scale, "fold_loss": loss.masked_fill(itself, UNSEEN)}


class Direction:
    """Mean of E_u(z) / |E_u(z)| over the tokens routed to expert u, [N, d]; 0 for an expert without tokens."""

    def __init__(self, experts: int, hidden: int, device: torch.device | str) -> None:
        self.total = torch.zeros(experts, hidden, dtype=torch.float64, device=device)
        self.count = torch.zeros(experts, dtype=torch.int64, device=device)

    def add(self, layer: MoeLayer, hidden: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:  # noqa: ARG002
        """ids [T, K], outputs [T, K, d] unweighted."""
        flat, directions = ids.flatten(), unit(outputs).flatten(0, 1)
        self.total += torch.zeros_like(self.total, dtype=directions.dtype).index_add(0, flat, directions)
        self.count += torch.bincount(flat, minlength=len(self.count))

    def finish(self) -> dict[str, Tensor]:
        return {"output_direction": self.total / self.count.clamp_min(1)[:, None]}


class Similarity:
    """SERE's similarities of all pairs of experts; every expert runs on every token (up to 400 x 128 tokens).

    frobenius: 1 - |Y_u - Y_v|_F / max over pairs; cosine: (mean_t cos(Y_u[t], Y_v[t]) + 1) / 2; cka: linear CKA of the
    outputs centred over the tokens, on the first 1,024 (by their Gram matrices, which gives the same as the paper's
    feature-space form on the same tokens). SERE, https://arxiv.org/abs/2602.07616, and the authors' code. Diagonal 1.
    """

    def __init__(self, experts: int, metrics: frozenset[str], device: torch.device | str) -> None:
        self.metrics, self.tokens = metrics, 0
        self.gram, self.cosine = torch.zeros(2, experts, experts, dtype=torch.float64, device=device)
        self.sample: list[Tensor] = []

    def add(self, layer: MoeLayer, hidden: Tensor, ids: Tensor, weights: Tensor, outputs: Tensor) -> None:  # noqa: ARG002
        """hidden [T, d]; the layer's experts run here."""
        experts = len(self.gram)
        step = max(1, OUTPUTS_AT_ONCE // experts)
        hidden = hidden[: SIMILARITY_TOKENS - self.tokens]
        for part in hidden.split(step) if len(hidden) else ():
            every_expert = torch.arange(experts, device=hidden.device).expand(len(part), experts)
            y = layer.route_outputs(part, every_expert).float().transpose(0, 1)  # [N, t, d]
            self.gram += (y.flatten(1) @ y.flatten(1).T).double()
            if "cosine" in self.metrics:
                direction = unit(y).flatten(1)
                self.cosine += (direction @ direction.T).double()
            missing = CKA_TOKENS - sum(s.shape[1] for s in self.sample)
            if "cka" in self.metrics and missing > 0:
                self.sample.append(y[:, :missing].clone())
            self.tokens += len(part)

    def finish(self) -> dict[str, Tensor]:
        similarities = {}
        if "frobenius" in self.metrics:
            energy = self.gram.diagonal()
            distance = (energy[:, None] + energy[None, :] - 2 * self.gram).clamp_min(0).sqrt()
            distance.fill_diagonal_(0.0)
            similarities["similarity_frobenius"] = 1 - distance / distance.amax().clamp_min(1e-300)
        if "cosine" in self.metrics:
            similarities["similarity_cosine"] = ((self.cosine / max(self.tokens, 1)) + 1) / 2
        if "cka" in self.metrics:
            similarities["similarity_cka"] = self._cka()
        return {name: value.fill_diagonal_(1.0) for name, value in similarities.items()}

    def _cka(self) -> Tensor:
        grams = []
        for y in torch.cat(self.sample, 1):  # [t, d] of one expert
            centred = y - y.mean(0)
            gram = centred @ centred.T
            grams.append((gram / gram.norm().clamp_min(torch.finfo(torch.float32).tiny)).flatten())
        stacked = torch.stack(grams)
        return (stacked @ stacked.T).double().clamp(0, 1)
