"""Fakes of vLLM's router and of a layer under a policy, for tests without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moebudget.engines.vllm.hook import Layer
from moebudget.engines.vllm.route import make_router
from moebudget.engines.vllm.router_spec import router_spec
from moebudget.engines.vllm.row_kinds import StepRows
from moebudget.methods.registry import parse
from tests.conftest import HIDDEN, make_problem

CPU = torch.device("cpu")


class CPURouter:
    """A router of the name and attributes of vLLM's CPURouter."""

    def __init__(self, bias: Tensor | None = None, grouped: bool = True) -> None:
        self.top_k, self.global_num_experts, self.renormalize = 4, 16, True
        self.use_grouped_topk, self.num_expert_group, self.topk_group = grouped, 1, 1
        self.scoring_func, self.routed_scaling_factor = "softmax", 1.0
        self.e_score_correction_bias, self.custom_routing_function, self._hash_indices_table = bias, None, None

    def _compute_routing(self, hidden: Tensor, logits: Tensor, indices_type: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        batch = router_spec(self, 16)(hidden, logits)
        return batch.weights, batch.ids.int()


def make_layer(step_rows: StepRows, name: str = "model.layers.1.mlp.experts") -> Layer:
    """A layer of 16 experts with 4 routes per token under base:budget=2, which reads the hidden state."""
    config = SimpleNamespace(
        hidden_dim=32, hidden_dim_unpadded=HIDDEN, num_logical_experts=16, router_logits_dtype=None
    )
    layer = Layer(SimpleNamespace(layer_name=name, layer_id=1, router=CPURouter(), moe_config=config))
    policy, stats = parse("base:budget=2"), make_problem("softmax", 1, 16, 4).stats
    route = make_router(policy, layer.spec, stats, hidden=HIDDEN, max_rows=8, device=CPU)
    layer.activate(route, step_rows)
    return layer
