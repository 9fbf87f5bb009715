"""Start-up that fails closed: versions, layouts, kernels, statistics and the canary, with stand-ins for vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from moebudget.integrations.vllm.board import Board
from moebudget.integrations.vllm.checks import canary, check_layers, model_facts, router_matrix
from moebudget.integrations.vllm.engine import Engine
from moebudget.integrations.vllm.layout import UnsupportedEngineError, check_layout, check_version
from moebudget.integrations.vllm.route import Step, make_router
from moebudget.integrations.vllm.spec import UnsupportedRouterError
from moebudget.presets import parse
from moebudget.settings import read_settings
from moebudget.stats import ModelFacts, Stats, StatsError, hash_routers
from moebudget.types import LayerStats
from tests.conftest import make_problem
from tests.integrations.vllm.test_route import CPURouter, make_layer

ALONE = {
    "data_parallel_size": 1, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1,
    "use_sequence_parallel_moe": False, "use_ubatching": False, "enable_eplb": False, "enable_elastic_ep": False,
    "enable_expert_parallel": False, "expert_placement_strategy": "linear",
}  # fmt: skip


def layout(**changes: Any) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**ALONE, **changes}))


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.32.0+cpu", "0.33.1rc2.dev3"])
def test_tested_version_is_refused(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0", "dev"])
def test_untested_version_starts(version: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=rf"tested with vLLM 0\.26 to 0\.33, this is {version}"):
        check_version(version)


def test_covered_layout_is_refused() -> None:
    check_layout(layout(), batch_invariant=False)
    check_layout(layout(enable_expert_parallel=True), batch_invariant=False)
    check_layout(layout(expert_placement_strategy="round_robin"), batch_invariant=False)  # without expert parallel
    check_layout(layout(enable_expert_parallel=True, enable_eplb=True), batch_invariant=False)
    check_layout(layout(enable_expert_parallel=True), batch_invariant=False, by_device=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2: every rank would choose its own"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"use_sequence_parallel_moe": True}, "sequence-parallel experts: a rank sees a part"),
        ({"use_ubatching": True}, "micro-batch overlap"),
        ({"enable_elastic_ep": True}, "enable_elastic_ep"),
        ({"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"}, "'round_robin'"),
    ],
)
def test_layout_without_cover_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=message):
        check_layout(layout(**changes), batch_invariant=False)


def test_moving_experts_are_chosen_by_their_device() -> None:
    with pytest.raises(
        UnsupportedEngineError, match="enable_eplb under a policy that looks at the devices of experts"
    ):
        check_layout(layout(enable_eplb=True), batch_invariant=False, by_device=True)


def test_batch_invariant_mode_starts() -> None:
    with pytest.raises(UnsupportedEngineError, match="VLLM_BATCH_INVARIANT=1: a token's experts depend on its batch"):
        check_layout(layout(), batch_invariant=True)


def test_model_without_layers_or_with_monolithic_kernels_starts() -> None:
    runner = SimpleNamespace()
    layer: Any = make_layer(Board(8, "cpu"))
    layer.runner.is_monolithic = False
    check_layers(runner, [layer])
    with pytest.raises(UnsupportedEngineError, match="0 layers of this model"):
        check_layers(runner, [])
    with pytest.raises(UnsupportedEngineError, match="adaptive verification"):
        check_layers(SimpleNamespace(adaptive_verification=1), [layer])
    layer.runner.is_monolithic, layer.runner.routed_experts = True, SimpleNamespace(quant_method=runner)
    with pytest.raises(UnsupportedEngineError, match=r"layers\.1\.mlp\.experts runs a monolithic kernel"):
        check_layers(runner, [layer])


class Block(nn.Module):
    """A router matrix beside the experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 16, bias=False), experts


def facts(**changes: Any) -> ModelFacts:
    return ModelFacts(
        **{"family": "f", "layers": (1,), "experts": 16, "top_k": 4, "hidden": 6, "router_hash": "", **changes}
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "g"}, "family is 'g' in the statistics .* and 'f' in the model"),
        ({"layers": (0, 1)}, r"layers is \(0, 1\) in the statistics .* and \(1,\)"),
        ({"experts": 32}, "experts is 32 in the statistics .* and 16"),
        ({"hidden": 8}, "hidden is 8 in the statistics .* and 6"),
        ({"router_hash": "of a fine-tune"}, "router weights is 'of a fine-tune'"),
    ],
)
def test_statistics_of_another_model_are_used(changes: dict[str, Any], message: str) -> None:
    layer: Any = make_layer(Board(8, "cpu"))
    layer.runner = nn.Identity()
    model = nn.Sequential(Block(layer.runner))
    matrix = router_matrix(model, layer)
    assert matrix is model[0].gate.weight
    right = facts(router_hash=hash_routers([matrix, matrix]))
    Stats(right, {}).check(model_facts([layer], model, "f"))
    random = Stats(facts(router_hash="of other random numbers"), {})
    random.check(model_facts([layer], model, "f", trained=False))
    with pytest.raises(StatsError, match=message):
        Stats(facts(**changes), {}).check(model_facts([layer], model, "f"))


def probed(layer: Any) -> Any:
    layer.runner.moe_config.router_logits_dtype = None
    return layer


@pytest.mark.parametrize("text", ["squared:budget=2", "oea:k0=1", "dense"])
def test_canary_dies_of_a_sound_layer(text: str) -> None:
    board = Board(32, "cpu")
    canary(probed(make_layer(board)), board, parse(text), torch.bfloat16)
    assert board.rows.unique().tolist() == [2]


def test_canary_dies_of_a_layer_with_more_than_its_average() -> None:
    board, policy = Board(32, "cpu"), parse("spread:budget=4")
    layer, table = probed(make_layer(board)), torch.full((16,), 3)
    stats = LayerStats({**make_problem("softmax", 1, 16, 4).stats, "layer_budget": table})

    def route() -> None:
        made = make_router(policy, layer.spec, stats, hidden=6, max_rows=32, device=torch.device("cpu"))
        layer.activate(made, board)
        canary(layer, board, policy, torch.float32)

    route()
    table.fill_(16)  # an allocation that leaves nothing out at any average
    with pytest.raises(RuntimeError, match="restricting the layer did not change its routing"):
        route()


def test_canary_dies_where_no_step_has_as_many_rows() -> None:
    board = Board(32, "cpu", wide=6)
    layer = probed(make_layer(board))
    whole: Any = layer.route

    class Narrow:
        """As the kernels: of more rows than buffers exist for, those that vote alone, by the board's own index."""

        path, totals = whole.path, whole.totals
        set_budget = whole.set_budget

        def __call__(self, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
            return whole(step) if len(step.ids) <= 6 else (step.ids.clone(), step.weights.clone())

    layer.activate(Narrow(), board)
    canary(layer, board, parse("squared:budget=2"), torch.bfloat16)


def test_canary_survives_a_router_that_is_bypassed(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(32, "cpu")
    layer = probed(make_layer(board))
    monkeypatch.setattr(type(layer.router), "_compute_routing", CPURouter._compute_routing)
    with pytest.raises(RuntimeError, match="restricting the layer did not change its routing"):
        canary(layer, board, parse("squared:budget=2"), torch.float32)


def test_canary_survives_a_router_that_is_misread() -> None:
    board = Board(32, "cpu")
    layer = probed(make_layer(board))
    layer.router.renormalize = False  # the layer was read while it was True
    with pytest.raises(UnsupportedEngineError, match="gives other weights than RouterSpec"):
        canary(layer, board, parse("squared:budget=2"), torch.float32)


def test_canary_survives_prefill_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(32, "cpu")
    layer = probed(make_layer(board))
    route: Any = layer.route

    class Eager:
        path, totals = "", route.totals

        def __call__(self, step: Step) -> Any:
            return route(step._replace(rows=torch.ones_like(step.rows)))

    monkeypatch.setattr(layer, "route", Eager())
    with pytest.raises(RuntimeError, match="rows that keep the model's routes were changed"):
        canary(layer, board, parse("squared:budget=2"), torch.float32)


def make_engine(layer: Any) -> Engine:
    settings = read_settings({"moebudget": {"policy": "squared:budget=2"}})
    assert settings is not None
    engine = Engine(settings, "f")
    engine.layers, engine.board, engine.budgets = [layer], layer.board, (2,)
    Engine.newest = engine
    return engine


def test_unreadable_router_serves_or_a_drafts_is_refused() -> None:
    settings = read_settings({"moebudget": {"policy": "squared:budget=2"}})
    assert settings is not None
    runner: Any = nn.Identity()
    runner.layer_name, runner.layer_id, runner.router = "x", 0, SimpleNamespace()
    runner.moe_config = SimpleNamespace(hidden_dim=6, hidden_dim_unpadded=None, num_logical_experts=16)
    with pytest.raises(UnsupportedRouterError, match="routes this model with SimpleNamespace"):
        Engine(settings, "f").collect(runner)
    engine = Engine(settings, "f", drafts=True)
    engine.collect(runner)
    with pytest.raises(UnsupportedRouterError, match="routes this model with SimpleNamespace"):
        engine.bind(SimpleNamespace(get_model=lambda: nn.Sequential(runner)))
    with pytest.raises(UnsupportedEngineError, match="0 layers"):  # it was not this model's
        engine.bind(SimpleNamespace(get_model=lambda: nn.Sequential()))


def test_model_that_bypasses_its_router_serves() -> None:
    layer = make_layer(Board(8, "cpu"))
    engine = make_engine(layer)
    with pytest.raises(RuntimeError, match=r"1 of 1 layers did not call their router"):
        engine.after_dummy_run()
    layer.calls = 1
    engine.after_dummy_run()


def test_second_engine_of_a_process_shares_layers_silently() -> None:
    engine = make_engine(make_layer(Board(8, "cpu")))
    assert engine.before_step() is engine.board
    make_engine(make_layer(Board(8, "cpu")))
    with pytest.raises(RuntimeError, match="run one engine a process"):
        engine.before_step()


def test_wrong_change_is_half_made() -> None:
    engine = make_engine(make_layer(Board(8, "cpu")))
    with pytest.raises(ValueError, match="2 budgets were given and the model has 1"):
        engine.change([1, 2], enabled=False)
    assert engine.board is not None
    assert engine.board.enabled
    engine.change(7, enabled=False)
    state = engine.state()
    assert (state["budgets"], state["enabled"], state["experts"]) == ([7], False, 16)
