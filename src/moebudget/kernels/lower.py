"""lower(policy): which fused kernel does a policy's work, or which of its pieces has none."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from moebudget.fill import Backfill, Drop
from moebudget.policy import Policy
from moebudget.router import RouterSpec
from moebudget.runtime import FIELDS
from moebudget.score import PredictedEnergy, RouteRank, RouterMass, SquaredWeight, StaticEnergy
from moebudget.select import TopBudget, Voted
from moebudget.types import NO_STATS, LayerStats, Routing

RULES: dict[type, str] = {  # names in `route`
    PredictedEnergy: "BASE", SquaredWeight: "SQUARED", StaticEnergy: "STATIC", RouterMass: "MASS", RouteRank: "RANK",
}  # fmt: skip
MOST_EXPERTS, MOST_ROUTES = 512, 16
GROUP = 16  # rows that the first launch adds up together, where there are more than DIRECT
DIRECT = 16


class NotFusedError(ValueError):
    """A policy or router that the kernels do not cover; the message names the piece."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """What the kernels are compiled for."""

    rule: str
    k0: int
    drop: bool
    executed: bool
    has_budget: bool


def lower(policy: Policy, spec: RouterSpec | None = None) -> Lowered:
    """The kernel settings of a policy. Raises NotFusedError that names the piece without a kernel."""
    rule = RULES.get(type(policy.score))
    if rule is None:
        raise NotFusedError(f"{policy}: no kernel for the score {type(policy.score).__name__}")
    if isinstance(policy.score, RouteRank) and policy.score.p < 1:
        raise NotFusedError(f"{policy}: no kernel for the score RouteRank with p={policy.score.p:g} below 1")
    budgeted = isinstance(policy.select, TopBudget)
    if not budgeted and not (isinstance(policy.select, Voted) and isinstance(policy.score, RouteRank)):
        raise NotFusedError(f"{policy}: no kernel for the selection {type(policy.select).__name__}")
    if policy.fill not in (Backfill("original"), Backfill("executed"), Drop()):
        raise NotFusedError(f"{policy}: no kernel for the fill {policy.fill}")
    if spec is not None and (spec.num_experts > MOST_EXPERTS or spec.top_k > MOST_ROUTES):
        raise NotFusedError(
            f"{spec.num_experts} experts and {spec.top_k} routes a token exceed the kernels' {MOST_EXPERTS} and "
            f"{MOST_ROUTES}"
        )
    k0 = policy.score.k0 if isinstance(policy.score, RouteRank) else 0
    return Lowered(rule, min(k0, 2**30), policy.fill == Drop(), policy.fill == Backfill("executed"), budgeted)


def _route() -> ModuleType:
    """The kernels; ImportError that names the extra without Triton."""
    try:
        from moebudget.kernels import route
    except ImportError as error:
        raise ImportError("the fused kernels need Triton: pip install 'moebudget[kernels]'") from error
    return route


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class FusedRouter:
    """One layer's router and policy in two launches: `router(hidden, logits, live)` -> Routing.

    Takes the router's logits and computes the model's own routes itself; ids are those of the torch form, but for sums
    that tie up to the rounding of a weight, weights to float32 rounding. All buffers are made here, for up to
    `max_rows` rows: a call allocates nothing when `out` is given, reads nothing on the host and can be captured in a
    CUDA graph. `budget` (device, int32) and `live` may change between replays. Raises NotFusedError for what has no
    kernel, ValueError for wrong shapes.
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
        self.kernels = _route()
        n, k = spec.num_experts, spec.top_k
        padded = max(16, _power(n))
        self.split = k if plan.rule == "BASE" else 1
        self.stats = LayerStats({name: stats[name].to(device).contiguous() for name in sorted(policy.needs)})

        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.budget = make(1, dtype=torch.int32)
        if policy.budget is not None:
            self.budget.copy_(torch.as_tensor(policy.budget).reshape(1))
        self.score = make(max_rows, padded, dtype=torch.float32)
        self.votes = make(max_rows, dtype=torch.int8)
        self.partial = make(-(-max_rows // GROUP), padded, dtype=torch.float64)
        self.arrivals = make(-(-max_rows // GROUP), dtype=torch.int32)
        self.counters = make(max_rows, self.kernels.FIELDS.value, dtype=torch.float64)
        self.everyone = torch.ones(max_rows, dtype=torch.bool, device=device)
        cuda = torch.device(device).type == "cuda"
        pdl = cuda and torch.cuda.get_device_capability(device)[0] >= 9 if pdl is None else pdl
        self.router = {
            "NP": padded, "K": k, "SIGMOID": spec.scoring == "sigmoid",
            "RENORMALIZE": spec.renormalize, "SCALE": spec.scale, "GROUPS": spec.groups, "OPEN": spec.open_groups,
            "TOP2": spec.group_score == "top2", "GP": max(2, _power(spec.groups)),
        }  # fmt: skip
        self.scoring = {
            "RULE": getattr(self.kernels, plan.rule).value, "K0": plan.k0, "SPLIT": self.split,
            "HAS_BUDGET": plan.has_budget, "BLOCK": min(2048, max(16, _power(hidden))),
        }  # fmt: skip
        self.filling = {
            "KP": max(2, _power(k)), "HAS_BUDGET": plan.has_budget, "DROP": plan.drop, "EXECUTED": plan.executed,
            "COUNT": count,
        }  # fmt: skip
        self.pdl = pdl
        self.warps = 1 if padded <= 128 else 2  # few: reductions across warps cost more than they save

    @property
    def totals(self) -> Tensor:
        """The counters [len(FIELDS)] float64, summed over rows; the order of the sum is fixed."""
        return self.counters.sum(0)[: len(FIELDS)]

    def set_budget(self, budget: int) -> None:
        """Change the budget from the next call or replay on."""
        self.budget.fill_(self.policy.checked_budget(budget))

    def __call__(
        self,
        hidden: Tensor,
        logits: Tensor,
        live: Tensor | None = None,
        bias: Tensor | None = None,
        out: Routing | None = None,
    ) -> Routing:
        """hidden [T, d], logits [T, N], live [T] bool, bias [N] -> ids [T, K] int64, weights [T, K] float32."""
        rows, n = logits.shape
        self._check(hidden, logits, live, bias)
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
        shared = {**self.router, "HAS_BIAS": bias is not None, "PDL": self.pdl}
        shared["GROUP"] = group = 0 if rows <= DIRECT else GROUP
        bias = logits if bias is None else bias  # a pointer that is not read
        self.kernels.score_rows[(rows, self.split)](
            logits, hidden, bias, live, slope, tensors.get("predictor_bias", self.score),
            tensors.get("energy_mean", self.score), self.budget, self.score, self.votes, self.partial, self.arrivals,
            logits.stride(0), hidden.stride(0), slope.stride(0), rows, n,
            D=self.hidden, num_warps=self.warps, **self.scoring, **shared,
        )  # fmt: skip
        lines = -(-rows // group) if group else rows
        dependent = {"launch_pdl": True} if self.pdl else {}
        self.kernels.fill_rows[(rows,)](
            logits, bias, self.budget, self.score, self.votes, self.partial, out.ids, out.weights, self.counters,
            logits.stride(0), rows, n,
            ROWS=max(2, _power(lines)), num_warps=self.warps, **self.filling, **shared, **dependent,
        )  # fmt: skip
        return out

    def _check(self, hidden: Tensor, logits: Tensor, live: Tensor | None, bias: Tensor | None) -> None:
        rows = logits.shape[0]
        wanted = {"logits": (rows, self.spec.num_experts), "hidden": (rows, self.hidden), "live": (rows,)}
        wanted["bias"] = (self.spec.num_experts,)
        for name, tensor in (("logits", logits), ("hidden", hidden), ("live", live), ("bias", bias)):
            if tensor is None:
                continue
            if tuple(tensor.shape) != wanted[name]:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, this layer expects {wanted[name]}")
            if tensor.numel() and tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be contiguous in its last dimension; its strides are {tensor.stride()}")
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows exceed max_rows={self.max_rows}, for which the buffers were made")
