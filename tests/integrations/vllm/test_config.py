"""Settings at the start and changes while serving: what is refused, and whether the message helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moebudget.integrations.vllm.config import check_slots, read_change
from moebudget.presets import parse
from moebudget.settings import read_settings


def settings(**given: Any) -> Any:
    return read_settings({"moebudget": given})


def test_settings_are_lost(tmp_path: Path) -> None:
    stats = tmp_path / "s.safetensors"
    stats.touch()
    read = settings(policy="base:budget=16", stats=str(stats), budgets=[4, 8], enabled=False)
    assert read.policy == parse("base:budget=16")
    assert (read.stats, read.budgets, read.enabled) == (stats, (4, 8), False)
    assert settings(policy="squared:budget=2").enabled


@pytest.mark.parametrize("absent", [None, {}, {"other": 1}, "text"])
def test_engine_without_moebudget_is_capped(absent: object) -> None:
    assert read_settings(absent) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"policy": "base:budget=4"}, r"needs statistics \(predictor_bias, predictor_weight\) and `stats` is missing"),
        ({"policy": "base:budget=4", "stats": "none.safetensors"}, r"stats='none.safetensors': no such file"),
        ({"policy": "base:budget=4", "stats": 3}, "stats=3 must be the path"),
        (
            {"policy": "squared:budget=4", "budgts": [1]},
            r"unknown key 'budgts' \(did you mean 'budgets'\?\); known: pol",
        ),
        ({"policy": "squard:budget=4"}, "unknown policy 'squard'"),
        ({"budgets": [4]}, "policy=None must be a text"),
        ({"policy": "squared:budget=4", "budgets": 4}, "budgets=4 must be a list"),
        ({"policy": "squared:budget=4", "budgets": [4, 0]}, "budget=0 must be a whole number of at least 1"),
        ({"policy": "squared:budget=4", "budgets": [4, True]}, "budget=True must be a whole number"),
        ({"policy": "oea:k0=1", "budgets": [4]}, "has no budget to change"),
        ({"policy": "squared:budget=4", "enabled": "no"}, "enabled='no' must be true or false"),
        ({"policy": "oracle:budget=4"}, "needs the true output energies"),
    ],
)
def test_wrong_setting_is_taken(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        settings(**given)
    with pytest.raises(ValueError, match="must be an object, as in"):
        read_settings({"moebudget": "base:budget=4"})


def test_number_is_not_spread_over_layers() -> None:
    policy = parse("squared:budget=4")
    assert policy.layer_budgets(8, 3) == (8, 8, 8)
    assert policy.layer_budgets([1, 2, 3], 3) == (1, 2, 3)
    with pytest.raises(ValueError, match="2 budgets were given and the model has 3 Mixture-of-Experts layers"):
        policy.layer_budgets([1, 2], 3)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"budget": 5}, ((5, 5), None)),
        ({"budget": [5, 6], "enabled": True}, ((5, 6), True)),
        ({"enabled": False}, (None, False)),
    ],
)
def test_change_is_misread(body: object, expected: object) -> None:
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
def test_wrong_change_is_taken(body: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_change(body, parse("squared:budget=4"), 2)


def test_change_of_a_policy_without_budget_is_taken() -> None:
    with pytest.raises(ValueError, match="has no budget to change"):
        read_change({"budget": 4}, parse("oea:k0=1"), 2)


def test_policy_with_more_slots_than_the_model_starts() -> None:
    check_slots(parse("oea:k0=1,k_max=4"), 4)
    with pytest.raises(ValueError, match="k_max=6 exceeds the 4 experts a token"):
        check_slots(parse("oea:k0=1,k_max=6"), 4)
