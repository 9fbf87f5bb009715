"""Settings in vLLM's additional_config: how they are read, and the messages for wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moebudget.engines.config import read_settings
from moebudget.methods.registry import parse


def settings(**fields: Any) -> Any:
    return read_settings({"moebudget": fields})


def test_settings_are_read(tmp_path: Path) -> None:
    stats = tmp_path / "s.safetensors"
    stats.touch()
    read = settings(policy="base:budget=16", stats=str(stats), budgets=[4, 8], enabled=False)
    assert read.policy == parse("base:budget=16")
    assert (read.stats, read.budgets, read.enabled) == (stats, (4, 8), False)
    assert settings(policy="squared:budget=2").enabled


@pytest.mark.parametrize("config", [None, {}, {"other": 1}, "text"])
def test_config_without_moebudget_has_no_settings(config: object) -> None:
    assert read_settings(config) is None


@pytest.mark.parametrize(
    ("fields", "message"),
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
def test_wrong_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        settings(**fields)
    with pytest.raises(ValueError, match="must be an object, as in"):
        read_settings({"moebudget": "base:budget=4"})


def test_one_budget_serves_every_layer() -> None:
    policy = parse("squared:budget=4")
    assert policy.layer_budgets(8, 3) == (8, 8, 8)
    assert policy.layer_budgets([1, 2, 3], 3) == (1, 2, 3)
    with pytest.raises(ValueError, match="2 budgets were given and the model has 3 Mixture-of-Experts layers"):
        policy.layer_budgets([1, 2], 3)
