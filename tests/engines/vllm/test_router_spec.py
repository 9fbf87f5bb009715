"""RouterSpec of vLLM's routers: supported kinds are read, all others are refused with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moebudget.core.router import RouterSpec
from moebudget.engines.vllm.router_spec import UnsupportedRouterError, router_spec, selection_bias

BIAS = torch.zeros(16)


def make_router(kind: str, **more: Any) -> Any:
    """An object with the class name and the attributes of one of vLLM's routers."""
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
        (make_router("FusedTopKRouter"), RouterSpec(16, 4)),
        (make_router("FusedTopKRouter", renormalize=False), RouterSpec(16, 4, renormalize=False)),
        (make_router("FusedTopKBiasRouter", **SIGMOID), RouterSpec(16, 4, "sigmoid", True, 2.5, group_score="top2")),
        (make_router("GroupedTopKRouter"), RouterSpec(16, 4, "softmax", True, 2.5, 4, 2, "max")),
        (make_router("GroupedTopKRouter", **SIGMOID), RouterSpec(16, 4, "sigmoid", True, 2.5, 4, 2, "top2")),
        (make_router("GroupedTopKRouter", num_expert_group=16), RouterSpec(16, 4, "softmax", True, 2.5)),
        (make_router("GroupedTopKRouter", num_expert_group=3), RouterSpec(16, 4, "softmax", True, 2.5)),
        (make_router("CPURouter"), RouterSpec(16, 4)),
        (make_router("CPURouter", use_grouped_topk=True), RouterSpec(16, 4, "softmax", True, 2.5, 4, 2, "max")),
    ],
)
def test_router_is_read(router: Any, spec: RouterSpec) -> None:
    assert router_spec(router, 16) == spec


def test_bias_that_the_router_ignores_is_left_out() -> None:
    assert selection_bias(make_router("CPURouter", e_score_correction_bias=BIAS)) is None
    assert selection_bias(make_router("CPURouter", e_score_correction_bias=BIAS, use_grouped_topk=True)) is not None
    assert selection_bias(make_router("FusedTopKRouter")) is None


@pytest.mark.parametrize(
    ("router", "message"),
    [
        (make_router("CustomRoutingRouter"), "routes this model with CustomRoutingRouter; known are"),
        (make_router("ZeroExpertRouter"), "ZeroExpertRouter"),
        (make_router("CPURouter", custom_routing_function=print), "a custom routing function"),
        (make_router("FusedTopKBiasRouter", _hash_indices_table=BIAS), "hash routing"),
        (make_router("FusedTopKBiasRouter", num_fused_shared_experts=1), "shared experts fused"),
        (make_router("FusedTopKBiasRouter", bias_vl=BIAS), "a second selection bias"),
        (make_router("FusedTopKBiasRouter", scoring_func="sqrtsoftplus"), "scores by 'sqrtsoftplus'"),
    ],
)
def test_unknown_router_is_refused(router: Any, message: str) -> None:
    with pytest.raises(UnsupportedRouterError, match=message):
        router_spec(router, 16)
