"""RPC methods of a worker, and requests that change a running engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from moebudget.engines.vllm.rpc import moebudget_set, moebudget_state, read_change
from moebudget.methods.registry import parse


def test_worker_without_a_policy_has_no_state_and_refuses_changes() -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    assert moebudget_state(worker) is None
    with pytest.raises(ValueError, match='started without "moebudget"'):
        moebudget_set(worker, 4)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"budget": 5}, ((5, 5), None)),
        ({"budget": [5, 6], "enabled": True}, ((5, 6), True)),
        ({"enabled": False}, (None, False)),
    ],
)
def test_change_is_read(body: object, expected: object) -> None:
    assert read_change(body, parse("squared:budget=4"), 2) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"budget": 0}, "budget=0 must be a whole number of at least 1"),
        ({"budget": "8"}, "budget='8' must be a whole number"),
        ({"budget": 2.5}, "budget=2.5 must be a whole number"),
        ({"budget": [1]}, "1 budgets were given and the model has 2"),
        ({"budgets": 4}, "unknown key 'budgets'"),
        ({"enabled": 1}, "enabled=1 must be true or false"),
        ({"budget": None}, "neither budget nor enabled has a value"),
        ({}, "must be an object with budget or enabled"),
        ([4], "must be an object with budget or enabled"),
    ],
)
def test_wrong_change_is_refused(body: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_change(body, parse("squared:budget=4"), 2)


def test_budget_of_a_policy_without_one_is_refused() -> None:
    with pytest.raises(ValueError, match="has no budget to change"):
        read_change({"budget": 4}, parse("oea:k0=1"), 2)
