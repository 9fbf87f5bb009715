"""Errors and warnings of `attach`, each with the way out."""

from __future__ import annotations

import pytest
import torch

from moebudget import attach, presets
from moebudget.core.stats import ModelFacts, Stats, StatsError
from moebudget.core.types import MissingStatisticError
from moebudget.engines.transformers.attach import BypassedError
from moebudget.engines.transformers.families import model_facts, moe_layers

from .tiny import (
    CASES,
    EXPERTS,
    available,
    build,
    generate,
    native_routes,
    passes,
    prompts,
    recorded,
    snapshot,
    start,
)

every_case = pytest.mark.parametrize("name", CASES)


def test_attaching_twice_is_refused_and_the_first_stays():
    model = build(CASES["qwen3_moe"])
    with recorded(model) as calls, attach(model, "squared:budget=3"):
        with pytest.raises(RuntimeError, match=r"attached to this model already \(squared:budget=3\)"):
            start(model, "native")
        generate(model, prompts(6, 4), 2)
    assert all(len(call.fetched()) == 3 for call in passes(model, calls)[1])
    with attach(model, "native"):
        generate(model, prompts(6, 4), 2)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("squard:budget=3", r"unknown policy 'squard' .did you mean 'squared'.*known: .*\bnative, .*\btopk\b"),
        ("squared", "budget is missing"),
        ("squared:budget=0", "budget=0 must be at least 1"),
    ],
)
def test_an_unreadable_policy_string_is_refused_with_the_way_out(policy, message):
    model = build(CASES["qwen3_moe"])
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        start(model, policy)
    assert snapshot(model) == before


def statistics(facts: ModelFacts) -> Stats:
    shape = (len(facts.layers), facts.experts)
    numbers = torch.Generator().manual_seed(5)
    tensors = {
        "predictor_weight": torch.randn(*shape, facts.hidden, generator=numbers),
        "predictor_bias": torch.randn(shape, generator=numbers),
        "energy_mean": torch.rand(shape, generator=numbers) + 0.1,
    }
    return Stats(facts, tensors, {"model": "somewhere/else"})


@pytest.mark.parametrize("policy", ["base:budget=3", "static:budget=3"])
def test_missing_statistics_are_refused(policy):
    model = build(CASES["qwen3_moe"])
    before = snapshot(model)
    needs = ", ".join(sorted(presets.parse(policy).needs))
    with pytest.raises(MissingStatisticError, match=rf"{policy}.*needs {needs}.*moebudget calibrate"):
        start(model, policy)
    assert snapshot(model) == before


@pytest.mark.parametrize("policy", ["base:budget=3", "static:budget=3"])
@every_case
def test_each_layer_uses_its_statistics(name, policy):
    model = build(available(name))
    layers = moe_layers(model)
    stats = statistics(model_facts(layers, CASES[name].model_type))
    with recorded(model) as calls, attach(model, policy, stats):
        generate(model, prompts(6, 4), 3)
    for step in passes(model, calls)[1:]:
        for call in step:
            ids, weights = native_routes(model, call.layer, call.hidden)
            if policy.startswith("base"):
                unit = call.hidden / call.hidden.norm(dim=-1, keepdim=True)
                energy = (unit @ stats.tensors["predictor_weight"][call.layer].T).add(
                    stats.tensors["predictor_bias"][call.layer]
                )
                cost = weights.square() * energy.gather(-1, ids).exp()
            else:
                cost = weights.square() * stats.tensors["energy_mean"][call.layer][ids]
            total = torch.zeros(EXPERTS).index_add(0, ids.flatten(), cost.flatten())
            assert call.fetched() == frozenset(total.topk(3).indices.tolist())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": 16}, r"experts is 16 in the statistics \(somewhere/else\) and 12 in the model"),
        ({"layers": (0, 1, 2)}, r"layers is \(0, 1, 2\) in the statistics .* and \(0, 1\) in the model"),
        ({"router_hash": "0123456789ab"}, "router weights is '0123456789ab' in the statistics .* in the model"),
        ({"top_k": 2}, r"routes \w+ token is 2 in the statistics .* and 3 in the model"),
        ({"hidden": 64}, "hidden is 64 in the statistics .* and 32 in the model"),
        ({"family": "mixtral"}, "family is 'mixtral' in the statistics .* and 'qwen3_moe' in the model"),
    ],
)
def test_statistics_of_another_model_are_refused(change, message):
    model = build(CASES["qwen3_moe"])
    facts = model_facts(moe_layers(model), "qwen3_moe")
    changed = {name: getattr(facts, name) for name in ModelFacts.__dataclass_fields__} | change
    before = snapshot(model)
    with pytest.raises(StatsError, match=f"of another model: {message}.*moebudget calibrate"):
        start(model, "base:budget=3", statistics(ModelFacts(**changed)))
    assert snapshot(model) == before


def test_statistics_of_another_fine_tune_are_refused():
    stats = statistics(model_facts(moe_layers(build(CASES["qwen3_moe"])), "qwen3_moe"))
    fine_tune = build(CASES["qwen3_moe"], seed=1)
    with pytest.raises(StatsError, match="router weights"):
        start(fine_tune, "base:budget=3", stats)


def test_statistics_without_a_needed_tensor_are_refused():
    model = build(CASES["qwen3_moe"])
    stats = statistics(model_facts(moe_layers(model), "qwen3_moe"))
    without_predictor = Stats(stats.facts, {"energy_mean": stats.tensors["energy_mean"]})
    with pytest.raises(MissingStatisticError, match=r"'predictor_bias'.*hold: energy_mean"):
        start(model, "base:budget=3", without_predictor)
    with attach(model, "static:budget=3", without_predictor):
        generate(model, prompts(2, 3), 2)


def test_a_block_that_bypasses_its_experts_raises():
    model = build(CASES["gpt_oss"])
    block = model.model.layers[1].mlp
    before = snapshot(model)

    def run() -> None:
        with attach(model, "squared:budget=3"):
            block.forward = lambda hidden: (hidden, None)  # as a fused kernel does
            generate(model, prompts(2, 3), 2)

    with pytest.raises(BypassedError, match=r"1 of 2 Mixture-of-Experts layers called .* kernels hub"):
        run()
    del block.forward
    assert snapshot(model) == before


def test_a_policy_that_never_acted_warns():
    model = build(CASES["qwen3_moe"])
    words = prompts(3, 5)

    def run() -> None:
        with attach(model, "squared:budget=2"), torch.no_grad():
            model(input_ids=words, use_cache=False)
            model(input_ids=words, use_cache=False)

    with pytest.warns(
        UserWarning, match="'squared:budget=2' was active in 0 decode steps of 2 forward passes"
    ) as seen:
        run()
    assert seen[0].filename == __file__
    with attach(model, "squared:budget=2"):
        pass  # without a forward pass there is no warning


def test_decoding_without_a_cache_is_prefill_and_warns():
    model = build(CASES["qwen3_moe"])
    _, logits = generate(model, prompts(3, 5), 3, use_cache=False)
    with pytest.warns(UserWarning, match="active in 0 decode steps"), attach(model, "squared:budget=2"):
        _, attached = generate(model, prompts(3, 5), 3, use_cache=False)
    assert torch.equal(attached, logits)
