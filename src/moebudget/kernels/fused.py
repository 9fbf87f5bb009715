"""FusedRouter: buffers and launches of the kernels of one layer."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moebudget.core.counters import COUNTERS
from moebudget.core.ops import at_average
from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.core.types import NO_STATS, LayerStats, Routing, RowKind
from moebudget.kernels.lower import DENOMINATORS, MOST_DEVICES, NO_LIMIT, NotFusedError, lower
from moebudget.kernels.settings import Filling, RouterForm, Selection

CHUNK = 16  # rows that the first launch adds up together, in batches of more rows
WIDE = 1024  # routes in the batch from which it adds up twice as many rows, and each program predicts two routes


def _kernels() -> tuple[ModuleType, ModuleType]:
    """The modules of both launches. Raises ImportError that names the extra if Triton is missing."""
    try:
        from moebudget.kernels import route, score
    except ImportError as error:
        raise ImportError("the fused kernels need Triton: pip install 'moebudget[kernels]'") from error
    return score, route


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _block(width: int) -> int:
    """Columns that one warp reads at a time: the power of two from 16 to 2048 that pads a row least."""
    blocks = [1 << i for i in range(9, 12) if 1 << i <= width] or [max(16, _power(width))]
    return min(reversed(blocks), key=lambda block: -(-width // block) * block)


class FusedRouter:
    """One layer's router and policy in two launches: `router(hidden, logits, kind)` -> Routing.

    Computes the native routes from the router's logits. Ids equal those of the torch form, except where sums tie up to
    the rounding of a weight; weights agree to float32 rounding. The constructor allocates all buffers, for up to
    `max_rows` rows: a call with `out` allocates nothing, reads nothing on the host, and can be captured in a CUDA
    graph. `budget` (device, int32), `kind` and the inputs may change between replays. Raises NotFusedError for a part
    without a kernel, ValueError for wrong shapes.
    """

    def __init__(
        self,
        policy: Policy,
        spec: RouterSpec,
        stats: LayerStats = NO_STATS,
        *,
        hidden: int,
        max_rows: int,
        device: torch.device | str,
        count: bool = True,
        pdl: bool | None = None,
    ) -> None:
        self.policy, self.spec, self.hidden, self.max_rows = policy, spec, hidden, max_rows
        plan = lower(policy, spec)
        ranks = int(stats["placement_device"].max()) + 1 if plan.by_device or plan.level else 1
        if ranks > MOST_DEVICES:
            raise NotFusedError(f"{policy}: no kernel for the selection {policy.select} over {ranks} devices")
        first, second = _kernels()
        self.score_rows, self.route_rows = first.score_rows, second.route_rows
        n, k = spec.num_experts, spec.top_k
        padded = max(16, _power(n))
        self.stats = LayerStats({name: stats[name].to(device).contiguous() for name in sorted(policy.needs)})

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.budget = make(1, dtype=torch.int32)
        self.price = make(1, dtype=torch.float64)
        self.average, self.priced = plan.average, plan.priced
        self.scale = torch.ones(1, dtype=torch.float64, device=device)
        # Another cell than `scale`, which all programs read while row 0 writes; `chain` puts the next layer's here.
        self.following = self.own_following = self.scale.clone()
        self._write(plan.most)
        self.home = torch.full((padded,), -1, dtype=torch.int32, device=device)
        if ranks > 1:
            self.home[:n] = self.stats["placement_device"]
        self.score = make(max_rows, padded, dtype=torch.float32)
        self.runs = make(max_rows if plan.rule == "GATE" else 0, padded, dtype=torch.float32)
        self.places = make(*self.runs.shape, dtype=torch.int8)
        self.bits = make(max_rows, max(1, padded // 32), dtype=torch.int32)
        self.kinds = make(max_rows, dtype=torch.int8)
        self.partial = make(-(-max_rows // CHUNK), padded, dtype=torch.float64)
        self.arrivals = make(-(-max_rows // CHUNK), dtype=torch.int32)
        self.counters = make(max_rows, second.FIELDS.value, dtype=torch.float64)
        self.everyone = torch.full((max_rows,), RowKind.DECODE, dtype=torch.int8, device=device)
        cuda = torch.device(device).type == "cuda"
        self.pdl = cuda and torch.cuda.get_device_capability(device)[0] >= 9 if pdl is None else pdl
        self.router = {
            "NP": padded,
            "K": k,
            "ROUTER": RouterForm(
                SIGMOID=spec.scoring == "sigmoid",
                RENORMALIZE=spec.renormalize,
                SCALE=spec.scale,
                GROUPS=spec.groups,
                OPEN=spec.open_groups,
                TOP2=spec.group_score == "top2",
                GP=max(2, _power(spec.groups)),
            ),
        }
        self.rule = {
            "RULE": getattr(first, plan.rule).value,
            "K0": min(plan.k0, NO_LIMIT),
            "CAPS": plan.has_budget and plan.rule != "GATE",
            "COUNT": count,
        }
        self.split = k if plan.rule == "BASE" else 1
        self.selection = Selection(plan.priced, plan.hold, plan.additive, ranks, plan.level)
        self.filling = Filling(plan.drop, DENOMINATORS.index(plan.denominator))
        self.warps = 1 if padded <= 128 else 2  # per row: reductions across warps cost more than they save

    @property
    def hold(self) -> float:
        """Share of an excess over the budget that this layer corrects per step; `chain` sets it."""
        return self.selection.HOLD

    @hold.setter
    def hold(self, share: float) -> None:
        self.selection = self.selection._replace(HOLD=share)

    @property
    def totals(self) -> Tensor:
        """The counters [len(COUNTERS)] float64, summed over rows; the order of the sum is fixed."""
        return self.counters.sum(0)[: len(COUNTERS)]

    def set_budget(self, budget: int) -> None:
        """Change the budget from the next call or replay on, in the stream of the calls, so that no step sees both."""
        self._write(self.policy.checked_budget(budget))

    def _write(self, budget: int | Tensor) -> None:
        if self.average:
            budget = at_average(self.stats["layer_budget"], budget)
        if self.priced:
            self.price.copy_(at_average(self.stats["layer_price"], budget).reshape(1))
        self.budget.copy_(torch.as_tensor(budget).reshape(1))

    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        kind: Tensor | None = None,
        bias: Tensor | None = None,
        out: Routing | None = None,
        routes: Routing | None = None,
    ) -> Routing:
        """hidden [T, d], logits [T, N], kind [T], bias [N] -> ids [T, K] int64, weights [T, K] float32.

        kind: int8 RowKind, or bool (True: DECODE, False: PAD); None: all rows are DECODE. routes: the native routing
        as the model computed it; rows that lose no route get it bit for bit. out: where to write; its ids may have
        another integer type.
        """
        rows, n = logits.shape
        self._check(hidden, logits, kind, bias, out, routes)
        if out is None:
            k = self.spec.top_k
            out = Routing(
                torch.empty(rows, k, dtype=torch.int64, device=logits.device),
                torch.empty(rows, k, dtype=torch.float32, device=logits.device),
            )
        if not rows:
            return out
        kind = self.everyone[:rows] if kind is None else kind
        tensors = self.stats.tensors
        slope = tensors.get("predictor_weight", self.score)
        wide = rows * self.split >= WIDE
        split, chunk = (-(-self.split // 2), 2 * CHUNK) if wide else (self.split, CHUNK if rows > CHUNK else 0)
        native = out if routes is None else routes  # without routes, a pointer that is not read
        shared: dict[str, Any] = {"HAS_BIAS": bias is not None, "ROUTED": routes is not None, "CHUNK": chunk}
        shared |= {"PDL": self.pdl, **self.router, **self.rule}
        bias = logits if bias is None else bias  # a pointer that is not read
        early = {"launch_pdl": True} if self.pdl else {}
        self.score_rows[(rows, split)](
            logits, hidden, bias, kind, slope, tensors.get("predictor_bias", self.score),
            tensors.get("energy_mean", self.score), self.budget, self.score, self.places, self.bits, self.kinds,
            self.partial, self.arrivals, native.ids, native.weights, out.ids, out.weights, self.counters,
            logits.stride(0), hidden.stride(0), slope.stride(0), rows, n,
            D=self.hidden, BLOCK=_block(self.hidden), SPLIT=split, num_warps=self.warps, **shared, **early,
        )  # fmt: skip
        self.route_rows[(rows,)](
            logits, bias, self.budget, self.price, self.scale, self.following, self.home, self.score, self.places,
            self.bits, self.kinds, self.partial, self.arrivals, self.runs, native.ids, native.weights, out.ids,
            out.weights, self.counters, logits.stride(0), rows, n,
            ROWS=max(2, _power(-(-rows // chunk) if chunk else rows)), num_warps=self.warps,
            SELECT=self.selection, FILL=self.filling, **shared, **early,
        )  # fmt: skip
        if self.selection.HOLD and self.following is self.own_following:
            self.scale.copy_(self.following)
        return out

    def _check(
        self,
        hidden: Tensor,
        logits: Tensor,
        kind: Tensor | None,
        bias: Tensor | None,
        out: Routing | None,
        routes: Routing | None,
    ) -> None:
        rows, n = logits.shape[0], self.spec.num_experts
        expected: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
            "logits": (logits, (rows, n)),
            "hidden": (hidden, (rows, self.hidden)),
            "kind": (kind, (rows,)),
            "bias": (bias, (n,)),
        }
        for name, routing in (("out", out), ("routes", routes)):
            for part in ("ids", "weights") if routing is not None else ():
                expected[f"{name}.{part}"] = (getattr(routing, part), (rows, self.spec.top_k))
        for name, (tensor, shape) in expected.items():
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, but this layer expects {shape}")
            strides = tensor.is_contiguous() if "." in name else tensor.stride(-1) == 1
            if tensor.numel() and not strides:
                raise ValueError(
                    f"{name} must be contiguous in its last dimension, but its strides are {tensor.stride()}"
                )
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows exceed max_rows={self.max_rows}, the size of the buffers")
