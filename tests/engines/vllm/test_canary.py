"""The canary passes sound layers and stops layers that are not capped as they must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moebudget.core.types import LayerStats, RowKind
from moebudget.engines.vllm.canary import canary
from moebudget.engines.vllm.compat import UnsupportedEngineError
from moebudget.engines.vllm.route import Step, make_router
from moebudget.engines.vllm.row_kinds import StepRows
from moebudget.methods.registry import parse
from tests.conftest import make_problem
from tests.engines.vllm.fakes import CPU, CPURouter, make_layer


@pytest.mark.parametrize("text", ["squared:budget=2", "oea:k0=1", "native"])
def test_sound_layer_passes_and_its_rows_keep_native_routes(text: str) -> None:
    step_rows = StepRows(32, "cpu")
    canary(make_layer(step_rows), step_rows, parse(text), torch.bfloat16)
    assert step_rows.kind.unique().tolist() == [RowKind.NATIVE]


def test_layer_with_more_than_the_average_budget_passes_until_it_leaves_nothing_out() -> None:
    step_rows, policy = StepRows(32, "cpu"), parse("spread:budget=4")
    layer, table = make_layer(step_rows), torch.full((16,), 3)
    stats = LayerStats({**make_problem("softmax", 1, 16, 4).stats, "layer_budget": table})

    def check() -> None:
        route = make_router(policy, layer.spec, stats, hidden=6, max_rows=32, device=CPU)
        layer.activate(route, step_rows)
        canary(layer, step_rows, policy, torch.float32)

    check()
    table.fill_(16)  # an allocation that leaves nothing out at any average
    with pytest.raises(RuntimeError, match="restricting the layer did not change its routing"):
        check()


def test_canary_uses_no_more_rows_than_a_captured_step_has() -> None:
    step_rows = StepRows(32, "cpu", wide=6)
    layer = make_layer(step_rows)
    route: Any = layer.route

    class NarrowRouter:
        """A router like the kernels' with buffers for six rows: in a wider step, it re-routes `voting` alone."""

        path, totals = route.path, route.totals
        set_budget = route.set_budget

        def __call__(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
            return route(step) if len(step.ids) <= 6 else (step.ids.clone(), step.weights.clone())

    layer.activate(NarrowRouter(), step_rows)
    canary(layer, step_rows, parse("squared:budget=2"), torch.bfloat16)


def test_bypassed_router_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step_rows = StepRows(32, "cpu")
    layer = make_layer(step_rows)
    monkeypatch.setattr(type(layer.router), "_compute_routing", CPURouter._compute_routing)
    with pytest.raises(RuntimeError, match="restricting the layer did not change its routing"):
        canary(layer, step_rows, parse("squared:budget=2"), torch.float32)


def test_router_that_disagrees_with_its_spec_is_noticed() -> None:
    step_rows = StepRows(32, "cpu")
    layer = make_layer(step_rows)
    layer.router.renormalize = False  # the spec was read while it was True
    with pytest.raises(UnsupportedEngineError, match="gives other weights than RouterSpec"):
        canary(layer, step_rows, parse("squared:budget=2"), torch.float32)


def test_changed_native_rows_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    step_rows = StepRows(32, "cpu")
    layer = make_layer(step_rows)
    route: Any = layer.route

    class EagerRouter:
        """A router that takes every row for a decode row."""

        path, totals = "", route.totals

        def __call__(self, step: Step) -> Any:
            return route(step._replace(kind=torch.full_like(step.kind, RowKind.DECODE)))

    monkeypatch.setattr(layer, "route", EagerRouter())
    with pytest.raises(RuntimeError, match="changed rows that keep the native routes"):
        canary(layer, step_rows, parse("squared:budget=2"), torch.float32)
