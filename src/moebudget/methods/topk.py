"""Plain top-k reduction: every token runs fewer experts, blind to the batch."""

from __future__ import annotations

from moebudget.core.policy import Policy
from moebudget.methods.common import RouteRank, Voted
from moebudget.methods.fills import NativeRoutes
from moebudget.methods.registry import Count, Tunable, register


@register(source="plain baseline", example="topk:k=2", label="plain top-k", tune=Tunable("k", 1, "K"))
def topk(k: Count) -> Policy:
    """Plain top-k reduction: k routes per token instead of K, renormalised where the model renormalises."""
    return Policy(RouteRank(k), Voted(), NativeRoutes())
