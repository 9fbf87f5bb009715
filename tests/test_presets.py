from __future__ import annotations

import random
from typing import Any

import pytest

from moebudget import presets
from moebudget.fill import Backfill, Drop, FirstRoutes
from moebudget.presets import FILLS, PRESETS, parse
from moebudget.score import PredictedEnergy, RouteRank, RouterMass, SquaredWeight, StaticEnergy, TrueEnergy
from moebudget.select import TopBudget, Union, Voted

BUDGETED = ("router_mass", "squared", "static", "base", "oracle")


def random_fields(name: str, rng: random.Random) -> dict[str, Any]:
    if name == "dense":
        return {}
    if name == "topk":
        return {"k": rng.randint(1, 9)}
    fields: dict[str, Any] = {"k0" if name == "oea" else "budget": rng.randint(1, 500)}
    return fields | ({"fill": rng.choice(list(FILLS))} if rng.random() < 0.7 else {})


@pytest.mark.parametrize("name", PRESETS)
def test_policy_is_read_other_than_it_is_written(name: str) -> None:
    rng = random.Random(name)
    for _ in range(30):
        fields = random_fields(name, rng)
        policy = PRESETS[name](**fields)
        assert parse(str(policy)) == policy
        assert str(parse(str(policy))) == str(policy)
        given = [f"{key}={value}" for key, value in fields.items()]
        rng.shuffle(given)
        assert parse(f" {name}:" + " , ".join(given)) == policy


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("dense", "dense"),
        ("dense:", "dense"),
        ("topk:k=2", "topk:k=2"),
        ("oea:k0=3,fill=executed", "oea:k0=3"),
        ("oea:fill=original,k0=3", "oea:k0=3,fill=original"),
        ("base:budget=10,fill=original", "base:budget=10"),
        (" base: fill = drop , budget = 010, ", "base:budget=10,fill=drop"),
    ],
)
def test_spelling_is_not_the_shortest(text: str, written: str) -> None:
    assert str(parse(text)) == written


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("router_mass", RouterMass()),
        ("squared", SquaredWeight()),
        ("static", StaticEnergy()),
        ("base", PredictedEnergy()),
        ("oracle", TrueEnergy()),
    ],
)
def test_budgeted_preset_is_made_of_other_pieces(name: str, score: Any) -> None:
    policy = PRESETS[name](7)
    assert (policy.score, policy.select, policy.fill) == (score, TopBudget(7), Backfill("original"))
    assert policy.budget == 7
    assert PRESETS[name](7, fill="executed").fill == Backfill("executed")
    assert PRESETS[name](7, fill="drop").fill == Drop()


def test_preset_without_a_budget_is_made_of_other_pieces() -> None:
    dense, topk, oea = presets.dense(), presets.topk(2), presets.oea(2)
    assert (dense.select, dense.fill) == (Union(), Drop())
    assert (topk.score, topk.select, topk.fill) == (RouteRank(2), Voted(), FirstRoutes(2))
    assert (oea.score, oea.select, oea.fill) == (RouteRank(2), Voted(), Backfill("executed"))
    assert [p.budget for p in (dense, topk, oea)] == [None] * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bsae:budget=10", r"unknown policy 'bsae' \(did you mean 'base'\?\); known: dense, topk, oea, router_mass"),
        ("zzz", "unknown policy 'zzz'; known: dense, .*base, oracle"),
        ("", "unknown policy ''; known: dense"),
        ("base:bugdet=10", r"base: unknown field 'bugdet' \(did you mean 'budget'\?\); known: budget, fill"),
        ("base:budget=10,k0=2", "base: unknown field 'k0'; known: budget, fill"),
        ("dense:budget=10", "dense: unknown field 'budget'; known: none"),
        ("base:10", r"base: unknown setting \(field=value expected\) '10'; known: budget, fill"),
        ("base", "base: budget is missing; write for example base:budget=8"),
        ("base:fill=drop", "base: budget is missing"),
        ("oea", "oea: k0 is missing; write for example oea:k0=8"),
        ("topk:", "topk: k is missing"),
        ("base:budget=10,budget=11", "base: budget is given twice in 'base:budget=10,budget=11'"),
        ("base:budget=10,fill=zero", "base: unknown fill 'zero'; known fills: original, executed, drop"),
        ("oea:k0=1,fill=", "oea: unknown fill ''"),
        ("base:budget=0", "base: budget=0 must be at least 1"),
        ("base:budget=-1", "base: budget=-1 must be at least 1"),
        ("base:budget=1.5", "base: budget='1.5' is not a whole number; .*base:budget=8"),
        ("base:budget=ten", "base: budget='ten' is not a whole number"),
        ("base:budget=True", "base: budget='True' is not a whole number"),
        ("base:budget=", "base: budget='' is not a whole number"),
        ("topk:k=0", "topk: k=0 must be at least 1"),
        ("oea:k0=-3", "oea: k0=-3 must be at least 1"),
    ],
)
def test_misspelt_policy_is_accepted_or_not_explained(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        parse(text)


@pytest.mark.parametrize("name", [*BUDGETED, "topk", "oea"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "ten", True, None, 10.0], ids=repr)
def test_impossible_number_is_accepted(name: str, value: Any) -> None:
    field = {"topk": "k", "oea": "k0"}.get(name, "budget")
    with pytest.raises(ValueError, match=f"^{name}: {field}={value!r} .*"):
        PRESETS[name](**{field: value})
