from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget.core.layer_router import LayerRouter
from moebudget.core.placement import Placement
from moebudget.core.stats import ModelFacts, Stats, StatsError, place, require_stats
from moebudget.core.types import MissingStatisticError
from moebudget.methods.registry import parse
from tests.conftest import make_problem

FACTS = ModelFacts("qwen3_moe", (1, 2, 5), 4, 2, 6, "0123456789ab")


def on(*devices: int) -> Tensor:
    return torch.tensor(devices)


def test_contiguous_placement_makes_equal_blocks() -> None:
    assert Placement.contiguous(8, 2).device.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    for experts, devices in ((60, 8), (7, 3), (5, 5), (4, 1)):
        device = Placement.contiguous(experts, devices).device
        sizes = torch.bincount(device, minlength=devices)
        assert sizes.max() - sizes.min() <= 1
        assert torch.equal(device, device.sort().values)


def test_resident_experts_alone_cost_nothing() -> None:
    resident = torch.tensor([False, True, False, False])
    tensors = Placement.contiguous(4, 2, resident).tensors()
    assert tensors["placement_cost"].tolist() == [1, 0, 1, 1]
    assert tensors["placement_device"].dtype is torch.int64
    cost = torch.tensor([3, 4, 0, 2])
    tensors = Placement(on(1, 0, 0, 1).int(), 2, cost, resident).tensors()
    assert tensors["placement_cost"].tolist() == [3, 0, 0, 2]
    assert tensors["placement_cost"].dtype is torch.float32
    assert tensors["placement_device"].tolist() == [1, 0, 0, 1]
    assert tensors["placement_device"].dtype is torch.int64


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ((on(0, 1, -1), 2), r"expert 2 has no device \(-1\)"),
        ((on(0, 2, 1), 2), r"expert 1 is on device 2, but there are 2: 0\.\.1"),
        ((on(0, 0), 0), "devices=0 must be at least 1"),
        ((on(0, 0), -2), "devices=-2 must be at least 1"),
        ((torch.zeros(3), 1), r"one whole number per expert, \[N\]; it is \(3,\) torch.float32"),
        ((torch.zeros(3, dtype=torch.bool), 1), "one whole number per expert"),
        ((torch.zeros(2, 3, dtype=torch.int64), 1), r"it is \(2, 3\)"),
        ((on(0, 1), 2, torch.ones(3)), r"cost has shape \(3,\), the placement has 2 experts"),
        ((on(0, 1), 2, None, torch.ones(1).bool()), r"resident has shape \(1,\), the placement has 2 experts"),
        ((on(0, 1), 2, None, torch.ones(2)), "resident must be bool"),
        (
            (on(0, 1), 2, torch.tensor([1.0, -0.5])),
            "expert 1 costs -0.5: every cost must be a finite number of at least 0",
        ),
        ((on(0, 1), 2, torch.tensor([math.nan, 1.0])), "expert 0 costs nan"),
        ((on(0, 1), 2, torch.tensor([1.0, math.inf])), "expert 1 costs inf"),
    ],
)
def test_impossible_placements_are_refused(fields: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Placement(*fields)


@pytest.mark.parametrize("devices", [0, -1, 5])
def test_more_devices_than_experts_are_refused(devices: int) -> None:
    with pytest.raises(ValueError, match=f"devices={devices} must be between 1 and the number of experts, 4"):
        Placement.contiguous(4, devices)


def test_placements_go_to_their_layers() -> None:
    every = [Placement(on(0, 0, 1, 1), 2), Placement(on(1, 1, 0, 0), 2), Placement.contiguous(4, 4)]
    stats = Stats(FACTS, {"energy_mean": torch.ones(3, 4)})
    for where in (place(stats, every), place(FACTS, every)):
        assert [where.layer(i)["placement_device"].tolist() for i in range(3)] == [p.device.tolist() for p in every]
        assert where.facts == FACTS
    assert "energy_mean" in place(stats, every).tensors
    assert set(stats.tensors) == {"energy_mean"}
    same = place(place(stats, every), every[0])
    assert same.tensors["placement_device"].tolist() == [[0, 0, 1, 1]] * 3


def test_placements_of_another_model_are_refused() -> None:
    one = Placement.contiguous(4, 2)
    for number in (0, 2, 4):
        with pytest.raises(StatsError, match=f"^{number} placements for 3 layers: give one, or one per layer"):
            place(FACTS, [one] * number)
    with pytest.raises(StatsError, match="placement of layer 2 has 8 experts, the model has 4"):
        place(FACTS, [one, Placement.contiguous(8, 2), one])
    with pytest.raises(StatsError, match="placement of layer 1 has 8 experts"):
        place(FACTS, Placement.contiguous(8, 2))


@pytest.mark.parametrize("text", ["xshare_balanced:m=4", "xshare_ep:k0=1,m_device=1", "caee:theta=1"])
def test_missing_placements_name_the_way_out(text: str) -> None:
    policy, says = parse(text), r"placement_.*Placement\.contiguous\(experts, devices=4\).*--devices 4"
    with pytest.raises(MissingStatisticError, match=says):
        require_stats(text, policy.needs, None)
    with pytest.raises(MissingStatisticError, match=says):
        Stats(FACTS, {}).check(FACTS, policy.needs)
    with pytest.raises(MissingStatisticError, match=says):
        LayerRouter(policy)
    placed = place(dataclasses.replace(FACTS, experts=64), Placement.contiguous(64, 4))
    problem = make_problem("sigmoid_bias", 4, 64, 4)
    assert LayerRouter(policy, placed.layer(0))(problem.batch).weights.isfinite().all()
