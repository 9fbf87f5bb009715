"""Checks of a loaded model before it serves: its layers, its statistics and its slots per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.core.policy import Policy
from moebudget.core.stats import ModelFacts, StatsError, hash_routers
from moebudget.engines.vllm.compat import UnsupportedEngineError
from moebudget.engines.vllm.hook import Layer
from moebudget.methods.fills import Backfill


def check_slots(policy: Policy, top_k: int) -> None:
    """Raise ValueError for a policy that runs more experts per token than the model: vLLM's tensors have K slots."""
    if isinstance(policy.fill, Backfill) and policy.fill.k_max is not None and policy.fill.k_max > top_k:
        raise ValueError(
            f"policy {policy.name!r}: k_max={policy.fill.k_max} exceeds the {top_k} experts per token that the model "
            "runs, and vLLM has no slots for more; lower k_max"
        )


def check_layers(model_runner: Any, layers: Sequence[Layer]) -> None:
    """Raise UnsupportedEngineError if there is no layer to cap, a kernel is monolithic or row kinds are unknown."""
    if not layers:
        raise UnsupportedEngineError(
            "0 layers of this model go through vLLM's Mixture-of-Experts runner, so there is nothing to cap: the "
            'model has no experts, or routes by itself; remove "moebudget" from --additional-config'
        )
    monolithic = [layer for layer in layers if layer.runner.is_monolithic]
    if monolithic:
        method = monolithic[0].runner.routed_experts.quant_method
        raise UnsupportedEngineError(
            f"{monolithic[0].name} runs a monolithic kernel ({type(method).__name__}), which routes inside and never "
            "calls the router; choose another with --moe-backend (triton, cutlass, marlin, ...)"
        )
    if getattr(model_runner, "adaptive_verification", None) is not None:
        raise UnsupportedEngineError(
            "adaptive verification assigns draft tokens to requests on the device, so row kinds are not known before "
            "a step; use speculative decoding without it"
        )


def model_facts(layers: Sequence[Layer], model: nn.Module, family: str, *, trained: bool = True) -> ModelFacts:
    """The facts that statistics must agree with. StatsError if the layers differ, as those of statistics never do.

    Router matrices are compared if they are `trained` (vLLM's load format "dummy" makes random ones).
    """
    first = layers[0]
    shapes = {(layer.spec.num_experts, layer.spec.top_k, layer.hidden) for layer in layers}
    if len(shapes) > 1:
        raise StatsError(
            f"the model's layers differ in (experts, routes, hidden): {sorted(shapes)}; statistics have one shape for "
            "all layers"
        )
    matrices = [router_matrix(model, layer) for layer in (first, layers[-1])]
    hashable = [m for m in matrices if m is not None and m.dtype in (torch.bfloat16, torch.float32)]
    digest = hash_routers(hashable) if trained and len(hashable) == len(matrices) else ""
    indices = tuple(layer.index for layer in layers)
    return ModelFacts(family, indices, first.spec.num_experts, first.spec.top_k, first.hidden, digest)


def router_matrix(model: nn.Module, layer: Layer) -> Tensor | None:
    """[N, d], the matrix that makes the layer's logits; None if it is not a plain matrix beside the experts."""
    shape = (layer.spec.num_experts, layer.hidden)
    holders = [m for m in model.modules() if any(child is layer.runner for child in m.children())]
    for holder in (layer.runner, *holders):
        for name in ("gate", "router"):
            weight = getattr(getattr(holder, name, None), "weight", None)
            if isinstance(weight, Tensor) and tuple(weight.shape) == shape:
                return weight
    return None


def fetched_bytes(layer: Layer) -> int:
    """Bytes of one expert's weights on this rank."""
    tensors = (*layer.runner.routed_experts.parameters(), *layer.runner.routed_experts.buffers())
    total: int = sum(t.numel() * t.element_size() for t in tensors)
    return total // int(layer.runner.moe_config.num_local_experts)
