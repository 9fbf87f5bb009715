"""FusedRouter: buffers and launches of one layer's kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moebudget.kernels.lower import MOST_DEVICES, NO_LIMIT, NotFusedError, lower
from moebudget.policy import Policy
from moebudget.router import RouterSpec
from moebudget.runtime import FIELDS
from moebudget.select import at_average
from moebudget.types import NO_STATS, LayerStats, Routing

CHUNK = 16  # rows that the first launch adds up together, where there are more
WIDE = 1024  # routes of the batch from which it adds up twice as many, and each program predicts two of them


def _kernels() -> tuple[ModuleType, ModuleType]:
    """The modules of both launches; ImportError that names the extra without Triton."""
    try:
        from moebudget.kernels import route, score
    except ImportError as error:
        raise ImportError("the fused kernels need Triton: pip install 'moebudget[kernels]'") from error
    return score, route


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _block(width: int) -> int:
    """Columns that one warp reads at a time: a power of two from 16 to 2048 that leaves the least of a row over."""
    blocks = [1 << i for i in range(9, 12) if 1 << i <= width] or [max(16, _power(width))]
    return min(reversed(blocks), key=lambda block: -(-width // block) * block)


class FusedRouter:
    """One layer's router and policy in two launches: `router(hidden, logits, live)` -> Routing.

    Takes the router's logits and computes the model's own routes itself; ids are those of the torch form, but for sums
    that tie up to the rounding of a weight, weights to float32 rounding. All buffers are made here, for up to
    `max_rows` rows: a call allocates nothing when `out` is given, reads nothing on the host and can be captured in a
    CUDA graph. `budget` (device, int32), `live` and the inputs may change between replays. Raises NotFusedError for
    what has no kernel, ValueError for wrong shapes.
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
        self.average, self.priced, self.hold = plan.average, plan.priced, plan.hold
        self.scale = torch.ones(1, dtype=torch.float64, device=device)
        # Apart from `scale`, which all programs read while row 0 writes; `chain` puts the next layer's here.
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
        self.everyone = torch.ones(max_rows, dtype=torch.int8, device=device)
        cuda = torch.device(device).type == "cuda"
        self.pdl = cuda and torch.cuda.get_device_capability(device)[0] >= 9 if pdl is None else pdl
        self.router = {
            "NP": padded, "K": k, "SIGMOID": spec.scoring == "sigmoid",
            "RENORMALIZE": spec.renormalize, "SCALE": spec.scale, "GROUPS": spec.groups, "OPEN": spec.open_groups,
            "TOP2": spec.group_score == "top2", "GP": max(2, _power(spec.groups)),
        }  # fmt: skip
        self.rule = {
            "RULE": getattr(first, plan.rule).value, "K0": min(plan.k0, NO_LIMIT), "COUNT": count,
            "CAPS": plan.has_budget and plan.rule != "GATE",
        }  # fmt: skip
        self.split = k if plan.rule == "BASE" else 1
        denominator = getattr(second, plan.denominator.upper()).value
        self.choosing = {"PRICED": plan.priced, "ADDITIVE": plan.additive, "RANKS": ranks, "LEVEL": plan.level}
        self.filling = {"DROP": plan.drop, "DENOMINATOR": denominator}
        self.warps = 1 if padded <= 128 else 2  # of one row: reductions across warps cost more than they save

    @property
    def totals(self) -> Tensor:
        """The counters [len(FIELDS)] float64, summed over rows; the order of the sum is fixed."""
        return self.counters.sum(0)[: len(FIELDS)]

    def set_budget(self, budget: int) -> None:
        """Change the budget from the next call or replay on; in the stream of the calls, so that no step sees both."""
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
        live: Tensor | None = None,
        bias: Tensor | None = None,
        out: Routing | None = None,
        routes: Routing | None = None,
    ) -> Routing:
        """hidden [T, d], logits [T, N], live [T], bias [N] -> ids [T, K] int64, weights [T, K] float32.

        live (bool or int8; None: all 1): 0 padding, 1 a row that votes, 2 a row that keeps the model's own routes.
        routes: what the model itself computed; rows that lose none of their routes get them as they are, bit for bit.
        `out` may have ids of another integer type.
        """
        rows, n = logits.shape
        self._check(hidden, logits, live, bias, out, routes)
        if out is None:
            k = self.spec.top_k
            out = Routing(
                torch.empty(rows, k, dtype=torch.int64, device=logits.device),
                torch.empty(rows, k, dtype=torch.float32, device=logits.device),
            )
        if not rows:
            return out
        live = self.everyone[:rows] if live is None else live
        tensors = self.stats.tensors
        slope = tensors.get("predictor_weight", self.score)
        wide = rows * self.split >= WIDE
        split, chunk = (-(-self.split // 2), 2 * CHUNK) if wide else (self.split, CHUNK if rows > CHUNK else 0)
        own = out if routes is None else routes  # of `out` nothing is read
        shared: dict[str, Any] = {"HAS_BIAS": bias is not None, "ROUTED": routes is not None, "CHUNK": chunk}
        shared |= {"PDL": self.pdl, **self.router, **self.rule}
        bias = logits if bias is None else bias  # a pointer that is not read
        early = {"launch_pdl": True} if self.pdl else {}
        self.score_rows[(rows, split)](
            logits, hidden, bias, live, slope, tensors.get("predictor_bias", self.score),
            tensors.get("energy_mean", self.score), self.budget, self.score, self.places, self.bits, self.kinds,
            self.partial, self.arrivals, own.ids, own.weights, out.ids, out.weights, self.counters, logits.stride(0),
            hidden.stride(0), slope.stride(0), rows, n,
            D=self.hidden, BLOCK=_block(self.hidden), SPLIT=split, num_warps=self.warps, **shared, **early,
        )  # fmt: skip
        self.route_rows[(rows,)](
            logits, bias, self.budget, self.price, self.scale, self.following, self.home, self.score, self.places,
            self.bits, self.kinds, self.partial, self.arrivals, self.runs, own.ids, own.weights, out.ids, out.weights,
            self.counters, logits.stride(0), rows, n,
            ROWS=max(2, _power(-(-rows // chunk) if chunk else rows)), num_warps=self.warps,
            HOLD=self.hold, **self.choosing, **self.filling, **shared, **early,
        )  # fmt: skip
        if self.hold and self.following is self.own_following:
            self.scale.copy_(self.following)
        return out

    def _check(
        self,
        hidden: Tensor,
        logits: Tensor,
        live: Tensor | None,
        bias: Tensor | None,
        out: Routing | None,
        routes: Routing | None,
    ) -> None:
        rows, n = logits.shape[0], self.spec.num_experts
        given: dict[str, tuple[Tensor | None, tuple[int, ...]]] = {
            "logits": (logits, (rows, n)),
            "hidden": (hidden, (rows, self.hidden)),
            "live": (live, (rows,)),
            "bias": (bias, (n,)),
        }
        for name, routing in (("out", out), ("routes", routes)):
            for part in ("ids", "weights") if routing is not None else ():
                given[f"{name}.{part}"] = (getattr(routing, part), (rows, self.spec.top_k))
        for name, (tensor, shape) in given.items():
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, this layer expects {shape}")
            strides = tensor.is_contiguous() if "." in name else tensor.stride(-1) == 1
            if tensor.numel() and not strides:
                raise ValueError(f"{name} must be contiguous in its last dimension; its strides are {tensor.stride()}")
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows exceed max_rows={self.max_rows}, for which the buffers were made")
