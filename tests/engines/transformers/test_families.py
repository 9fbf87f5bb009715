"""The table of architectures, compared with the models themselves."""

from __future__ import annotations

import importlib

import pytest
import torch
import transformers
from torch import nn

from moebudget import attach
from moebudget.engines.transformers.families import FAMILIES, UnsupportedModelError, model_facts, moe_layers

from .tiny import (
    CASES,
    EXPERTS,
    TOP_K,
    available,
    build,
    experts_modules,
    forward,
    generate,
    missing,
    native_routes,
    passes,
    prompts,
    recorded,
    start,
)

every_case = pytest.mark.parametrize("name", CASES)
SHARED = ["qwen2_moe", "qwen3_next", "deepseek_v2-greedy", "deepseek_v2-groups", "deepseek_v3", "glm4_moe", "dots1"]

FLOAT32 = ["deepseek_v2-greedy", "deepseek_v2-groups", "deepseek_v3", "glm4_moe", "dots1"]


def test_every_architecture_has_a_case():
    assert {case.model_type for case in CASES.values()} == set(FAMILIES)


def test_only_cases_that_the_release_lacks_are_skipped():
    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    skipped = {name for name, case in CASES.items() if missing(case)}
    assert skipped == ({"granitemoe", "deepseek_v2-groups"} if release < (5, 13) else set())


@every_case
def test_spec_reproduces_the_native_routes(name):
    model = build(available(name))
    with recorded(model) as calls:
        forward(model, prompts(8, 16))
    layers = moe_layers(model)
    assert len(calls) == len(layers) == len(experts_modules(model)) == 2
    for layer, call in zip(layers, calls, strict=True):
        batch = layer.spec(call.hidden, layer.logits(call.hidden), bias=layer.selection_bias)
        computed, native = batch.ids.sort(-1), call.ids.sort(-1)
        assert torch.equal(computed.values, native.values)
        weights = call.weights.gather(-1, native.indices)
        torch.testing.assert_close(batch.weights.gather(-1, computed.indices), weights, rtol=1e-5, atol=1e-6)
        by_factor = batch.probs.gather(-1, native.values) * batch.factor[:, None]
        torch.testing.assert_close(by_factor, weights, rtol=1e-5, atol=1e-6)
        assert batch.decode.all()


@every_case
def test_spec_reproduces_the_native_routes_in_bfloat16(name):
    """Routers that multiply in float32 for any dtype of the model must agree exactly, others up to rounding."""
    model = build(available(name), dtype=torch.bfloat16)
    with recorded(model) as calls:
        forward(model, prompts(8, 16))
    for layer, call in zip(moe_layers(model), calls, strict=True):
        batch = layer.spec(call.hidden, layer.logits(call.hidden), bias=layer.selection_bias)
        ranked = batch.choice.gather(-1, call.ids).sort(-1, descending=True).values
        assert torch.equal(ranked, batch.choice.gather(-1, batch.ids))
        by_factor = batch.probs.gather(-1, call.ids) * batch.factor[:, None]
        tolerance = 1e-5 if name in FLOAT32 else 1e-2
        torch.testing.assert_close(by_factor, call.weights.float(), rtol=tolerance, atol=1e-6)


@every_case
def test_layers_are_those_of_the_config(name):
    case = available(name)
    model = build(case)
    layers = moe_layers(model)
    dense = case.settings.get("mlp_only_layers") or range(case.settings.get("first_k_dense_replace", 0))
    count = case.settings.get("num_hidden_layers", 2)
    assert [layer.index for layer in layers] == [i for i in range(count) if i not in dense]
    assert [layer.experts for layer in layers] == experts_modules(model)
    facts = model_facts(layers, case.model_type)
    assert (facts.family, facts.experts, facts.top_k, facts.hidden) == (case.model_type, EXPERTS, TOP_K, 32)
    assert facts.layers == tuple(layer.index for layer in layers)


@every_case
def test_kept_routes_keep_the_weights_of_the_model(name):
    """routed_scaling_factor applies once, weights are renormalised only if the model does, the bias never weighs."""
    case = available(name)
    model = build(case)
    config = model.config
    sigmoid = case.model_type in ("deepseek_v3", "glm4_moe", "dots1")
    renormalizes = case.model_type in ("mixtral", "gpt_oss", "granitemoe") or bool(config.norm_topk_prob)
    scale = case.settings.get("routed_scaling_factor", 1.0)
    with recorded(model) as calls, attach(model, "squared:budget=5"):
        generate(model, prompts(6, 4), 4)
    layers = moe_layers(model)
    changed = 0
    for step in passes(model, calls)[1:]:
        for call in step:
            router = layers[call.layer].router
            logits = call.hidden @ router.weight.T + (router.bias if case.model_type == "gpt_oss" else 0.0)
            scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
            ids, weights = native_routes(model, call.layer, call.hidden)
            native = scores.gather(-1, ids)
            factor = scale / native.sum(-1, keepdim=True) if renormalizes else torch.full_like(native[:, :1], scale)
            torch.testing.assert_close(weights, native * factor, rtol=1e-5, atol=1e-6)
            used = call.weights != 0
            expected = torch.where(used, scores.gather(-1, call.ids) * factor, 0.0)
            torch.testing.assert_close(call.weights, expected, rtol=1e-5, atol=1e-6)
            changed += int((call.ids.sort(-1).values != ids.sort(-1).values).any())
    assert changed


@pytest.mark.parametrize("name", SHARED)
def test_shared_experts_are_outside_the_budget(name):
    model = build(available(name))
    blocks = [model.get_submodule(layer.name) for layer in moe_layers(model)]
    seen: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []
    routed: list[torch.Tensor] = []
    with attach(model, "squared:budget=1") as run:
        for block in blocks:
            block.register_forward_hook(lambda block, args, out: seen.append((block, args[0], out)))
            block.experts.register_forward_hook(lambda _module, _args, out: routed.append(out.clone()))
        generate(model, prompts(5, 4), 3)
    assert run.counters.fetched == 1
    for (block, hidden, out), experts in zip(seen, routed, strict=True):
        with torch.no_grad():
            flat = hidden.flatten(0, 1)
            if hasattr(block, "shared_expert"):
                shared = block.shared_expert_gate(flat).sigmoid() * block.shared_expert(flat)
            else:
                shared = block.shared_experts(flat)
        assert shared.abs().max() > 0.1
        # old releases of qwen3_next add the shared part in place
        plain = out.flatten(0, 1) - experts
        torch.testing.assert_close(plain, shared, rtol=1e-5, atol=1e-5)


def test_an_old_release_names_the_release_that_is_needed():
    code = importlib.import_module("transformers.models.granitemoe.modeling_granitemoe")
    if hasattr(code, "GraniteMoeExperts"):
        pytest.skip("this release separates router and experts")
    with pytest.raises(UnsupportedModelError, match=r"no separate router and experts.*transformers 5\.13 or newer"):
        moe_layers(build(CASES["granitemoe"]))


def test_a_block_without_a_router_is_refused():
    model = build(CASES["qwen3_moe"])
    model.model.layers[1].mlp.gate = nn.Identity()
    where = r"model\.layers\.1\.mlp \(Qwen3MoeSparseMoeBlock\) has no separate"
    with pytest.raises(UnsupportedModelError, match=where):
        moe_layers(model)


def test_a_dense_model_is_refused():
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    with pytest.raises(UnsupportedModelError, match="'llama' is a dense model: it has no experts"):
        start(model, "native")


def test_an_unknown_architecture_is_refused_with_the_known_ones():
    model = transformers.PhimoeForCausalLM(
        transformers.PhimoeConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
        )
    )
    known = ", ".join(sorted(FAMILIES))
    with pytest.raises(UnsupportedModelError, match=rf"no row for the architecture 'phimoe'; known: {known}\."):
        start(model, "native")


def test_a_renamed_architecture_is_refused():
    model = build(CASES["qwen3_moe"])
    model.config.model_type = "qwen9_moe"
    with pytest.raises(UnsupportedModelError, match="no row for the architecture 'qwen9_moe'"):
        moe_layers(model)


def test_a_model_without_moe_layers_is_refused():
    model = build(CASES["qwen3_moe"], mlp_only_layers=[0, 1])
    with pytest.raises(UnsupportedModelError, match="no Qwen3MoeSparseMoeBlock in this 'qwen3_moe' model: 0 layers"):
        start(model, "native")


def test_a_module_that_is_no_transformers_model_is_refused():
    with pytest.raises(UnsupportedModelError, match="Linear has no config: pass a model loaded with transformers"):
        start(nn.Linear(2, 2), "native")
