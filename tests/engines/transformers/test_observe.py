"""Observed routes: the expert outputs that calibration and the oracle rely on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from moebudget import attach
from moebudget.core.policy import Policy, Score
from moebudget.core.types import LayerStats, RouterBatch
from moebudget.engines.transformers.families import moe_layers
from moebudget.engines.transformers.observe import observe_routes
from moebudget.methods.base import TrueEnergy
from moebudget.methods.common import TopBudget
from moebudget.methods.fills import Backfill

from .tiny import (
    CASES,
    EXPERTS,
    IMPLEMENTATIONS,
    TOP_K,
    available,
    build,
    expert_alone,
    experts_modules,
    forward,
    generate,
    native_routes,
    passes,
    prompts,
    recorded,
    snapshot,
)

every_case = pytest.mark.parametrize("name", CASES)


@dataclass
class Seen:
    position: int
    hidden: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor
    outputs: Tensor


@torch.no_grad()
def observe(model: Any, words: Tensor, **more: Any) -> tuple[Tensor, list[Seen]]:
    seen: list[Seen] = []
    with observe_routes(model, lambda *args: seen.append(Seen(*args)), **more):
        return model(input_ids=words).logits, seen


def alone(experts: Any, hidden: Tensor, ids: Tensor) -> Tensor:
    """[T, K, d] by the arithmetic of `expert_alone`, expert by expert and token by token."""
    with torch.no_grad():
        return torch.stack(
            [torch.stack([expert_alone(experts, x, int(e)) for e in row]) for x, row in zip(hidden, ids, strict=True)]
        )


@every_case
@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
def test_outputs_equal_those_of_each_expert_alone(name, experts):
    model = build(available(name), experts=experts)
    words = prompts(3, 5)
    plain, _ = forward(model, words)
    logits, seen = observe(model, words)
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-5)
    assert [s.position for s in seen] == [0, 1]
    for module, s in zip(experts_modules(model), seen, strict=True):
        assert s.outputs.shape == (15, TOP_K, 32)
        assert s.outputs.abs().mean() > 0.05
        torch.testing.assert_close(s.outputs, alone(module, s.hidden, s.ids), rtol=1e-5, atol=1e-5)


@every_case
def test_outputs_equal_those_of_eager_experts(name):
    model = build(available(name))
    _, seen = observe(model, prompts(3, 5))
    for module, s in zip(experts_modules(model), seen, strict=True):
        for expert in range(EXPERTS):
            only = torch.full_like(s.ids[:, :1], expert)
            with torch.no_grad():
                out = module(s.hidden, only, torch.ones_like(s.weights[:, :1]))
            hit = s.ids == expert
            torch.testing.assert_close(s.outputs[hit], out[:, None].expand_as(s.outputs)[hit], rtol=1e-5, atol=1e-6)


@every_case
def test_the_observer_sees_the_native_routes(name):
    model = build(available(name))
    words = prompts(3, 5)
    with recorded(model) as calls:
        forward(model, words)
    _, seen = observe(model, words)
    for call, s, layer in zip(calls, seen, moe_layers(model), strict=True):
        torch.testing.assert_close(s.hidden, call.hidden, rtol=0, atol=1e-5)
        assert torch.equal(s.ids, call.ids)
        torch.testing.assert_close(s.weights, call.weights, rtol=1e-4, atol=1e-6)
        batch = layer.spec(s.hidden, s.logits, bias=layer.selection_bias)
        assert torch.equal(batch.ids.sort(-1).values, s.ids.sort(-1).values)


@every_case
def test_experts_run_once(name, monkeypatch):
    model = build(available(name))
    (kind,) = {type(module) for module in experts_modules(model)}
    rows: list[int] = []
    forward_of_class = kind.forward

    @functools.wraps(forward_of_class)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(args[0].shape[0])
        return forward_of_class(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", counted)
    observe(model, prompts(3, 5))
    assert rows == [15 * TOP_K] * 2


@every_case
def test_the_model_is_restored_after_observation(name):
    model = build(available(name))
    words = prompts(3, 5)
    plain, _ = forward(model, words)
    before = snapshot(model)
    observe(model, words)
    assert snapshot(model) == before

    def fail(*_args: object) -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), observe_routes(model, fail):
        forward(model, words)
    assert snapshot(model) == before
    assert torch.equal(forward(model, words)[0], plain)


def test_the_model_is_restored_after_a_failing_expert(monkeypatch):
    model = build(CASES["qwen3_moe"])
    before = snapshot(model)
    kind = type(experts_modules(model)[0])

    @functools.wraps(kind.forward)
    def broken(*_args: object) -> None:
        raise RuntimeError("broken expert")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", broken)
        with pytest.raises(RuntimeError, match="broken expert"):
            observe(model, prompts(1, 3))
    assert snapshot(model) == before


def test_a_range_of_layers_can_be_observed():
    model = build(CASES["qwen2_moe"])
    words = prompts(2, 4)
    _, all_layers = observe(model, words)
    logits, seen = observe(model, words, only=range(1, 2))
    assert [s.position for s in seen] == [1]
    torch.testing.assert_close(seen[0].outputs, all_layers[1].outputs, rtol=0, atol=1e-5)
    plain, nothing = observe(model, words, only=range(0))
    assert not nothing
    torch.testing.assert_close(logits, plain, rtol=0, atol=1e-5)


def test_an_existing_instance_forward_is_restored():
    model = build(CASES["qwen3_moe"])
    with recorded(model) as calls:
        observe(model, prompts(1, 3))
        assert not calls  # replaced during the observation
        forward(model, prompts(1, 3))
        assert len(calls) == 2


@dataclass(frozen=True)
class Spy(Score):
    """The oracle's score, which keeps its batches."""

    batches: list[RouterBatch] = field(default_factory=list)
    needs_energy: ClassVar[bool] = True

    def __call__(self, batch: RouterBatch, stats: LayerStats) -> Tensor:
        self.batches.append(batch)
        return TrueEnergy()(batch, stats)


@every_case
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_oracle_energies_are_squared_norms_of_outputs(name, experts):
    model = build(available(name), experts=experts)
    modules = experts_modules(model)
    spy = Spy()
    with recorded(model) as calls, attach(model, Policy(spy, TopBudget(3), Backfill())):
        generate(model, prompts(5, 4), 3)
    steps = [call for step in passes(model, calls)[1:] for call in step]
    assert len(spy.batches) == len(steps) == 4
    for call, batch in zip(steps, spy.batches, strict=True):
        ids, weights = native_routes(model, call.layer, call.hidden)
        expected = alone(modules[call.layer], call.hidden, ids).square().sum(-1)
        energy = torch.zeros(5, EXPERTS).scatter(-1, batch.ids[0], batch.energy[0])
        torch.testing.assert_close(energy.gather(-1, ids), expected, rtol=1e-4, atol=1e-6)
        cost = torch.zeros(EXPERTS).index_add(0, ids.flatten(), (weights.square() * expected).flatten())
        assert call.fetched() == frozenset(cost.topk(3).indices.tolist())


def test_only_the_oracle_computes_energies():
    model = build(CASES["qwen3_moe"])
    counts = []
    for policy in ("squared:budget=3", "oracle:budget=3"):
        with recorded(model) as calls, attach(model, policy):
            generate(model, prompts(5, 4), 3)
        counts.append(len(calls))
    assert counts == [6, 6 + 4]  # 3 passes of 2 layers; one more call per layer and decode step
