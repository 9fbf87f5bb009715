"""OEA: the union of the rows' first routes, and every row's best experts inside it."""

from __future__ import annotations

from dataclasses import replace

from moebudget.core.policy import Policy
from moebudget.methods.common import RouteRank, Voted
from moebudget.methods.fills import FILLS, Backfill, FillName
from moebudget.methods.registry import Count, Share, Tunable, register


@register(
    source="https://arxiv.org/abs/2511.02237, section 3",
    example="oea:k0=2",
    label="OEA",
    tune=(Tunable("k0", 1, "K"), Tunable("p", 0.02, 0.98)),
    variants={"OEA, simplified": ("oea:k0={}",), "OEA, general": ("oea:k0=2,p={}", "oea:k0=4,p={}", "oea:k0=8,p={}")},
)
def oea(
    k0: Count, p: Share = 1.0, k_max: Count | None = None, max_rank: Count | None = None, fill: FillName = "executed"
) -> Policy:
    """OEA: the union of every row's top-k0 (or fewer, up to share p), then each row's best inside it, renormalised.

    The simplified form has k0 alone: p = 1, k_max = K, max_rank = N. For models that do not renormalise the weights
    stay as the model makes them (our reading; the paper has renormalising models only).
    """
    rule = FILLS[fill]
    if k_max is not None or max_rank is not None:
        for field, value in (("k_max", k_max), ("max_rank", max_rank)):
            if value is not None and value < k0:
                raise ValueError(f"oea: {field}={value} must be at least k0={k0}, the routes that a row is sure of")
        if not isinstance(rule, Backfill):
            raise ValueError(f"oea: k_max and max_rank limit a backfill; fill={fill} has none: use fill=executed")
        rule = replace(rule, k_max=k_max, max_rank=max_rank)
    return Policy(RouteRank(k0, p), Voted(), rule)
