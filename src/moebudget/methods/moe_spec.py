"""MoE-Spec: the largest sum of router scores over the draft tokens of a request."""

from __future__ import annotations

from moebudget.core.policy import Policy
from moebudget.methods.common import GateMass, TopBudget
from moebudget.methods.fills import FILLS, FillName
from moebudget.methods.registry import Count, Tunable, register


@register(
    source="https://arxiv.org/abs/2602.16052",
    example="moe_spec:budget=8",
    label="MoE-Spec",
    tune=Tunable("budget", 1, "N"),
    variants={"MoE-Spec": ("moe_spec:budget={}", "moe_spec:budget={},fill=drop")},
)
def moe_spec(budget: Count, fill: FillName = "executed") -> Policy:
    """MoE-Spec: the `budget` experts with the largest sum of router scores over all rows; `fill=drop` truncates.

    Made for the draft tokens of one request.
    """
    return Policy(GateMass(), TopBudget(budget), FILLS[fill])
