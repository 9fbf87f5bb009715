"""RouterSpec of a vLLM router, read from its attributes. Needs no vLLM: routers are told apart by class name."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moebudget.core.router import RouterSpec

KNOWN = ("FusedTopKRouter", "FusedTopKBiasRouter", "GroupedTopKRouter", "CPURouter")


class UnsupportedRouterError(ValueError):
    """A router whose arithmetic moebudget cannot reproduce; the message names the part."""


def router_spec(router: Any, experts: int) -> RouterSpec:
    """RouterSpec of a router over logits [T, experts]; the router's own count of experts includes copies.

    Raises UnsupportedRouterError, which names the part, for custom routing, hash routing and the like.
    """
    kind = type(router).__name__
    if kind not in KNOWN:
        raise UnsupportedRouterError(f"vLLM routes this model with {kind}; known are {', '.join(KNOWN)}")
    obstacles = {
        "custom_routing_function": "a custom routing function, whose scores are unknown",
        "_hash_indices_table": "experts chosen by token ids (hash routing)",
        "bias_vl": "a second selection bias for images",
        "num_fused_shared_experts": "shared experts fused into the routed ones",
        "zero_expert_type": "zero experts",
    }
    for name, part in obstacles.items():
        value = getattr(router, name, None)
        if value is not None and not (isinstance(value, int) and value == 0):
            raise UnsupportedRouterError(f"vLLM's {kind} of this model has {part}; moebudget cannot re-route it")
    scoring = router.scoring_func
    if scoring not in ("softmax", "sigmoid"):
        raise UnsupportedRouterError(f"vLLM's {kind} of this model scores by {scoring!r}; known: softmax, sigmoid")
    grouped = kind == "GroupedTopKRouter" or (kind == "CPURouter" and router.use_grouped_topk)
    n, groups, opened = experts, 1, 1
    if grouped and router.num_expert_group < n and n % router.num_expert_group == 0:
        groups, opened = int(router.num_expert_group), int(router.topk_group)
    scaled = grouped or kind == "FusedTopKBiasRouter"
    return RouterSpec(
        num_experts=n,
        top_k=int(router.top_k),
        scoring=scoring,
        renormalize=bool(router.renormalize),
        scale=float(router.routed_scaling_factor) if scaled else 1.0,
        groups=groups,
        open_groups=opened,
        group_score="max" if selection_bias(router) is None else "top2",
    )


def selection_bias(router: Any) -> Tensor | None:
    """[N] float32, added to the scores for the choice only; read on every call, because loading may replace it."""
    if type(router).__name__ == "CPURouter" and not router.use_grouped_topk:
        return None  # this router does not read the bias
    bias = getattr(router, "e_score_correction_bias", None)
    return bias.detach() if isinstance(bias, Tensor) else None
