from __future__ import annotations

import inspect
import math
import random
import re
from typing import Any

import pytest

from moebudget import presets
from moebudget.fill import Backfill, Drop, OwnRoutes
from moebudget.presets import EXAMPLES, PRESETS, parse
from moebudget.rivals import DEVICE_SCORES, METRICS, YES_NO
from moebudget.score import (
    COSTS,
    NonlinearEnergy,
    PredictedEnergy,
    RouteRank,
    RouterMass,
    SquaredWeight,
    StaticEnergy,
    TrueEnergy,
)
from moebudget.select import TopBudget, Union, Voted
from moebudget.spelling import FILLS

BUDGETED = ("router_mass", "squared", "static", "base", "nonlinear", "oracle", "spread", "price", "base_ep")
WORDS = {
    "metric": METRICS,
    "guard": YES_NO,
    "additive": YES_NO,
    "protect": YES_NO,
    "floor": YES_NO,
    "level": YES_NO,
    "score": tuple(DEVICE_SCORES),
    "fill": tuple(FILLS),
    "cost": tuple(COSTS),
}


def random_value(field: str, annotation: str, rng: random.Random) -> Any:
    if field in WORDS:
        return rng.choice(WORDS[field])
    if "float" in annotation:
        return rng.choice((1, 1.0, 0.1, 1e-5, rng.random(), 0.5))
    return rng.randint(1, 500)


def random_fields(name: str, rng: random.Random) -> dict[str, Any]:
    """Every field that must be given, and some of the others."""
    fields = {}
    for field, parameter in inspect.signature(PRESETS[name]).parameters.items():
        if parameter.default is parameter.empty or rng.random() < 0.6:
            fields[field] = random_value(field, str(parameter.annotation), rng)
    for limit in {"k_max", "max_rank"} & set(fields):
        fields[limit] = max(fields[limit], fields["k0"])
        fields["fill"] = rng.choice(("original", "executed", "preserved"))
    return fields


@pytest.mark.parametrize("name", PRESETS)
def test_policy_is_read_other_than_it_is_written(name: str) -> None:
    rng = random.Random(name)
    for _ in range(60):
        fields = random_fields(name, rng)
        policy = PRESETS[name](**fields)
        assert parse(str(policy)) == policy
        assert str(parse(str(policy))) == str(policy) == policy.name
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
        ("oea:k0=2,p=1,fill=executed", "oea:k0=2"),
        ("oea:max_rank=12,k0=2,p=0.60", "oea:k0=2,p=0.6,max_rank=12"),
        ("sere:s=1,rho=0,metric=frobenius", "sere:s=1"),
        ("sere:s=1,rho=0.0", "sere:s=1"),
        ("lynx:alpha=3.0,beta=0", "lynx:alpha=3"),
        ("xshare:k0=0,m=4,m_request=0,additive=yes", "xshare:k0=0,m=4"),
        ("caee:theta=1.0,guard=yes", "caee:theta=1"),
        ("skip:scale=1", "skip"),
        ("dmoe:share=0.6", "dmoe"),
        ("des_vote:beta=.15", "des_vote"),
        ("acceptmoe:scale=1e0", "acceptmoe"),
        ("reap_static:budget=4,protect=yes", "reap_static:budget=4"),
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
        ("nonlinear", NonlinearEnergy()),
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
    assert (topk.score, topk.select, topk.fill) == (RouteRank(2), Voted(), OwnRoutes(RouteRank(2)))
    assert (oea.score, oea.select, oea.fill) == (RouteRank(2), Voted(), Backfill("executed"))
    assert presets.oea(2, 0.5, 4, 9, "original").fill == Backfill("original", 4, 9)
    assert [p.budget for p in (dense, topk, oea)] == [None] * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "bsae:budget=10",
            r"unknown policy 'bsae' \(did you mean 'base'\?\); known: dense, topk, oea, sere, .*oracle",
        ),
        ("zzz", "unknown policy 'zzz'; known: dense, .*oracle, base_ep, spread, price, worth$"),
        ("", "unknown policy ''; known: dense"),
        ("base:bugdet=10", r"base: unknown field 'bugdet' \(did you mean 'budget'\?\); known: budget, fill, relative"),
        ("base:budget=10,k0=2", "base: unknown field 'k0'; known: budget, fill, relative"),
        ("dense:budget=10", "dense: unknown field 'budget'; known: none"),
        ("base:10", r"base: unknown setting \(field=value expected\) '10'; known: budget, fill, relative"),
        ("base", "base: budget is missing; write for example base:budget=8"),
        ("base:fill=drop", "base: budget is missing"),
        ("oea", "oea: k0 is missing; write for example oea:k0=2"),
        ("topk:", "topk: k is missing"),
        ("base:budget=10,budget=11", "base: budget is given twice in 'base:budget=10,budget=11'"),
        (
            "base:budget=10,fill=zero",
            "base: unknown fill 'zero'; known fills: original, executed, half, preserved, drop, substitute",
        ),
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


def test_example_is_no_policy_or_the_error_shows_none() -> None:
    assert list(EXAMPLES) == list(PRESETS)
    for name, example in EXAMPLES.items():
        assert parse(example).name.startswith(name)
        needed = [f for f, p in inspect.signature(PRESETS[name]).parameters.items() if p.default is p.empty]
        if needed:
            with pytest.raises(ValueError, match=f"^{name}: {needed[0]} is missing; write for example {example}$"):
                parse(name)


OURS = ("base", "base_ep", "spread", "price")
NUMBERS = ("oea p", "sere rho", "lynx alpha", "caee theta", "caee_offload theta", "skip scale")
NUMBERS = (*NUMBERS, "des_vote beta", "dmoe share", "acceptmoe scale", *(f"{p} relative" for p in OURS), "price hold")
NUMBERS = (*NUMBERS, "worth least")
ZERO = ("sere rho", *(f"{p} relative" for p in OURS), "price hold")
SHARES = ("oea p", "caee_offload theta", "des_vote beta", "dmoe share", *ZERO[1:])
COUNTS = ("oea k0", "oea k_max", "oea max_rank", "sere s", "exfold budget", "exfold_static budget", "exfold_prefill p")
COUNTS = (*COUNTS, "xshare_balanced m", "reap budget", "reap_static budget", "moe_spec budget", "nonlinear budget")
COUNTS = (*COUNTS, *(f"{p} budget" for p in OURS), "price ceiling")
FROM_ZERO = ("lynx beta", "lynx_lat drop", "xshare k0", "xshare m", "xshare m_request")
FROM_ZERO = (*FROM_ZERO, "xshare_ep k0", "xshare_ep m_device")
CHOICES = ("sere metric", "xshare additive", "xshare_ep additive", "caee guard", "reap_static protect")
CHOICES = (
    *CHOICES,
    "oea fill",
    "moe_spec fill",
    "nonlinear fill",
    *(f"{p} fill" for p in OURS),
    "spread floor",
    "price floor",
    "worth cost",
    "worth fill",
    *(f"{p} level" for p in OURS if p != "base_ep"),
    "xshare_ep score",
)


def with_field(owner: str, value: Any) -> tuple[str, str, dict[str, Any]]:
    """The preset's example with one field at another value."""
    name, field = owner.split()
    _, _, text = EXAMPLES[name].partition(":")
    fields: dict[str, Any] = {}
    for part in text.split(","):
        key, _, given = part.partition("=")
        fields[key] = float(given) if "." in given else int(given)
    return name, field, fields | {field: value}


def refuses(owner: str, value: Any, why: str) -> None:
    name, field, fields = with_field(owner, value)
    with pytest.raises(ValueError, match=f"^{name}: {field}={re.escape(repr(value))} {why}"):
        PRESETS[name](**fields)


def test_a_parameter_of_a_preset_is_not_tried() -> None:
    tried = {*NUMBERS, *COUNTS, *FROM_ZERO, *CHOICES}
    rivals = list(PRESETS)[list(PRESETS).index("oea") : list(PRESETS).index("acceptmoe") + 1]
    fields = {name: inspect.signature(PRESETS[name]).parameters for name in (*rivals, "nonlinear", *OURS, "worth")}
    assert tried == {f"{name} {field}" for name in fields for field in fields[name]}


@pytest.mark.parametrize("owner", NUMBERS)
def test_impossible_share_or_threshold_is_accepted(owner: str) -> None:
    name, field, fields = with_field(owner, 0)
    limit = " and at most 1" if owner in SHARES else ""
    least = "at least" if owner in ZERO else "above"
    for value in (math.nan, math.inf, -math.inf, "0.5", None, True, False, [1.0]):
        refuses(owner, value, f"is not a number; as in {name}:{field}=0.5")
    if owner in ZERO:
        assert PRESETS[name](**fields) == PRESETS[name](**{f: v for f, v in fields.items() if f != field})
        refuses(owner, -1, f"must be at least 0{limit}$")
    else:
        for value in (0, -1, -0.25):
            refuses(owner, value, f"must be above 0{limit}$")
    for value in (1.5, 2, 1e300):
        if owner in SHARES:
            with pytest.raises(
                ValueError, match=f"^{name}: {field}={re.escape(f'{value:g}')} must be {least} 0{limit}$"
            ):
                PRESETS[name](**{**fields, field: value})
        else:
            PRESETS[name](**{**fields, field: value})


@pytest.mark.parametrize("owner", [*COUNTS, *FROM_ZERO])
def test_impossible_count_is_accepted(owner: str) -> None:
    least = 0 if owner in FROM_ZERO else 1
    name, field, _ = with_field(owner, 0)
    for value in (1.5, 10.0, "ten", True, False, math.nan, math.inf, [1]):
        refuses(owner, value, f"is not a whole number; give {field} >= {least}, as in {name}:{field}=8$")
    for value in (-1, *range(least)):
        refuses(owner, value, f"must be at least {least}")


@pytest.mark.parametrize("owner", CHOICES)
def test_unknown_word_is_accepted(owner: str) -> None:
    for value in ("maybe", "", "YES", True, None, 1, ["yes"]):
        name, field, fields = with_field(owner, value)
        known = ", ".join(WORDS[field])
        says = f"^{name}: unknown {field} {re.escape(repr(value))}; known {field}s: {known}$"
        with pytest.raises(ValueError, match=says):
            PRESETS[name](**fields)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("oea:k0=4,k_max=3", "oea: k_max=3 must be at least k0=4"),
        ("oea:k0=4,max_rank=3", "oea: max_rank=3 must be at least k0=4"),
        (
            "oea:k0=1,k_max=3,fill=drop",
            "oea: k_max and max_rank limit a backfill; fill=drop has none",
        ),
        ("oea:k0=1,max_rank=3,fill=substitute", "oea: k_max and max_rank limit a backfill; fill=substitute has none"),
        ("oea:k0=1,p=some", "oea: p='some' is not a number"),
        ("xshare:k0=0,m=0", "xshare: k0, m and m_request are all 0, so no token could run any expert; give k0=1"),
        ("xshare_ep:k0=0,m_device=0", "xshare_ep: k0 and m_device are both 0, so no token could run any expert"),
        ("lynx", "lynx: alpha is missing; write for example lynx:alpha=1,beta=1"),
        ("skip:scale=", "skip: scale='' is not a number"),
    ],
)
def test_settings_that_contradict_each_other_are_accepted(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        parse(text)
