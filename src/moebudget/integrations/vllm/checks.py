"""What is proved after loading and before serving: layers, statistics, and by a canary that capping really caps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.device_selects import DeviceBudget
from moebudget.integrations.vllm.board import KEEPS, VOTES, Board
from moebudget.integrations.vllm.hook import Layer
from moebudget.integrations.vllm.layout import UnsupportedEngineError
from moebudget.integrations.vllm.spec import selection_bias
from moebudget.policy import Policy
from moebudget.router import RouterSpec
from moebudget.select import LayerBudget, TopBudget
from moebudget.stats import ModelFacts, StatsError, hash_routers
from moebudget.types import Routing

CANARY_ROWS = 16
TOLERANCE = 0.02  # relative to the row's largest weight; vLLM may weigh in bf16


def check_layers(model_runner: Any, layers: Sequence[Layer]) -> None:
    """Raise UnsupportedEngineError for a model without capped layers, with monolithic kernels or unclear rows."""
    if not layers:
        raise UnsupportedEngineError(
            "0 layers of this model go through vLLM's Mixture-of-Experts runner, so there is nothing to cap: it has "
            'no experts, or routes by itself; remove "moebudget" from --additional-config'
        )
    whole = [layer for layer in layers if layer.runner.is_monolithic]
    if whole:
        method = whole[0].runner.routed_experts.quant_method
        raise UnsupportedEngineError(
            f"{whole[0].name} runs a monolithic kernel ({type(method).__name__}), which routes inside and never asks "
            "the router; choose another with --moe-backend (triton, cutlass, marlin, ...)"
        )
    if getattr(model_runner, "adaptive_verification", None) is not None:
        raise UnsupportedEngineError(
            "adaptive verification deals out draft tokens on the device, so rows cannot be told apart beforehand; use "
            "speculative decoding without it"
        )


def model_facts(layers: Sequence[Layer], model: nn.Module, family: str, *, trained: bool = True) -> ModelFacts:
    """What statistics must agree on. StatsError if the layers differ, which statistics cannot.

    Router matrices are compared if they are `trained` (vLLM's load format "dummy" makes random ones).
    """
    first = layers[0]
    shapes = {(layer.spec.num_experts, layer.spec.top_k, layer.hidden) for layer in layers}
    if len(shapes) > 1:
        raise StatsError(
            f"the model's layers differ in (experts, routes, hidden): {sorted(shapes)}; statistics do not"
        )
    matrices = [router_matrix(model, layer) for layer in (first, layers[-1])]
    known = [m for m in matrices if m is not None and m.dtype in (torch.bfloat16, torch.float32)]
    digest = hash_routers(known) if trained and len(known) == len(matrices) else ""
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
    """Bytes that one expert's weights take on this rank."""
    tensors = (*layer.runner.routed_experts.parameters(), *layer.runner.routed_experts.buffers())
    total: int = sum(t.numel() * t.element_size() for t in tensors)
    return total // int(layer.runner.moe_config.num_local_experts)


def canary(layer: Layer, board: Board, policy: Policy, dtype: torch.dtype) -> None:
    """Route made-up rows through vLLM's own router: untouched, as RouterSpec reads it, and restricted.

    Raises RuntimeError or UnsupportedEngineError that names the layer if one of the three is not as it must be. Leaves
    a changed budget and counters behind.
    """
    hidden, logits = _probe(layer, board.wide, dtype)  # more rows than wide are prompts, of which few vote
    rows = board.rows[: len(logits)]

    def routed() -> tuple[Tensor, Tensor]:
        weights, ids = layer.router._compute_routing(hidden, logits, None)
        return weights, ids.long()

    with torch.inference_mode():
        board.reset()
        layer.router.moebudget_layer = None
        own_weights, own_ids = routed()
        layer.router.moebudget_layer = layer.name
        _check_spec(layer, hidden, logits, Routing(own_ids, own_weights))
        weights, ids = routed()
        if not (torch.equal(weights, own_weights) and torch.equal(ids, own_ids)):
            raise RuntimeError(f"{layer.name}: rows that keep the model's routes were changed by {layer.route}")
        assert layer.route is not None
        if policy.budget is not None:
            layer.route.set_budget(1)
        rows.fill_(VOTES)
        calls = layer.calls
        weights, ids = routed()
        rows.fill_(KEEPS)
    used, native = (set(i[w != 0].tolist()) for i, w in ((ids, weights), (own_ids, own_weights)))
    most = layer.spec.num_experts
    if isinstance(policy.select, TopBudget):
        most = 1
    elif isinstance(
        policy.select, LayerBudget | DeviceBudget
    ):  # the layer's own number for an average of 1, 1 a device
        most = len(native) - 1
    if layer.calls == calls or not 1 <= len(used) <= most:
        raise RuntimeError(
            f"{layer.name}: restricting the layer did not change its routing ({len(used)} experts used, "
            f"{len(native)} without), so no budget would hold"
        )


def _probe(layer: Layer, most: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """hidden [T, d] and logits [T, N] whose values differ from each other in bf16, too."""
    device, n = _device(layer), layer.spec.num_experts
    generator = torch.Generator().manual_seed(0)
    rows = min(CANARY_ROWS, most)
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(rows)])
    step = 2.0 ** -max(0, (n // 8).bit_length() - 1)
    logits = ((order - n // 2) * step).to(layer.runner.moe_config.router_logits_dtype or dtype)
    hidden = torch.randn(rows, layer.hidden, generator=generator).to(dtype)
    return hidden.to(device), logits.to(device)


def _device(layer: Layer) -> torch.device:
    """Where the layer's routing runs."""
    assert layer.board is not None
    return layer.board.rows.device


def _check_spec(layer: Layer, hidden: Tensor, logits: Tensor, own: Routing) -> None:
    """Raise unless our reading of the router gives vLLM's weights; one row may differ by a tie."""
    spec: RouterSpec = layer.spec
    batch = spec(hidden, logits, bias=selection_bias(layer.router))
    ours, theirs = (
        torch.zeros_like(batch.probs).scatter_add(-1, r.ids.clamp_min(0), r.weights.float())
        for r in (Routing(batch.ids, batch.weights), own)
    )
    largest = theirs.amax(-1, keepdim=True)
    wrong = ((ours - theirs).abs() > TOLERANCE * largest).any(-1).sum()
    if int(wrong) > 1:
        raise UnsupportedEngineError(
            f"{layer.name}: vLLM's {type(layer.router).__name__} gives other weights than {spec} in {int(wrong)} of "
            f"{len(logits)} rows; this router is not understood"
        )
