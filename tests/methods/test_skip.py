"""Dynamic skipping: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import pytest
import torch

from moebudget.core.router import RouterSpec
from moebudget.core.types import LayerStats
from moebudget.methods.registry import parse
from tests.conftest import used_slots
from tests.methods.steps import (
    hand_made,
    is_native,
    one_row,
    run,
)


def test_skip_of_two_routes_is_the_papers() -> None:
    """beta = 0.5: a second weight of a third of the first goes, one of two thirds stays."""
    stats = {"route_ratio": torch.tensor([1.0, 0.5])}
    (routes,) = used_slots(run("skip", one_row({2: 0.75, 1: 0.25}, 3, **stats)))
    assert routes == [(2, pytest.approx(1.0))]
    assert is_native("skip", one_row({2: 0.6, 1: 0.4}, 3, **stats))
    assert is_native("skip:scale=0.6", one_row({2: 0.75, 1: 0.25}, 3, **stats))


def test_rules_by_weight_ignore_the_bias() -> None:
    """The bias ranks the light expert 0 first; the ratio of rank 2 and `p = 1` are about the heavy expert 1."""
    logits, bias = torch.tensor([[-1.0, 3.0, -9.0]]), torch.tensor([5.0, 0.0, 0.0])
    batch = RouterSpec(3, 2, "sigmoid")(torch.ones(1, 2), logits, bias=bias)
    stats = LayerStats({"route_ratio": torch.tensor([0.0, 0.9]), **hand_made({(0, 1): 0.5}, {(0, 1): 0.5}, 3)})
    assert batch.ids.tolist() == [[0, 1]]
    assert [[u for u, _ in row] for row in used_slots(parse("skip")(batch, stats))] == [[1]]
    assert parse("exfold_prefill:p=1")(batch, stats).ids.tolist() == [[1, 1]]
