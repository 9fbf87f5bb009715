"""The Engine without vLLM: collecting layers, binding, dummy runs, several engines, and changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from moebudget.engines.config import Settings, read_settings
from moebudget.engines.vllm.compat import UnsupportedEngineError
from moebudget.engines.vllm.engine import Engine
from moebudget.engines.vllm.router_spec import UnsupportedRouterError
from moebudget.engines.vllm.row_kinds import StepRows
from tests.engines.vllm.fakes import make_layer


def make_settings() -> Settings:
    settings = read_settings({"moebudget": {"policy": "squared:budget=2"}})
    assert settings is not None
    return settings


def make_engine(layer: Any) -> Engine:
    engine = Engine(make_settings(), "f")
    engine.layers, engine.step_rows, engine.budgets = [layer], layer.step_rows, (2,)
    Engine.newest = engine
    return engine


def test_unreadable_router_is_refused_unless_it_is_a_draft_models() -> None:
    runner: Any = nn.Identity()
    runner.layer_name, runner.layer_id, runner.router = "x", 0, SimpleNamespace()
    runner.moe_config = SimpleNamespace(hidden_dim=6, hidden_dim_unpadded=None, num_logical_experts=16)
    with pytest.raises(UnsupportedRouterError, match="routes this model with SimpleNamespace"):
        Engine(make_settings(), "f").collect(runner)
    engine = Engine(make_settings(), "f", drafts=True)
    engine.collect(runner)
    with pytest.raises(UnsupportedRouterError, match="routes this model with SimpleNamespace"):
        engine.bind(SimpleNamespace(get_model=lambda: nn.Sequential(runner)))
    with pytest.raises(UnsupportedEngineError, match="0 layers"):  # a draft model's layer is left alone
        engine.bind(SimpleNamespace(get_model=lambda: nn.Sequential()))


def test_model_that_bypasses_its_router_is_refused_after_a_dummy_run() -> None:
    layer = make_layer(StepRows(8, "cpu"))
    engine = make_engine(layer)
    with pytest.raises(RuntimeError, match=r"1 of 1 layers did not call their router"):
        engine.after_dummy_run()
    layer.calls = 1
    engine.after_dummy_run()


def test_engine_stops_when_a_newer_one_takes_its_layers() -> None:
    engine = make_engine(make_layer(StepRows(8, "cpu")))
    assert engine.before_step() is engine.step_rows
    make_engine(make_layer(StepRows(8, "cpu")))
    with pytest.raises(RuntimeError, match="run one engine per process"):
        engine.before_step()


def test_wrong_change_changes_nothing_and_a_right_one_all_of_it() -> None:
    engine = make_engine(make_layer(StepRows(8, "cpu")))
    with pytest.raises(ValueError, match="2 budgets were given and the model has 1"):
        engine.change([1, 2], enabled=False)
    assert engine.step_rows is not None
    assert engine.step_rows.enabled
    engine.change(7, enabled=False)
    state = engine.state()
    assert (state["budgets"], state["enabled"], state["experts"]) == ([7], False, 16)
