"""Canary at start-up: a proof on made-up rows that capping a layer really caps it."""

from __future__ import annotations

import torch
from torch import Tensor

from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.core.types import Routing, RowKind
from moebudget.engines.vllm.compat import UnsupportedEngineError
from moebudget.engines.vllm.hook import Layer
from moebudget.engines.vllm.router_spec import selection_bias
from moebudget.engines.vllm.row_kinds import StepRows
from moebudget.methods.base import DeviceBudget
from moebudget.methods.common import TopBudget
from moebudget.methods.spread import LayerBudget

CANARY_ROWS = 16
TOLERANCE = 0.02  # relative to the row's largest weight; vLLM may compute weights in bf16


def canary(layer: Layer, step_rows: StepRows, policy: Policy, dtype: torch.dtype) -> None:
    """Route made-up rows through vLLM's router three times: without the hook, with native rows, with decode rows.

    The first must agree with RouterSpec, the second with the first, and the third must fetch fewer experts. Raises
    RuntimeError or UnsupportedEngineError that names the layer otherwise. Changes the budget and the counters.
    """
    hidden, logits = _probe(layer, step_rows.wide, dtype)  # a wider step is a prompt, in which few rows vote
    kind = step_rows.kind[: len(logits)]

    def routed() -> tuple[Tensor, Tensor]:
        weights, ids = layer.router._compute_routing(hidden, logits, None)
        return weights, ids.long()

    with torch.inference_mode():
        step_rows.reset()
        layer.router.moebudget_layer = None
        native_weights, native_ids = routed()
        layer.router.moebudget_layer = layer.name
        _check_spec(layer, hidden, logits, Routing(native_ids, native_weights))
        weights, ids = routed()
        if not (torch.equal(weights, native_weights) and torch.equal(ids, native_ids)):
            raise RuntimeError(f"{layer.name}: {layer.route} changed rows that keep the native routes")
        assert layer.route is not None
        if policy.budget is not None:
            layer.route.set_budget(1)
        kind.fill_(RowKind.DECODE)
        calls = layer.calls
        weights, ids = routed()
        kind.fill_(RowKind.NATIVE)
    fetched, native = (set(i[w != 0].tolist()) for i, w in ((ids, weights), (native_ids, native_weights)))
    most = layer.spec.num_experts
    if isinstance(policy.select, TopBudget):
        most = 1
    elif isinstance(policy.select, LayerBudget | DeviceBudget):  # an average of 1 over the layers, or 1 per device
        most = len(native) - 1
    if layer.calls == calls or not 1 <= len(fetched) <= most:
        raise RuntimeError(
            f"{layer.name}: restricting the layer did not change its routing ({len(fetched)} experts fetched, "
            f"{len(native)} by native routing), so no budget would hold"
        )


def _probe(layer: Layer, most: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """hidden [T, d] and logits [T, N]; the logits of a row differ from each other in bf16, too."""
    assert layer.step_rows is not None
    device, n = layer.step_rows.kind.device, layer.spec.num_experts
    generator = torch.Generator().manual_seed(0)
    rows = min(CANARY_ROWS, most)
    order = torch.stack([torch.randperm(n, generator=generator) for _ in range(rows)])
    step = 2.0 ** -max(0, (n // 8).bit_length() - 1)
    logits = ((order - n // 2) * step).to(layer.runner.moe_config.router_logits_dtype or dtype)
    hidden = torch.randn(rows, layer.hidden, generator=generator).to(dtype)
    return hidden.to(device), logits.to(device)


def _check_spec(layer: Layer, hidden: Tensor, logits: Tensor, native: Routing) -> None:
    """Raise UnsupportedEngineError unless RouterSpec gives vLLM's weights; one row may differ by a tie."""
    spec: RouterSpec = layer.spec
    batch = spec(hidden, logits, bias=selection_bias(layer.router))
    ours, theirs = (
        torch.zeros_like(batch.probs).scatter_add(-1, r.ids.clamp_min(0), r.weights.float())
        for r in (Routing(batch.ids, batch.weights), native)
    )
    largest = theirs.amax(-1, keepdim=True)
    wrong = ((ours - theirs).abs() > TOLERANCE * largest).any(-1).sum()
    if int(wrong) > 1:
        raise UnsupportedEngineError(
            f"{layer.name}: vLLM's {type(layer.router).__name__} gives other weights than {spec} in {int(wrong)} of "
            f"{len(logits)} rows; moebudget cannot reproduce this router"
        )
