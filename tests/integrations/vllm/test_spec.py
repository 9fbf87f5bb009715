"""vLLM's routers by their attributes: every supported kind is read, every other refused by what it does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moebudget.integrations.vllm.spec import UnsupportedRouterError, router_spec, selection_bias
from moebudget.router import RouterSpec

BIAS = torch.zeros(16)


def made(kind: str, **more: Any) -> Any:
    """An object of a class named like one of vLLM's, with that class's attributes."""
    common = {"top_k": 4, "global_num_experts": 16, "renormalize": True, "scoring_func": "softmax"}
    scaled = {"routed_scaling_factor": 2.5, "e_score_correction_bias": None, "num_fused_shared_experts": 0}
    grouped = {"num_expert_group": 4, "topk_group": 2}
    fields = {
        "FusedTopKRouter": {},
        "FusedTopKBiasRouter": {**scaled, "_hash_indices_table": None, "bias_vl": None},
        "GroupedTopKRouter": {**scaled, **grouped},
        "CPURouter": {
            **scaled, **grouped, "use_grouped_topk": False, "custom_routing_function": None,
            "_hash_indices_table": None,
        },
    }.get(kind, {})  # fmt: skip
    router = type(kind, (), {})()
    vars(router).update({**common, **fields, **more})
    return router


SIGMOID = {"scoring_func": "sigmoid", "e_score_correction_bias": BIAS}


@pytest.mark.parametrize(
    ("router", "spec"),
    [
        (made("FusedTopKRouter"), RouterSpec(16, 4)),
        (made("FusedTopKRouter", renormalize=False), RouterSpec(16, 4, renormalize=False)),
        (made("FusedTopKBiasRouter", **SIGMOID), RouterSpec(16, 4, "sigmoid", True, 2.5, group_score="top2")),
        (made("GroupedTopKRouter"), RouterSpec(16, 4, "softmax", True, 2.5, 4, 2, "max")),
        (made("GroupedTopKRouter", **SIGMOID), RouterSpec(16, 4, "sigmoid", True, 2.5, 4, 2, "top2")),
        (made("GroupedTopKRouter", num_expert_group=16), RouterSpec(16, 4, "softmax", True, 2.5)),
        (made("GroupedTopKRouter", num_expert_group=3), RouterSpec(16, 4, "softmax", True, 2.5)),
        (made("CPURouter"), RouterSpec(16, 4)),
        (made("CPURouter", use_grouped_topk=True), RouterSpec(16, 4, "softmax", True, 2.5, 4, 2, "max")),
    ],
)
def test_router_is_misread(router: Any, spec: RouterSpec) -> None:
    assert router_spec(router, 16) == spec


def test_bias_that_the_router_ignores_is_used() -> None:
    assert selection_bias(made("CPURouter", e_score_correction_bias=BIAS)) is None
    assert selection_bias(made("CPURouter", e_score_correction_bias=BIAS, use_grouped_topk=True)) is not None
    assert selection_bias(made("FusedTopKRouter")) is None


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (made("CustomRoutingRouter"), "routes this model with CustomRoutingRouter; known are"),
        (made("ZeroExpertRouter"), "ZeroExpertRouter"),
        (made("CPURouter", custom_routing_function=print), "a custom routing function"),
        (made("FusedTopKBiasRouter", _hash_indices_table=BIAS), "hash routing"),
        (made("FusedTopKBiasRouter", num_fused_shared_experts=1), "shared experts fused"),
        (made("FusedTopKBiasRouter", bias_vl=BIAS), "a second selection bias"),
        (made("FusedTopKBiasRouter", scoring_func="sqrtsoftplus"), "scores by 'sqrtsoftplus'"),
    ],
)
def test_router_without_a_reading_is_capped(router: Any, message: str) -> None:
    with pytest.raises(UnsupportedRouterError, match=message):
        router_spec(router, 16)
