"""Checks of a loaded model: layers, kernels, statistics and slots, with fakes of vLLM's layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from moebudget.core.stats import ModelFacts, Stats, StatsError, hash_routers
from moebudget.engines.vllm.checks import check_layers, check_slots, model_facts, router_matrix
from moebudget.engines.vllm.compat import UnsupportedEngineError
from moebudget.engines.vllm.row_kinds import StepRows
from moebudget.methods.registry import parse
from tests.engines.vllm.fakes import make_layer


def test_models_without_layers_or_with_monolithic_kernels_are_refused() -> None:
    runner = SimpleNamespace()
    layer: Any = make_layer(StepRows(8, "cpu"))
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
def test_statistics_of_another_model_are_refused(changes: dict[str, Any], message: str) -> None:
    layer: Any = make_layer(StepRows(8, "cpu"))
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


def test_policy_with_more_slots_than_the_model_is_refused() -> None:
    check_slots(parse("oea:k0=1,k_max=4"), 4)
    with pytest.raises(ValueError, match="k_max=6 exceeds the 4 experts per token"):
        check_slots(parse("oea:k0=1,k_max=6"), 4)
