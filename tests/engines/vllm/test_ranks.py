"""Placements read from an engine, counters of its ranks and their agreement, with fakes of vLLM's layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget.core.placement import Placement
from moebudget.core.stats import ModelFacts, Stats, StatsError, place
from moebudget.core.types import RowKind
from moebudget.engines.config import read_settings
from moebudget.engines.vllm.canary import canary
from moebudget.engines.vllm.compat import UnsupportedEngineError
from moebudget.engines.vllm.hook import Layer
from moebudget.engines.vllm.ranks import (
    RankCounters,
    check_agreement,
    fingerprint,
    rank_state,
    read_placements,
    stats_with_placement,
)
from moebudget.engines.vllm.route import make_router
from moebudget.engines.vllm.row_kinds import StepRows
from moebudget.methods.registry import parse
from tests.conftest import HIDDEN, make_problem
from tests.engines.vllm.fakes import CPU, make_layer

FACTS = ModelFacts("f", (1, 2), 6, 2, HIDDEN, "")


def expert_map(experts: list[int]) -> Tensor | None:
    """vLLM's map: an expert's place on this rank, -1 for other ranks' experts; the last entry is a shared expert."""
    if len(experts) == 6:
        return None
    return torch.tensor([experts.index(e) if e in experts else -1 for e in range(6)] + [len(experts)])


def layers_with(*experts: list[int]) -> list[Any]:
    """Layers of 6 experts, of which this rank holds the named ones."""
    return [
        SimpleNamespace(
            name=f"layer {number}",
            rank_counters=None,
            runner=SimpleNamespace(
                router=SimpleNamespace(global_num_experts=6),
                routed_experts=SimpleNamespace(expert_map_manager=SimpleNamespace(expert_map=expert_map(held))),
            ),
        )
        for number, held in enumerate(experts)
    ]


def test_placement_of_every_layer_is_read_from_all_ranks() -> None:
    here, first, last = [[2, 3], [0, 5]], [[0, 1], [1, 2]], [[4, 5], [3, 4]]
    placements = read_placements(layers_with(*here), lambda held: [first, held, last])
    assert [p.device.tolist() for p in placements] == [[0, 0, 1, 1, 2, 2], [1, 0, 0, 2, 2, 1]]
    assert [p.devices for p in placements] == [3, 3]
    [single] = read_placements(layers_with(list(range(6))), lambda held: [held])
    assert (single.device.tolist(), single.devices) == ([0] * 6, 1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([0, 1, 2], "layer 0: 2 of 2 ranks hold vLLM's expert 2"),
        ([0], "layer 0: 0 of 2 ranks hold vLLM's expert 1"),
    ],
)
def test_expert_on_two_ranks_or_on_none_is_refused(other: list[int], message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=message):
        read_placements(layers_with([2, 3, 4, 5]), lambda held: [held, [other]])


def test_placement_of_the_engine_replaces_that_of_the_file_and_keeps_its_costs() -> None:
    policy, in_file = parse("base_ep:budget=2"), Placement(torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    engine = [Placement(torch.tensor([1, 0, 1, 0, 1, 0]), 2), Placement(torch.tensor([0, 1, 0, 1, 0, 1]), 2)]
    cost = torch.arange(6.0)
    stats = place(Stats(FACTS, {"energy_mean": torch.ones(2, 6)}), Placement(in_file.device, 2, cost))
    tensors = stats_with_placement(policy, stats, engine).tensors
    assert tensors["placement_device"].tolist() == [p.device.tolist() for p in engine]
    assert tensors["placement_cost"].tolist() == [cost.tolist()] * 2
    assert "energy_mean" in tensors
    assert stats_with_placement(policy, FACTS, engine).tensors["placement_cost"].tolist() == [[1.0] * 6] * 2
    with pytest.raises(StatsError, match="1 placements for 2 layers"):
        stats_with_placement(policy, FACTS, engine[:1])


def test_policy_that_reads_devices_is_refused_on_one_device() -> None:
    single = [Placement.contiguous(6, 1)] * 2
    with pytest.raises(UnsupportedEngineError, match=r"'caee:theta=0.5' reads the devices .*enable-expert-parallel"):
        stats_with_placement(parse("caee:theta=0.5"), FACTS, single)


def test_placement_needs_no_statistics_file() -> None:
    settings = read_settings({"moebudget": {"policy": "xshare_ep:k0=1,m_device=2", "debug": True}})
    assert settings is not None
    assert (settings.stats, settings.debug) == (None, True)
    with pytest.raises(ValueError, match=r"needs statistics \(predictor_bias, predictor_weight\) and"):
        read_settings({"moebudget": {"policy": "base_ep:budget=2"}})
    with pytest.raises(ValueError, match="debug='yes' must be true or false"):
        read_settings({"moebudget": {"policy": "squared:budget=2", "debug": "yes"}})


def layer_on_ranks(step_rows: StepRows, text: str, ranks: int) -> Layer:
    """A layer of 16 experts, placed in equal blocks."""
    layer: Any = make_layer(step_rows)
    placement = Placement.contiguous(16, ranks)
    stats = stats_with_placement(
        parse(text), Stats(ModelFacts("f", (1,), 16, 4, HIDDEN, ""), predictor()), [placement]
    )
    route = make_router(parse(text), layer.spec, stats.layer(0), hidden=HIDDEN, max_rows=32, device=CPU)
    layer.activate(route, step_rows, RankCounters(placement, CPU))
    return layer


def predictor() -> dict[str, Tensor]:
    stats = make_problem("softmax", 1, 16, 4).stats
    return {name: stats[name][None] for name in ("predictor_weight", "predictor_bias")}


def test_budget_per_device_holds_and_fetched_experts_are_counted_per_rank() -> None:
    step_rows = StepRows(32, "cpu")
    layer: Any = layer_on_ranks(step_rows, "base_ep:budget=2", 4)
    canary(layer, step_rows, parse("base_ep:budget=2"), torch.float32)
    layer.rank_counters.clear()
    expected = torch.zeros(5)
    kind = torch.tensor([RowKind.DECODE] * 6 + [RowKind.NATIVE] * 3, dtype=torch.int8)
    for budget in (2, 1, 3):
        layer.route.set_budget(budget)
        hidden, logits = torch.randn(9, 32), torch.randn(9, 16)
        step_rows.kind[:9] = kind
        _, ids = layer.router._compute_routing(hidden, logits, None)
        loads = torch.tensor([len({u for u in ids[:6].flatten().tolist() if u // 4 == rank}) for rank in range(4)])
        assert loads.max() == budget
        expected += torch.cat([loads, loads.amax(0, keepdim=True)])
    assert rank_state([layer])["expert_parallel"] == {
        "ranks": 4,
        "fetched": expected[:4].tolist(),
        "fetched_most": float(expected[4]),
        "per_layer": [expected.tolist()],
    }


def test_copies_of_an_expert_are_counted_on_their_ranks() -> None:
    """Three experts in four copies on two ranks: the rows of expert 0 alternate between its copies 0 and 3."""
    maps = torch.tensor([[0, 3], [1, -1], [2, -1]])

    def copies(ids: Tensor) -> Tensor:
        turn = (torch.arange(len(ids)) % 2)[:, None] * (ids == 0)
        return maps[ids, turn]

    counters = RankCounters(Placement.contiguous(4, 2), CPU, copies=copies)
    ids = torch.tensor([[0, 1], [0, 1], [1, 2], [2, 1]])
    counters(ids, torch.tensor([RowKind.DECODE, RowKind.DECODE, RowKind.NATIVE, RowKind.DECODE]))
    assert counters.fetched is not None
    assert counters.fetched.tolist() == [2, 2, 2]  # copies 0 and 1, copies 2 and 3
    counters(ids, torch.tensor([RowKind.DECODE, RowKind.NATIVE, RowKind.NATIVE, RowKind.NATIVE]))
    assert counters.fetched.tolist() == [4, 2, 4]
    counters(ids, torch.tensor([RowKind.NATIVE, RowKind.DECODE, RowKind.PAD, RowKind.NATIVE]))
    assert counters.fetched.tolist() == [5, 3, 5]


def test_only_steps_in_which_ranks_choose_differently_count_as_different() -> None:
    ids = torch.tensor([[1, 2], [3, 4], [0, 7]])
    swapped, other = ids[[1, 0, 2]], torch.tensor([[1, 2], [3, 4], [0, 6]])
    prints = [fingerprint(choice) for choice in (ids, swapped, other)]
    assert fingerprint(ids.int()).tolist() == prints[0].tolist()
    assert len({tuple(p.tolist()) for p in prints}) == 3
    assert all(0 <= x < 65536 for p in prints for x in p.tolist())
    peer = prints[0]
    counters = RankCounters(Placement.contiguous(8, 1), CPU, 2, lambda local: local + peer)
    layers: list[Any] = [SimpleNamespace(name="the layer", rank_counters=counters)]
    for _ in range(3):
        counters(ids, torch.tensor([RowKind.DECODE] * 3))
    check_agreement(layers)
    assert rank_state(layers) == {"expert_parallel": None, "debug": {"compared": 3, "different": 0}}
    counters(other, torch.tensor([RowKind.NATIVE] * 3))  # without a vote, as vLLM warms up
    garbage, last = torch.tensor([[1, 2], [3, 4], [-1, 9]]), torch.tensor([2])
    peer_without_padding = fingerprint(ids.index_fill(0, last, -1))
    padded = RankCounters(Placement.contiguous(8, 1), CPU, 2, lambda local: local + peer_without_padding)
    padded(garbage, torch.tensor([RowKind.DECODE, RowKind.DECODE, RowKind.PAD]))
    assert padded.compared is not None
    assert padded.compared.tolist() == [1, 0]
    check_agreement(layers)
    counters(other, torch.tensor([RowKind.DECODE] * 3))
    with pytest.raises(RuntimeError, match="the layer: ranks chose different experts in 1 of 4 steps"):
        check_agreement(layers)


def test_fingerprints_of_many_choices_differ() -> None:
    """Neighbouring ids are moved against each other, which leaves a sum of products unchanged."""
    base = torch.arange(24).reshape(6, 4)
    seen = {tuple(fingerprint(base).tolist())}
    for i in range(24):
        for j in range(24):
            for step in (1, 2, -1):
                moved = base.clone().reshape(-1)
                moved[i] += step
                moved[j] -= 2 * step
                seen.add(tuple(fingerprint(moved.reshape(6, 4)).tolist()))
    assert len(seen) == 1 + 24 * 24 * 3


@pytest.mark.vllm
def test_gauges_show_the_least_the_most_and_the_slowest_rank() -> None:
    from prometheus_client import CollectorRegistry

    from moebudget.core.counters import COUNTERS
    from moebudget.engines.vllm.metrics import Gauges, agree

    def state(steps: float, fetched: list[float], most: float) -> dict[str, Any]:
        counters = dict.fromkeys(COUNTERS, 0.0) | {"steps": steps}
        parallel = {"ranks": len(fetched), "fetched": fetched, "fetched_most": most, "per_layer": []}
        return {"enabled": True, "budgets": None, "counters": counters, "per_layer": [], "expert_parallel": parallel}

    registry = CollectorRegistry()
    gauges = Gauges(registry)
    first, then = state(10, [30.0, 50.0, 20.0, 40.0], 60.0), state(14, [38.0, 62.0, 40.0, 44.0], 82.0)
    gauges.show([first] * 4)
    gauges.show([then] * 4)
    value = {bound: registry.get_sample_value("moebudget_rank_fetched_mean", {"bound": bound}) for bound in
             ("min", "max", "slowest")}  # fmt: skip
    assert value == {"min": 1.0, "max": 5.0, "slowest": 5.5}
    gauges.show([then] * 4)  # no step since
    assert registry.get_sample_value("moebudget_rank_fetched_mean", {"bound": "max"}) == 5.0
    assert agree([then, then])
    assert not agree([then, {**then, "expert_parallel": first["expert_parallel"]}])
