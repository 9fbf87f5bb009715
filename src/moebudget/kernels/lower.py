"""Kernel settings of a policy, or an error that names its part without a kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.methods.base import DeviceBudget, PredictedEnergy, SquaredWeight, StaticEnergy
from moebudget.methods.common import GateMass, RouteRank, RouterMass, TopBudget, Voted
from moebudget.methods.devices import Level
from moebudget.methods.fills import Backfill, Denominator, Drop
from moebudget.methods.spread import LayerBudget, Price
from moebudget.methods.xshare import WarmUp

RULES: dict[type, str] = {  # names in `score`
    PredictedEnergy: "BASE", SquaredWeight: "SQUARED", StaticEnergy: "STATIC", RouterMass: "MASS", RouteRank: "RANK",
    GateMass: "GATE",
}  # fmt: skip
DENOMINATORS: tuple[Denominator, ...] = ("native", "executed", "geometric")
MOST_EXPERTS, MOST_ROUTES, MOST_DEVICES = 512, 16, 64
NO_LIMIT = 2**30


class NotFusedError(ValueError):
    """A policy or router that the kernels do not cover; the message names the part."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """The settings that the kernels are compiled for. `most`: the budget, or the experts on top of the warm-up set.

    `average`: the budget is an average over layers, and the statistic `layer_budget` holds the layer's own budget.
    `priced`: the statistic `layer_price` holds the price at which the layer fetches its share of an average budget.
    `by_device`: the budget is per device. `level`: every device is filled up to the load of the fullest one. Both
    read `placement_device`.
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
    """The kernel settings of a policy. Raises NotFusedError that names the part without a kernel."""
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
            f"{spec.num_experts} experts and {spec.top_k} routes per token exceed the kernels' limits of "
            f"{MOST_EXPERTS} and {MOST_ROUTES}"
        )
    denominator = fill.denominator if isinstance(fill, Backfill) else "native"
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
