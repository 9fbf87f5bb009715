"""The hook in vLLM's routers: when the operator re-routes a layer's rows, and when it leaves them alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moebudget.core.types import RowKind
from moebudget.engines.vllm import hook
from moebudget.engines.vllm.row_kinds import StepRows
from tests.conftest import HIDDEN
from tests.engines.vllm.fakes import CPURouter, make_layer


def test_operator_caps_eager_and_traced_layers_without_the_padding_of_hidden() -> None:
    step_rows = StepRows(8, "cpu")
    layer = make_layer(step_rows)
    hidden, logits = torch.randn(8, 32), torch.randn(8, 16)
    hidden[:, HIDDEN:] = 0
    router = layer.router
    assert type(router).__name__ == "CPURouter"
    step_rows.kind.fill_(RowKind.DECODE)
    eager = router._compute_routing(hidden, logits, None)
    assert layer.calls == 1
    assert len(eager[1].unique()) == 2

    compiled = torch.compile(lambda h, x: router._compute_routing(h, x, None), backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden, logits)[1], eager[1])
    assert layer.calls == 2
    layer.route.set_budget(1)  # type: ignore[union-attr]
    assert len(compiled(hidden, logits)[1].unique()) == 1


def test_steps_of_prefill_alone_skip_the_policy_outside_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    step_rows = StepRows(8, "cpu")
    layer = make_layer(step_rows)
    route = layer.route
    monkeypatch.setattr(layer, "route", lambda *_: pytest.fail("the policy ran"))
    hidden, logits = torch.randn(8, 32), torch.randn(8, 16)
    step_rows.describe(["a"], np.array([8]), np.array([False]))
    weights, ids = layer.router._compute_routing(hidden, logits, None)
    native = CPURouter()._compute_routing(hidden, logits, None)
    assert torch.equal(weights, native[0])
    assert torch.equal(ids, native[1])
    monkeypatch.setattr(layer, "route", route)
    monkeypatch.setattr(hook, "_capturing", lambda device: True)  # noqa: ARG005, a graph must hold the policy
    step_rows.kind.fill_(RowKind.DECODE)
    assert len(layer.router._compute_routing(hidden, logits, None)[1].unique()) == 2


def test_layers_of_a_draft_model_are_left_alone() -> None:
    config = SimpleNamespace(hidden_dim=32, hidden_dim_unpadded=None, num_logical_experts=16)
    runner = SimpleNamespace(layer_name="draft.0.experts", layer_id=0, router=CPURouter(), moe_config=config)
    layer = hook.Layer(runner)  # collected, never activated
    weights, ids = layer.router._compute_routing(torch.randn(8, 32), torch.randn(8, 16), None)
    assert layer.calls == 0
    assert (weights.shape, ids.shape) == ((8, 4), (8, 4))


def test_rows_without_a_row_kind_are_refused() -> None:
    layer = make_layer(StepRows(4, "cpu"))
    with pytest.raises(RuntimeError, match="got 5 rows, but only 4 have a row kind"):
        layer.router._compute_routing(torch.randn(5, 32), torch.randn(5, 16), None)


def test_layer_of_a_stopped_engine_is_refused() -> None:
    router = make_layer(StepRows(8, "cpu"), "gone").router
    with pytest.raises(RuntimeError, match="no engine of this process has a layer 'gone'"):
        router._compute_routing(torch.randn(2, 32), torch.randn(2, 16), None)
