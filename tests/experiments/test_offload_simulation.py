"""Simulations of offloaded experts and of many devices, against counts by hand and decoding step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.studies.device_simulation import record_steps, simulate_devices
from experiments.studies.offload_simulation import evaluate_offloaded
from moebudget import attach, parse
from moebudget.core.router import RouterSpec
from moebudget.core.stats import Stats
from moebudget.core.types import RouterBatch
from moebudget.engines.transformers.attach import place_experts
from moebudget.engines.transformers.expert_cache import LfuCache
from tests.engines.transformers import tiny

WINDOWS = tiny.prompts(32, 7, seed=5)  # two pieces
SLOTS = 5
CACHED = "caee_offload:theta=0.5"


def model_of(**more: Any) -> Any:
    return tiny.build(tiny.CASES["qwen3_moe"], **more)


@torch.no_grad()
def decoded(model: Any, policy: str, windows: Tensor, caches: list[LfuCache]) -> tuple[Tensor, int, int]:
    """Loss [n], hits and misses, one token at a time on a key-value cache, with the placement set by hand."""
    placed = place_experts(model, None, 1)
    cost = placed.tensors["placement_cost"]
    loss, counts = torch.zeros(len(windows), dtype=torch.float64), [0, 0]
    with tiny.recorded(model) as calls, attach(model, policy, placed, finished_ids=frozenset()):
        _, cache = tiny.forward(model, windows[:, :1])
        for s in range(1, windows.shape[1] - 1):
            for layer, held in enumerate(caches):
                cost[layer] = torch.tensor([0.0 if e in held.slot_of else 1.0 for e in range(tiny.EXPERTS)])
            calls.clear()
            logits, cache = tiny.forward(model, windows[:, s : s + 1], cache)
            for call in calls:
                fetch = caches[call.layer].step(call.fetched())
                counts = [counts[0] + fetch.hits, counts[1] + fetch.misses]
            log = logits[:, 0].double().log_softmax(-1)
            loss -= log.gather(-1, windows[:, s + 1 : s + 2])[:, 0]
    return loss / (windows.shape[1] - 2), *counts


@pytest.mark.parametrize("policy", ["native", CACHED, "worth:least=1.2,cost=squared"])
def test_steps_at_once_equal_steps_one_by_one(policy: str) -> None:
    """Two streams of batch 8, each with separate caches that the first piece has filled."""
    model = model_of()
    result = evaluate_offloaded(model, parse(policy), None, WINDOWS, slots=SLOTS, batch=8)
    losses, hits, misses = [], 0, 0
    for stream in (slice(0, 8), slice(8, 16)):
        caches = [LfuCache(SLOTS) for _ in range(2)]
        decoded(model, policy, WINDOWS[:16][stream], caches)
        loss, h, m = decoded(model, policy, WINDOWS[16:][stream], caches)
        losses.append(loss)
        hits, misses = hits + h, misses + m
    torch.testing.assert_close(result.nll, torch.cat(losses), rtol=1e-5, atol=1e-6)
    steps = 2 * 2 * 5  # streams, layers, positions
    assert (result.hits, result.misses) == (hits / steps, misses / steps)
    assert result.hits > 0
    assert result.counters.steps == 2 * 5


def test_policy_that_knows_the_cache_misses_less() -> None:
    model = model_of()
    results = {p: evaluate_offloaded(model, parse(p), None, WINDOWS, slots=8, batch=4) for p in ("native", CACHED)}
    assert results[CACHED].misses < results["native"].misses
    assert not torch.equal(results[CACHED].nll, results["native"].nll)
    everything = evaluate_offloaded(model, parse(CACHED), None, WINDOWS, slots=tiny.EXPERTS, batch=16)
    torch.testing.assert_close(everything.nll, results["native"].nll)
    assert everything.misses < 0.1, "nearly all is cached after the first piece"


@pytest.mark.parametrize(
    ("rows", "batch", "size"), [(16, 16, 16), (31, 16, 16), (40, 5, 15), (0, 4, 16), (24, 24, 24)]
)
def test_text_of_broken_pieces_is_refused(rows: int, batch: int, size: int) -> None:
    with pytest.raises(
        ValueError, match=rf"^{rows} windows at batch={batch} must be at least two whole pieces of {size}"
    ):
        evaluate_offloaded(model_of(), parse("native"), None, WINDOWS.repeat(2, 1)[:rows], slots=4, batch=batch)


SPEC = RouterSpec(8, 2)
STEPS, ROWS = 30, 3


def recorded(seed: int) -> RouterBatch:
    g = torch.Generator().manual_seed(seed)
    return SPEC(torch.randn(STEPS, ROWS, 4, generator=g), 2 * torch.randn(STEPS, ROWS, 8, generator=g))


LAYERS = [recorded(0), recorded(1)]


def routed(layer: int, step: int) -> set[int]:
    return set(LAYERS[layer].ids[step].flatten().tolist())


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_simulated_loads_equal_a_count(devices: int) -> None:
    loads = simulate_devices(LAYERS, parse("native"), None, devices, warm=4)
    assert loads.experts.shape == (STEPS - 4, 2, devices)
    for s in range(4, STEPS):
        for layer in range(2):
            expected = [0] * devices
            for expert in routed(layer, s):
                expected[expert * devices // 8] += 1
            assert loads.experts[s - 4, layer].tolist() == expected
    assert loads.straggler == pytest.approx(loads.experts.max(-1).values.float().mean())
    assert loads.total_misses == 0


def test_simulated_misses_equal_caches_that_the_layers_share() -> None:
    loads = simulate_devices(LAYERS, parse("native"), None, 2, slots=3, warm=10)
    caches = [LfuCache(3), LfuCache(3)]
    total = [[0, 0], [0, 0]]
    for s in range(STEPS):
        for layer in range(2):
            for d in range(2):
                misses = caches[d].step(8 * layer + e for e in routed(layer, s) if e * 2 // 8 == d).misses
                if s >= 10:
                    assert loads.misses[s - 10, layer, d] == misses
                    total[layer][d] += misses
    assert loads.misses.sum(0).tolist() == total
    assert loads.straggler_misses > loads.total_misses / 2


def test_simulated_policy_sees_the_simulated_cache() -> None:
    """caee_offload at a tiny theta fetches first routes and cached experts, so only first routes miss."""
    loads = simulate_devices(LAYERS, parse("caee_offload:theta=0.01"), None, 1, slots=6)
    first = [[len(set(LAYERS[layer].ids[s, :, 0].tolist())) for layer in range(2)] for s in range(STEPS)]
    assert (loads.misses[..., 0] <= torch.tensor(first)).all()
    assert (loads.experts[..., 0] > torch.tensor(first)).any()
    alone = simulate_devices(LAYERS, parse("native"), None, 1, slots=6)
    assert loads.total_misses < alone.total_misses
    assert simulate_devices(LAYERS, parse("native"), None, 1, slots=16, warm=20).total_misses <= 0.2


def test_recorded_steps_are_those_of_the_model() -> None:
    model, windows = model_of(), tiny.prompts(6, 6)
    layers = record_steps(model, windows, 3)
    with tiny.recorded(model) as calls:
        tiny.forward(model, windows[:, :-1])
    assert [layer.ids.shape for layer in layers] == [(2 * 4, 3, tiny.TOP_K)] * 2
    for layer, call in zip(layers, calls, strict=True):
        ids = call.ids.view(2, 3, 5, -1)[:, :, 1:]  # [batches, rows, positions, K]
        expected = ids.transpose(1, 2).flatten(0, 1).sort(-1).values
        assert torch.equal(layer.ids.sort(-1).values, expected)


def test_impossible_simulation_is_refused() -> None:
    with pytest.raises(ValueError, match="devices=9 must be between 1 and the number of experts, 8"):
        simulate_devices(LAYERS, parse("native"), None, 9)
    with pytest.raises(ValueError, match="warm=30 must be between 0 and 29"):
        simulate_devices(LAYERS, parse("native"), None, 2, warm=30)
    with pytest.raises(ValueError, match="slots=-1 must be at least 1"):
        simulate_devices(LAYERS, parse("native"), None, 2, slots=-1)
    with pytest.raises(ValueError, match="5 windows are not whole batches of 3"):
        record_steps(model_of(), tiny.prompts(5, 6), 3)


def test_each_layer_reads_its_statistics() -> None:
    """A policy gets the calibrated tensors of the layer that it decides for."""
    mean = torch.ones(2, 8)
    mean[0, :4], mean[1, 4:] = 1e6, 1e6
    facts = place_experts(model_of(), None, 1).facts
    stats = Stats(facts, {"energy_mean": mean})
    loads = simulate_devices(LAYERS, parse("static:budget=2"), stats, 2)
    assert loads.experts[:, 0, 0].float().mean() > 1.5
    assert loads.experts[:, 1, 1].float().mean() > 1.5
