"""Attached policies: exact prefill, capped decode steps, and a restored model afterwards."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from moebudget import attach, presets
from moebudget.engines.transformers.families import moe_layers

from .tiny import (
    CASES,
    EXPERTS,
    IMPLEMENTATIONS,
    POISON,
    TOP_K,
    available,
    build,
    cache_name,
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


@every_case
@pytest.mark.parametrize(
    ("policy", "experts"),
    [("native", "eager"), *((f"squared:budget={EXPERTS}", experts) for experts in IMPLEMENTATIONS)],
)
def test_a_budget_of_all_experts_equals_native_routing_bit_for_bit(name, policy, experts):
    model = build(available(name), experts=experts)
    words = prompts(5, 7)
    tokens, logits = generate(model, words, 6)
    with attach(model, policy) as run:
        tokens_attached, logits_attached = generate(model, words, 6)
    assert run.counters.steps == 5
    assert torch.equal(tokens_attached, tokens)
    assert torch.equal(logits_attached, logits)


@every_case
def test_a_budget_of_all_experts_is_exact_in_bfloat16(name):
    model = build(available(name), dtype=torch.bfloat16)
    words = prompts(5, 7)
    tokens, logits = generate(model, words, 5)
    with attach(model, f"squared:budget={EXPERTS + 5}"):
        tokens_attached, logits_attached = generate(model, words, 5)
    assert torch.equal(tokens_attached, tokens)
    assert torch.equal(logits_attached, logits)
    with recorded(model) as calls, attach(model, "squared:budget=3"):
        _, logits_capped = generate(model, words, 5)
    assert logits_capped.isfinite().all()
    assert all(len(call.fetched()) == 3 for step in passes(model, calls)[1:] for call in step)


@every_case
@pytest.mark.parametrize("length", [1, 13])
def test_prompts_keep_native_routes_and_decode_steps_are_rerouted(name, length):
    model = build(available(name))
    words = prompts(8, length)
    with recorded(model) as plain:
        _, logits = generate(model, words, 3)
    with recorded(model) as capped, attach(model, "squared:budget=2"):
        _, logits_attached = generate(model, words, 3)
    assert torch.equal(logits_attached[:, 0], logits[:, 0])
    for call, native in zip(passes(model, capped)[0], passes(model, plain)[0], strict=True):
        assert torch.equal(call.ids, native.ids)
        assert torch.equal(call.weights, native.weights)
    assert not torch.isclose(logits_attached[:, 1], logits[:, 1], atol=1e-3).all()


@every_case
@pytest.mark.parametrize("budget", [1, 2, 4])
def test_no_step_of_any_layer_fetches_more_than_the_budget(name, budget):
    model = build(available(name))
    with recorded(model) as calls, attach(model, f"squared:budget={budget}") as run:
        generate(model, prompts(7, 5), 5)
    steps = passes(model, calls)[1:]
    assert len(steps) == 4
    fetched = [len(call.fetched()) for step in steps for call in step]
    native = [native_routes(model, call.layer, call.hidden)[0].unique().numel() for step in steps for call in step]
    assert fetched == [min(budget, union) for union in native]
    assert min(native) > budget
    counters = run.counters
    assert counters.layers == len(experts_modules(model))
    assert counters.steps == 4
    assert counters.rows == 7
    assert counters.totals["steps"] == len(fetched)
    assert counters.totals["fetched"] == sum(fetched)
    assert counters.totals["native_union"] == sum(native)
    assert counters.totals["unrestricted"] == counters.totals["nonfinite"] == 0


def test_each_layer_gets_its_budget_and_budgets_can_change():
    model = build(CASES["qwen3_moe"])
    words = prompts(7, 5)
    with recorded(model) as calls, attach(model, "squared:budget=9", budgets=[2, 4]) as run:
        generate(model, words, 3)
        run.set_budget([3, 1])
        generate(model, words, 3)
        run.set_budget(2)
        generate(model, words, 3)
    fetched = [[len(call.fetched()) for call in step] for step in passes(model, calls)]
    assert [fetched[i] for i in (1, 2, 4, 5, 7, 8)] == [[2, 4]] * 2 + [[3, 1]] * 2 + [[2, 2]] * 2


@pytest.mark.parametrize(
    ("policy", "budgets", "says"),
    [
        ("squared:budget=9", [2, 4, 3], "3 budgets were given and the model has 2 Mixture-of-Experts layers"),
        ("squared:budget=9", [2, 0], "budget=0 must be a whole number of at least 1"),
        ("squared:budget=9", "23", "budget='23' must be a whole number"),
        ("oea:k0=1", [2, 4], "'oea:k0=1' has no budget to change"),
    ],
)
def test_budgets_that_do_not_fit_the_layers_are_refused(policy, budgets, says):
    model = build(CASES["qwen3_moe"])
    before = snapshot(model)
    with pytest.raises(ValueError, match=says), attach(model, policy, budgets=budgets):
        pass
    assert snapshot(model) == before


def test_counters_agree_with_the_executed_routes():
    model = build(CASES["qwen3_moe"])
    with recorded(model) as calls, attach(model, "squared:budget=3") as run:
        generate(model, prompts(6, 4), 4)
    dropped = backfilled = rescued = 0
    mass = 0.0
    for step in passes(model, calls)[1:]:
        for call in step:
            ids, weights = native_routes(model, call.layer, call.hidden)
            for row in range(len(ids)):
                native = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
                executed = {i for i, w in zip(call.ids[row].tolist(), call.weights[row].tolist(), strict=True) if w}
                lost = native.keys() - executed
                dropped += len(lost)
                backfilled += len(executed - native.keys())
                rescued += lost == native.keys()
                mass += sum(native[i] for i in lost) / sum(native.values())
    totals = run.counters.totals
    assert (totals["dropped"], totals["backfilled"], totals["rescued"]) == (dropped, backfilled, rescued)
    assert totals["dropped_mass"] == pytest.approx(mass, rel=1e-5)
    assert dropped
    assert backfilled


def test_the_number_of_rows_does_not_decide_what_is_prefill():
    model = build(CASES["qwen3_moe"])
    with recorded(model) as calls, attach(model, "squared:budget=4") as run:
        generate(model, prompts(64, 1), 2)
        generate(model, prompts(1, 40), 2)
    prompt_64, step_64, prompt_1, _ = passes(model, calls)
    assert all(len(call.fetched()) > 4 for call in prompt_64 + prompt_1)
    assert all(len(call.fetched()) == 4 for call in step_64)
    assert run.counters.steps == 2


@pytest.mark.parametrize("chunk", [4, 12, 1])
def test_a_prompt_read_in_pieces_is_prefill_to_its_last_token(chunk):
    """13 tokens in pieces of 4: the last piece is one token on a filled cache, but still part of the prompt."""
    model = build(CASES["qwen3_moe"])
    words = prompts(6, 13)

    def in_pieces() -> Tensor:
        cache = {cache_name(model): transformers.DynamicCache()}  # release 5.0 does not make one
        return generate(model, words, 3, prefill_chunk_size=chunk, **cache)[1]

    logits = in_pieces()
    with recorded(model) as calls, attach(model, "squared:budget=3") as run:
        attached = in_pieces()
    assert torch.equal(attached[:, 0], logits[:, 0])
    assert run.counters.steps == 2
    assert [len(call.fetched()) == 3 for call in passes(model, calls)[-1]] == [True] * 2


def test_one_more_token_of_a_prompt_on_a_kept_cache_is_prefill():
    model = build(CASES["qwen3_moe"])
    words = prompts(6, 9)
    results = []
    for policy in ("native", "squared:budget=3"):
        _, cache = forward(model, words[:, :8])
        with attach(model, policy) as run:
            _, logits = generate(model, words, 3, **{cache_name(model): cache})
        results.append(logits[:, 0])
        assert run.counters.steps == 2
    assert torch.equal(*results)


def test_a_prompt_of_embeddings_is_prefill():
    model = build(CASES["qwen3_moe"])
    words = prompts(4, 6)
    embeddings = model.get_input_embeddings()(words).detach()
    mask = torch.ones_like(words)
    kwargs = {"max_new_tokens": 4, "do_sample": False, "attention_mask": mask, "suppress_tokens": [0, 1, 2, 3]}
    with attach(model, "squared:budget=3"):
        by_ids, _ = generate(model, words, 4)
    with recorded(model) as calls, attach(model, "squared:budget=3") as run:
        by_embeddings = model.generate(inputs_embeds=embeddings, **kwargs)
    assert torch.equal(by_embeddings, by_ids[:, 6:])
    assert run.counters.steps == 3
    assert all(len(call.fetched()) > 3 for call in passes(model, calls)[0])


def static_cache_missing(model: nn.Module, words: Tensor) -> str:
    """Why the model cannot decode with a static cache, determined by a trial; empty if it can."""
    kinds: set[str] = set()

    def note(_module: nn.Module, _args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        kinds.add(type(kwargs.get(cache_name(model))).__name__)

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        generate(model, words, 2, cache_implementation="static")
    except KeyError as error:
        return f"its static cache fails with KeyError {error}"
    finally:
        hook.remove()
    return "" if kinds == {"StaticCache"} else f"it used {', '.join(sorted(kinds))}"


@every_case
def test_static_and_dynamic_caches_agree(name):
    model = build(available(name))
    words = prompts(5, 6)
    if reason := static_cache_missing(model, words):
        pytest.skip(f"transformers {transformers.__version__} has no static cache for {name}: {reason}")
    with recorded(model) as dynamic_calls, attach(model, "squared:budget=4"):
        dynamic_tokens, dynamic = generate(model, words, 6)
    with recorded(model) as static_calls, attach(model, "squared:budget=4") as run:
        static_tokens, static = generate(model, words, 6, cache_implementation="static")
    assert run.counters.steps == 5
    assert torch.equal(static_tokens, dynamic_tokens)
    torch.testing.assert_close(static, dynamic, rtol=0, atol=1e-5)
    for static_call, dynamic_call in zip(static_calls, dynamic_calls, strict=True):
        assert torch.equal(static_call.ids.sort(-1).values, dynamic_call.ids.sort(-1).values)


@every_case
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_a_request_full_of_nan_does_not_change_other_rows(name, experts):
    model = build(available(name), experts=experts)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    tokens = torch.cat([prompts(4, 5), prompts(4, 2, seed=1)], 1)
    tokens[1, 5] = POISON
    tokens[1, 6] = POISON

    def decode(finished: frozenset[int]) -> tuple[list[Tensor], list[list[frozenset[int]]], dict[str, float]]:
        logits = []
        with recorded(model) as calls, attach(model, "squared:budget=3", finished_ids=finished) as run:
            _, cache = forward(model, tokens[:, :5])
            for position in (5, 6):
                out, cache = forward(model, tokens[:, position : position + 1], cache)
                logits.append(out[:, 0])
        return logits, [[call.fetched() for call in step] for step in passes(model, calls)[1:]], run.counters.totals

    poisoned, sets, totals = decode(frozenset())
    without, sets_without, totals_without = decode(frozenset({POISON}))  # the row is in the batch, but does not vote
    assert sets == sets_without
    assert all(len(fetched) == 3 and fetched < set(range(EXPERTS)) for step in sets for fetched in step)
    for logits, logits_without in zip(poisoned, without, strict=True):
        assert logits[[0, 2, 3]].isfinite().all()
        assert torch.equal(logits[[0, 2, 3]], logits_without[[0, 2, 3]])
        assert not logits[1].isfinite().all()
    assert totals["nonfinite"] == 2 * len(experts_modules(model))
    assert totals["rows"] == totals_without["rows"] == 3 * totals["steps"]
    assert totals["fetched"] == totals_without["fetched"]


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "dots1"])
def test_negative_biased_scores_stay_inside_the_active_set(name):
    """Masking with 0 instead of -inf would prefer an expert outside the active set."""
    model = build(available(name))
    words = prompts(6, 5)
    with torch.no_grad():
        for layer in moe_layers(model):
            layer.selection_bias.sub_(5)
    tokens, logits = generate(model, words, 4)
    with attach(model, f"squared:budget={EXPERTS}"):
        tokens_attached, logits_attached = generate(model, words, 4)
    assert torch.equal(tokens_attached, tokens)
    assert torch.equal(logits_attached, logits)
    with recorded(model) as calls, attach(model, "squared:budget=4") as run:
        generate(model, words, 4)
    assert all(len(call.fetched()) == 4 for step in passes(model, calls)[1:] for call in step)
    assert run.counters.totals["fetched"] == 4 * run.counters.totals["steps"]


def test_the_budget_can_change_between_steps():
    model = build(CASES["mixtral"])
    words = prompts(8, 6)
    with recorded(model) as calls, attach(model, "squared:budget=2") as run:
        _, cache = forward(model, words[:, :3])
        forward(model, words[:, 3:4], cache)
        run.set_budget(5)
        forward(model, words[:, 4:5], cache)
        assert run.counters.steps == 2
        run.reset()
        assert run.counters.steps == 0
        forward(model, words[:, 5:6], cache)
        assert run.counters.steps == 1
        for wrong in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match="must be a whole number of at least 1"):
                run.set_budget(wrong)
    assert [len(call.fetched()) for step in passes(model, calls)[1:] for call in step] == [2, 2, 5, 5, 5, 5]


def test_a_policy_object_equals_its_policy_string():
    model = build(CASES["qwen3_moe"])
    words = prompts(4, 4)
    with attach(model, "router_mass:budget=3,fill=drop"):
        _, by_name = generate(model, words, 3)
    with attach(model, presets.router_mass(3, fill="drop")):
        _, by_object = generate(model, words, 3)
    assert torch.equal(by_name, by_object)


@every_case
def test_the_model_is_restored(name):
    model = build(available(name))
    words = prompts(3, 5)
    _, logits = generate(model, words, 3)
    before = snapshot(model)
    with attach(model, "squared:budget=2"):
        assert snapshot(model) != before
        generate(model, words, 3)
    assert snapshot(model) == before
    _, again = generate(model, words, 3)
    assert torch.equal(again, logits)


def test_the_model_is_restored_after_an_error():
    model = build(CASES["qwen3_moe"])
    words = prompts(3, 5)
    _, logits = generate(model, words, 3)
    before = snapshot(model)

    def fail(*_args: object) -> None:
        raise RuntimeError("on purpose")

    def run(after: bool) -> None:
        with attach(model, "squared:budget=2"):
            generate(model, words, 3)
            if after:
                fail()

    with pytest.raises(RuntimeError, match="on purpose"):
        run(after=True)
    assert snapshot(model) == before
    hook = experts_modules(model)[1].register_forward_hook(fail)  # in the middle of a forward pass
    with pytest.raises(RuntimeError, match="on purpose"):
        run(after=False)
    hook.remove()
    assert snapshot(model) == before
    assert torch.equal(generate(model, words, 3)[1], logits)


def test_generate_does_not_compile_while_attached():
    """Not even with a config from the caller: the hooks read the cache on the host."""
    model = build(CASES["qwen3_moe"])
    seen: list[bool | None] = []
    config = transformers.GenerationConfig(max_new_tokens=2, suppress_tokens=[*range(4)])
    prefill = model._prefill
    model._prefill = lambda ids, config, *more, **kwargs: (
        seen.append(config.disable_compile) or prefill(ids, config, *more, **kwargs)
    )
    with attach(model, "squared:budget=2"):
        model.generate(prompts(2, 3), generation_config=config)
        model.generate(prompts(2, 3), max_new_tokens=2, suppress_tokens=[*range(4)])
    assert seen == [True, True]


def test_existing_hooks_stay():
    model = build(CASES["qwen3_moe"])
    seen: list[int] = []
    experts_modules(model)[0].register_forward_pre_hook(lambda _module, args: seen.append(len(args)))
    model.generation_config.disable_compile = False
    before = snapshot(model)
    with attach(model, "squared:budget=2"):
        generate(model, prompts(3, 5), 3)
    assert snapshot(model) == before
    assert len(seen) == 3
    assert model.generation_config.disable_compile is False


def test_a_direct_call_of_the_decoder_after_a_step_is_not_rerouted():
    """The inner model has no hooks, so the rows of an earlier step must not be applied to it."""
    model = build(CASES["qwen3_moe"])
    words = prompts(6, 5)
    with torch.no_grad():
        plain = model.model(input_ids=words).last_hidden_state
        with attach(model, "squared:budget=2"):
            _, cache = forward(model, words[:, :4])
            forward(model, words[:, 4:], cache)
            inside = model.model(input_ids=words).last_hidden_state
    assert torch.equal(inside, plain)


def test_a_budget_below_the_routes_of_a_token_leaves_slots_unused():
    model = build(CASES["qwen3_moe"])
    with recorded(model) as calls, attach(model, "squared:budget=2"):
        generate(model, prompts(6, 4), 3)
    for step in passes(model, calls)[1:]:
        for call in step:
            assert call.ids.shape == (6, TOP_K)
            assert ((call.weights != 0).sum(-1) <= 2).all()
            assert (call.weights != 0).any(-1).all()
