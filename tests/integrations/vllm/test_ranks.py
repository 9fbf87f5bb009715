"""Placements read from an engine, counters of its ranks, and their comparison, with stand-ins for vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget.integrations.vllm.board import KEEPS, PADDING, VOTES, Board
from moebudget.integrations.vllm.checks import canary
from moebudget.integrations.vllm.hook import Layer
from moebudget.integrations.vllm.layout import UnsupportedEngineError
from moebudget.integrations.vllm.ranks import Watch, check_agreement, fingerprint, placed, read_placements, watched
from moebudget.integrations.vllm.route import make_router
from moebudget.placement import Placement
from moebudget.presets import parse
from moebudget.settings import read_settings
from moebudget.stats import ModelFacts, Stats, StatsError, place
from tests.conftest import HIDDEN, make_problem
from tests.integrations.vllm.test_checks import probed
from tests.integrations.vllm.test_route import make_layer

CPU = torch.device("cpu")
LAST = torch.tensor([2])
FACTS = ModelFacts("f", (1, 2), 6, 2, HIDDEN, "")


def map_of(experts: list[int]) -> Tensor | None:
    """vLLM's: the place of an expert among those of its rank, -1 for the other ranks'; and one of a shared expert."""
    if len(experts) == 6:
        return None
    return torch.tensor([experts.index(e) if e in experts else -1 for e in range(6)] + [len(experts)])


def holding(*experts: list[int]) -> list[Any]:
    """Layers of an engine of 6 experts whose own rank holds these."""
    return [
        SimpleNamespace(
            name=f"layer {number}",
            watch=None,
            runner=SimpleNamespace(
                router=SimpleNamespace(global_num_experts=6),
                routed_experts=SimpleNamespace(expert_map_manager=SimpleNamespace(expert_map=map_of(some))),
            ),
        )
        for number, some in enumerate(experts)
    ]


def test_expert_is_placed_on_the_rank_of_another_layer() -> None:
    mine, others = [[2, 3], [0, 5]], [[[0, 1], [1, 2]], [[4, 5], [3, 4]]]
    found = read_placements(holding(*mine), lambda own: [others[0], own, others[1]])
    assert [p.device.tolist() for p in found] == [[0, 0, 1, 1, 2, 2], [1, 0, 0, 2, 2, 1]]
    assert [p.devices for p in found] == [3, 3]
    alone = read_placements(holding(list(range(6))), lambda own: [own])
    assert (alone[0].device.tolist(), alone[0].devices) == ([0] * 6, 1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([0, 1, 2], "layer 0: vLLM's expert 2 lies on 2 of 2 ranks"),
        ([0], "layer 0: vLLM's expert 1 lies on 0 of 2 ranks"),
    ],
)
def test_expert_on_two_ranks_or_on_none_is_placed(other: list[int], message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=message):
        read_placements(holding([2, 3, 4, 5]), lambda own: [own, [other]])


def test_placement_of_the_file_wins_over_the_engines() -> None:
    policy, there = parse("base_ep:budget=2"), Placement(torch.tensor([0, 0, 0, 1, 1, 1]), 2)
    here = [Placement(torch.tensor([1, 0, 1, 0, 1, 0]), 2), Placement(torch.tensor([0, 1, 0, 1, 0, 1]), 2)]
    cost = torch.arange(6.0)
    known = place(Stats(FACTS, {"energy_mean": torch.ones(2, 6)}), Placement(there.device, 2, cost))
    found = placed(policy, known, here).tensors
    assert found["placement_device"].tolist() == [p.device.tolist() for p in here]
    assert found["placement_cost"].tolist() == [cost.tolist()] * 2
    assert "energy_mean" in found
    assert placed(policy, FACTS, here).tensors["placement_cost"].tolist() == [[1.0] * 6] * 2
    with pytest.raises(StatsError, match="1 placements for 2 layers"):
        placed(policy, FACTS, here[:1])


def test_rule_of_several_devices_serves_on_one() -> None:
    one = [Placement.contiguous(6, 1)] * 2
    with pytest.raises(
        UnsupportedEngineError, match=r"'caee:theta=0.5' looks at the devices .*enable-expert-parallel"
    ):
        placed(parse("caee:theta=0.5"), FACTS, one)


def test_placement_is_asked_of_a_file() -> None:
    settings = read_settings({"moebudget": {"policy": "xshare_ep:k0=1,m_device=2", "debug": True}})
    assert settings is not None
    assert (settings.stats, settings.debug) == (None, True)
    with pytest.raises(ValueError, match=r"needs statistics \(predictor_bias, predictor_weight\) and"):
        read_settings({"moebudget": {"policy": "base_ep:budget=2"}})
    with pytest.raises(ValueError, match="debug='yes' must be true or false"):
        read_settings({"moebudget": {"policy": "squared:budget=2", "debug": "yes"}})


def on_ranks(board: Board, text: str, ranks: int) -> Layer:
    """A layer of 16 experts in equal blocks on some ranks."""
    layer: Any = probed(make_layer(board))
    placement = Placement.contiguous(16, ranks)
    stats = placed(parse(text), Stats(ModelFacts("f", (1,), 16, 4, HIDDEN, ""), one_layer()), [placement])
    route = make_router(parse(text), layer.spec, stats.layer(0), hidden=HIDDEN, max_rows=32, device=CPU)
    layer.activate(route, board, Watch(placement, CPU))
    return layer


def one_layer() -> dict[str, Tensor]:
    stats = make_problem("softmax", 1, 16, 4).stats
    return {name: stats[name][None] for name in ("predictor_weight", "predictor_bias")}


def test_budget_of_a_device_is_exceeded_or_its_counter_is_wrong() -> None:
    board = Board(32, "cpu")
    layer: Any = on_ranks(board, "base_ep:budget=2", 4)
    canary(layer, board, parse("base_ep:budget=2"), torch.float32)
    layer.watch.clear()
    wanted = torch.zeros(5)
    rows = torch.tensor([VOTES] * 6 + [KEEPS] * 3, dtype=torch.int8)
    for budget in (2, 1, 3):
        layer.route.set_budget(budget)
        hidden, logits = torch.randn(9, 32), torch.randn(9, 16)
        board.rows[:9] = rows
        _, ids = layer.router._compute_routing(hidden, logits, None)
        loads = torch.tensor([len({u for u in ids[:6].flatten().tolist() if u // 4 == rank}) for rank in range(4)])
        assert loads.max() == budget
        wanted += torch.cat([loads, loads.amax(0, keepdim=True)])
    assert watched([layer])["expert_parallel"] == {
        "ranks": 4,
        "fetched": wanted[:4].tolist(),
        "fetched_most": float(wanted[4]),
        "per_layer": [wanted.tolist()],
    }


def test_copies_of_an_expert_are_charged_as_one_or_to_its_first_rank() -> None:
    """Three experts in four copies on two ranks: the rows of expert 0 take its copies 0 and 3 in turns."""
    maps = torch.tensor([[0, 3], [1, -1], [2, -1]])

    def copies(ids: Tensor) -> Tensor:
        turn = (torch.arange(len(ids)) % 2)[:, None] * (ids == 0)
        return maps[ids, turn]

    watch = Watch(Placement.contiguous(4, 2), CPU, copies=copies)
    ids = torch.tensor([[0, 1], [0, 1], [1, 2], [2, 1]])
    watch(ids, torch.tensor([VOTES, VOTES, KEEPS, VOTES]))
    assert watch.fetched is not None
    assert watch.fetched.tolist() == [2, 2, 2]  # copies 0 and 1, copies 2 and 3
    watch(ids, torch.tensor([VOTES, KEEPS, KEEPS, KEEPS]))
    assert watch.fetched.tolist() == [4, 2, 4]
    watch(ids, torch.tensor([KEEPS, VOTES, PADDING, KEEPS]))
    assert watch.fetched.tolist() == [5, 3, 5]


def test_ranks_that_choose_alike_differ_or_others_do_not() -> None:
    ids = torch.tensor([[1, 2], [3, 4], [0, 7]])
    swapped, other = ids[[1, 0, 2]], torch.tensor([[1, 2], [3, 4], [0, 6]])
    prints = [fingerprint(some) for some in (ids, swapped, other)]
    assert fingerprint(ids.int()).tolist() == prints[0].tolist()
    assert len({tuple(p.tolist()) for p in prints}) == 3
    assert all(0 <= x < 65536 for p in prints for x in p.tolist())
    peer = prints[0]
    watch = Watch(Placement.contiguous(8, 1), CPU, 2, lambda own: own + peer)
    layers: list[Any] = [SimpleNamespace(name="the layer", watch=watch)]
    for _ in range(3):
        watch(ids, torch.tensor([VOTES] * 3))
    check_agreement(layers)
    assert watched(layers) == {"expert_parallel": None, "debug": {"compared": 3, "different": 0}}
    watch(other, torch.tensor([KEEPS] * 3))  # no step: vLLM warms up
    garbage = torch.tensor([[1, 2], [3, 4], [-1, 9]])
    padded = Watch(Placement.contiguous(8, 1), CPU, 2, lambda own: own + fingerprint(ids.index_fill(0, LAST, -1)))
    padded(garbage, torch.tensor([VOTES, VOTES, PADDING]))
    assert padded.compared is not None
    assert padded.compared.tolist() == [1, 0]
    check_agreement(layers)
    watch(other, torch.tensor([VOTES] * 3))
    with pytest.raises(RuntimeError, match="the layer: ranks chose different experts in 1 of 4 steps"):
        check_agreement(layers)


def test_fingerprints_of_many_choices_collide() -> None:
    """Neighbouring ids moved against each other, which a sum of products would not see."""
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
def test_series_grow_with_the_ranks_or_mix_up_their_bounds() -> None:
    from prometheus_client import CollectorRegistry

    from moebudget.integrations.vllm.metrics import Gauges, agree
    from moebudget.runtime import FIELDS

    def state(steps: float, fetched: list[float], most: float) -> dict[str, Any]:
        counters = dict.fromkeys(FIELDS, 0.0) | {"steps": steps}
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
