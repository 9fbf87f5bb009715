"""lower(policy): which fused kernel does a policy's work, or which of its pieces has none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from moebudget.device_selects import DeviceBudget, Level
from moebudget.fill import Backfill, Denominator, Drop
from moebudget.policy import Policy
from moebudget.rival_scores import GateMass
from moebudget.rival_selects import WarmUp
from moebudget.router import RouterSpec
from moebudget.score import PredictedEnergy, RouteRank, RouterMass, SquaredWeight, StaticEnergy
from moebudget.select import LayerBudget, Price, TopBudget, Voted

RULES: dict[type, str] = {  # names in `route`
    PredictedEnergy: "BASE", SquaredWeight: "SQUARED", StaticEnergy: "STATIC", RouterMass: "MASS", RouteRank: "RANK",
    GateMass: "GATE",
}  # fmt: skip
DENOMINATORS: tuple[Denominator, ...] = ("original", "executed", "half")
MOST_EXPERTS, MOST_ROUTES, MOST_DEVICES = 512, 16, 64
NO_LIMIT = 2**30


class NotFusedError(ValueError):
    """A policy or router that the kernels do not cover; the message names the piece."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """What the kernels are compiled for. `most`: the budget, or how many experts come on top of the warm-up set.

    `average`: the budget is one a layer on average, and the layer's own stands in the statistic `layer_budget`;
    `priced`: the price at which the layer fetches it stands in `layer_price`. `by_device`: it is one a device.
    `level`: every device is then filled up to the load of the fullest. Both read `placement_device`.
    """

    rule: str
    k0: int
    most: int | Tensor
    drop: bool
    denominator: str
    has_budget: bool
    average: bool = False
    priced: bool = False
    hold: float = 0.0
    additive: bool = True
    by_device: bool = False
    level: bool = False


def lower(policy: Policy, spec: RouterSpec | None = None) -> Lowered:
    """The kernel settings of a policy. Raises NotFusedError that names the piece without a kernel."""
    score, select, fill = policy.score, policy.select, policy.fill
    rule = RULES.get(type(score))
    if rule is None:
        raise NotFusedError(f"{policy}: no kernel for the score {type(score).__name__}")
    if isinstance(score, RouteRank) and score.p < 1:
        raise NotFusedError(f"{policy}: no kernel for the score RouteRank with p={score.p:g} below 1")
    if fill not in (*map(Backfill, DENOMINATORS), Drop()):
        raise NotFusedError(f"{policy}: no kernel for the fill {fill}")
    if spec is not None and (spec.num_experts > MOST_EXPERTS or spec.top_k > MOST_ROUTES):
        raise NotFusedError(
            f"{spec.num_experts} experts and {spec.top_k} routes a token exceed the kernels' {MOST_EXPERTS} and "
            f"{MOST_ROUTES}"
        )
    denominator = fill.denominator if isinstance(fill, Backfill) else "original"
    plan = partial(Lowered, rule, drop=fill == Drop(), denominator=denominator)
    if isinstance(select, Level):
        must = lower(replace(policy, select=select.must), spec)
        if must.has_budget and not must.by_device and must.rule != "GATE":
            return replace(must, level=True)
    if isinstance(select, TopBudget) or (isinstance(select, DeviceBudget) and rule != "GATE"):
        k0, by_device = score.k0 if isinstance(score, RouteRank) else 0, isinstance(select, DeviceBudget)
        return plan(k0=k0, most=select.budget, has_budget=True, by_device=by_device)
    if isinstance(select, LayerBudget) and not select.floor:
        return plan(k0=0, most=select.budget, has_budget=True, average=True)
    if isinstance(select, Price) and not select.floor and select.ceiling is None:
        return plan(k0=0, most=select.budget, has_budget=True, priced=True, hold=select.hold)
    if isinstance(select, Voted) and isinstance(score, RouteRank):
        return plan(k0=score.k0, most=NO_LIMIT, has_budget=False)
    if isinstance(select, WarmUp) and isinstance(score, GateMass) and not select.m_request:
        return plan(k0=select.k0, most=select.m, has_budget=True, additive=select.additive)
    raise NotFusedError(f"{policy}: no kernel for the selection {select} by {type(score).__name__}")
