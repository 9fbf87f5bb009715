"""Offloaded experts: results equal those of the model, counts equal a simulation, and faults are never silent."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget import attach
from moebudget.engines.transformers.families import UnsupportedModelError, moe_layers
from moebudget.engines.transformers.observe import observe_routes
from moebudget.engines.transformers.offload import LayerCache, offload
from moebudget.engines.transformers.transfers import TransferFit

from .tiny import (
    CASES,
    EXPERTS,
    IMPLEMENTATIONS,
    TOP_K,
    VOCAB,
    available,
    build,
    forward,
    generate,
    prompts,
    recorded,
    snapshot,
)

LINK = TransferFit(1e-5, 5e10)


def qwen(**more: Any) -> Any:
    return build(CASES["qwen3_moe"], **more)


def forced(model: Any, ids: Tensor) -> Tensor:
    """Logits of a prompt and of single tokens after it, so that steps of both kinds run."""
    first, cache = forward(model, ids[:, :3])
    parts = [first]
    for i in range(3, ids.shape[1]):
        logits, cache = forward(model, ids[:, i : i + 1], cache)
        parts.append(logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_offloading_keeps_results_bit_for_bit(name: str, experts: str) -> None:
    case = available(name)
    model, ids = build(case, experts=experts), prompts(2, 7)
    expected = forced(model, ids)
    with offload(model, EXPERTS - 2, "cpu") as cached:
        assert torch.equal(forced(model, ids), expected)
        assert cached.counters.hits > 0
        assert cached.counters.misses > 0
        assert cached.counters.passes == cached.counters.calls
    assert torch.equal(forced(model, ids), expected)


@pytest.mark.parametrize("experts", IMPLEMENTATIONS)
@pytest.mark.parametrize("slots", [1, TOP_K - 1, 5])
def test_a_step_that_needs_more_experts_than_slots_keeps_its_results(slots: int, experts: str) -> None:
    for name in ("qwen3_moe", "gpt_oss"):
        model, ids = build(CASES[name], experts=experts), prompts(4, 7)
        expected = forced(model, ids)
        with offload(model, slots, "cpu") as cached:
            logits = forced(model, ids)
            assert cached.counters.passes > cached.counters.calls
        # The passes sum in another order, or multiply in other batches.
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_results_do_not_depend_on_the_cached_experts() -> None:
    """Many steps through a small cache, with a policy that drops routes."""
    model, ids = qwen(experts="grouped_mm"), prompts(3, 4)
    with attach(model, "squared:budget=4"):
        expected = generate(model, ids, 12)
    with offload(model, 5, "cpu") as cached, attach(model, "squared:budget=4"):
        for _ in range(2):
            tokens, logits = generate(model, ids, 12)
            assert torch.equal(tokens, expected[0])
            assert torch.equal(logits, expected[1])
    assert cached.counters.misses > 20


def test_hits_misses_and_bytes_match_the_executed_experts() -> None:
    """Compared with the ids that the experts got, for a cache that is large enough never to evict."""
    model, ids = qwen(experts="grouped_mm"), prompts(2, 8)
    with recorded(model) as calls:
        forced(model, ids)
    with offload(model, EXPERTS, "cpu") as cached:
        forced(model, ids)
    for layer, cache in enumerate(cached.layers):
        steps = [call.fetched() for call in calls if call.layer == layer]
        distinct = len(frozenset().union(*steps))
        counters = cache.counters
        hits = sum(map(len, steps)) - distinct
        assert (counters.calls, counters.misses, counters.hits) == (len(steps), distinct, hits)
        assert counters.bytes == distinct * 4 * (48 * 32 + 32 * 24)
    total = cached.counters
    assert total.misses == sum(cache.counters.misses for cache in cached.layers)
    cached.reset()
    assert cached.counters.calls == cached.counters.bytes == 0


def costs_now(cached: Any) -> list[list[bool]]:
    return (cached.stats().tensors["placement_cost"] == 0).tolist()


def test_a_policy_reads_the_cache_of_the_current_step() -> None:
    """caee_offload at a tiny theta keeps first routes, and the experts that are cached at that step."""
    model, ids = qwen(experts="grouped_mm"), prompts(1, 4)
    with offload(model, 4, "cpu") as cached:
        stats = cached.stats()
        seen: list[tuple[set[int], set[int], set[int]]] = []
        layers = moe_layers(model)

        def before(_module: Any, args: tuple[Tensor, ...]) -> None:  # before attach changes the routes
            held = {e for e, cost in enumerate(stats.tensors["placement_cost"][0].tolist()) if cost == 0}
            seen.append((held, set(args[1].flatten().tolist()), {int(args[1][0, 0])}))

        run: list[set[int]] = []
        cache = cached.layers[0]
        plan = cache.cache.plan
        cache.cache.plan = lambda needed: run.append(set(needed)) or plan(needed)  # type: ignore[method-assign,func-returns-value]
        handle = layers[0].experts.register_forward_pre_hook(before)
        with attach(model, "caee_offload:theta=0.01", stats):
            generate(model, ids, 20)
        handle.remove()
    decode = list(zip(seen, run, strict=True))[1:]
    kept = [bool(routes & held - first) for (held, routes, first), _ in decode]
    assert any(kept)
    assert len({frozenset(held) for (held, _, _), _ in decode}) > 3, "the cache changed between steps"
    for (held, routes, first), ran in decode:
        assert ran >= first | (routes & held)
        assert ran <= first | held, "a missing expert beyond the first route was fetched"


def test_a_miss_costs_the_copies_of_all_tensors_of_the_expert() -> None:
    model = qwen()
    with offload(model, 4, "cpu") as cached:
        stats = cached.stats()
        assert stats.tensors["placement_cost"].tolist() == [[True] * EXPERTS] * 2
        assert stats.tensors["placement_device"].tolist() == [[0] * EXPERTS] * 2
        forward(model, prompts(1, 2))
        expected = 2 * 1e-5 + 4 * (48 * 32 + 32 * 24) / 5e10
        assert cached.copy_seconds(LINK) == pytest.approx(cached.counters.misses * expected)


def test_a_failed_copy_never_leads_to_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the loads fail; every result is right or an error."""
    model, ids = qwen(experts="grouped_mm"), prompts(2, 7)
    expected = forced(model, ids)
    rng, copy, failed = random.Random(0), LayerCache._copy, 0

    def torn(self: LayerCache, loads: list[tuple[int, int]]) -> None:
        if rng.random() < 0.2:
            for _, slot in loads:
                for weights in self.slots.values():
                    weights[slot] = torch.nan
            raise RuntimeError("the copy failed")
        copy(self, loads)

    with offload(model, 6, "cpu") as cached:
        monkeypatch.setattr(LayerCache, "_copy", torn)
        for _ in range(12):
            try:
                assert torch.equal(forced(model, ids), expected)
            except RuntimeError as error:
                assert str(error) == "the copy failed"  # noqa: PT017
                failed += 1
            held = [len(layer.cache.slot_of) for layer in cached.layers]
            assert [sum(row) for row in costs_now(cached)] == held, (
                "policies must see exactly the cached experts as free"
            )
    assert 0 < failed < 12


def test_the_model_is_restored_after_offloading() -> None:
    model = qwen(experts="grouped_mm")
    before, names, kinds = snapshot(model), list(model.state_dict()), [type(m) for m in model.modules()]
    weights = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    with pytest.raises(IndexError), offload(model, 3, "cpu"):
        generate(model, prompts(2, 4) + VOCAB, 3)
    with offload(model, 3, "cpu"):
        generate(model, prompts(2, 4), 3)
    after = snapshot(model)
    assert [type(m) for m in model.modules()] == kinds
    assert list(model.state_dict()) == names
    assert before.keys() == after.keys()
    for name, parameter in model.named_parameters():
        assert id(parameter) == weights[name][0]
        assert torch.equal(parameter, weights[name][1])
    assert all(m.num_experts == EXPERTS for m in (layer.experts for layer in moe_layers(model)))


def test_saving_an_offloaded_model_is_refused(tmp_path: Any) -> None:
    model = qwen()
    with (
        offload(model, 3, "cpu"),
        pytest.raises(RuntimeError, match="offloaded and would be missing from the state dict"),
    ):
        model.save_pretrained(tmp_path)


def test_observed_outputs_are_the_same_with_offloading() -> None:
    model, ids = qwen(experts="grouped_mm"), prompts(2, 6)
    outputs: list[list[Tensor]] = [[], []]
    for turn, slots in enumerate((None, 3)):
        block = offload(model, slots, "cpu") if slots else observe_routes(model, lambda *_: None)
        with block, observe_routes(model, lambda *seen, turn=turn: outputs[turn].append(seen[-1])):  # type: ignore[misc]
            forward(model, ids)
    assert len(outputs[0]) == 2
    for plain, cached in zip(*outputs, strict=True):
        assert torch.equal(plain, cached)


@pytest.mark.parametrize("slots", [0, -1, EXPERTS + 1, 2.5, True])
def test_impossible_numbers_of_slots_are_refused(slots: Any) -> None:
    model = qwen()
    with pytest.raises(ValueError, match=rf"slots={slots!r} must be a whole number from 1 to {EXPERTS}"):
        offload(model, slots, "cpu").__enter__()
    forward(model, prompts(1, 3))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_missing_device_is_refused(device: str) -> None:
    model = qwen()
    with pytest.raises(ValueError, match=rf"device '{device}' does not exist: torch sees 0 GPUs"):
        offload(model, 4, device).__enter__()
    forward(model, prompts(1, 3))


def test_a_device_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="device 'meta': experts can be cached on cpu or cuda only"):
        offload(qwen(), 4, "meta").__enter__()


def test_offloading_twice_or_under_a_policy_is_refused() -> None:
    model = qwen()
    with offload(model, 4, "cpu"), pytest.raises(UnsupportedModelError, match="must be loaded tensors"):
        offload(model, 4, "cpu").__enter__()
    with attach(model, "native"), pytest.raises(RuntimeError, match="offload first, then attach"):
        offload(model, 4, "cpu").__enter__()


def test_an_unknown_experts_implementation_is_refused() -> None:
    model = qwen()
    model.config._experts_implementation_internal = "sonicmoe"
    with pytest.raises(UnsupportedModelError, match="'sonicmoe' cannot run on a cache; load the model with"):
        offload(model, 4, "cpu").__enter__()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("slots", [3, EXPERTS - 2])
def test_slots_are_read_after_their_copies_arrived(slots: int) -> None:
    """Copies on a separate stream, from pinned memory, over many steps without a wait between layers."""
    model = build(CASES["qwen3_moe"], experts="grouped_mm", dtype=torch.bfloat16).to("cuda")
    ids = prompts(4, 40).cuda()
    expected = forced(model, ids)
    with offload(model, slots, "cuda") as cached:
        assert all(weight.is_pinned() for weight in cached.layers[0].host.values())
        for _ in range(3):
            torch.testing.assert_close(forced(model, ids), expected, rtol=2e-2, atol=2e-2)
    assert moe_layers(model)[0].experts.down_proj.is_cuda
