"""The registry: what a policy string may say, and that everything about a method is read from its registration."""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

import moebudget.methods
from moebudget import presets
from moebudget.core.policy import Policy
from moebudget.methods.base import NonlinearEnergy, PredictedEnergy, SquaredWeight, StaticEnergy, TrueEnergy
from moebudget.methods.common import RouteRank, RouterMass, TopBudget, Voted
from moebudget.methods.fills import FILLS, Backfill, Drop, NativeRoutes
from moebudget.methods.native import NativeUnion
from moebudget.methods.registry import (
    METHODS,
    Choice,
    Count,
    Field,
    Range,
    Share,
    Tunable,
    parse,
    parse_many,
    register,
    split_fields,
)

FLAGS = {True: ("yes", "true"), False: ("no", "false")}
FIELDS = [(name, field) for name, method in METHODS.items() for field in method.fields.values()]
NUMBERS = [(n, f) for n, f in FIELDS if f.kind is float]
COUNTS = [(n, f) for n, f in FIELDS if f.kind is int]
NAMES = [(n, f) for n, f in FIELDS if isinstance(f.limit, Choice)]
SWITCHES = [(n, f) for n, f in FIELDS if f.kind is bool]


def over_fields(fields: list[tuple[str, Field]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "field"), fields, ids=[f"{n} {f.name}" for n, f in fields])


def random_value(field: Field, rng: random.Random) -> Any:
    if field.kind is bool:
        return rng.random() < 0.5
    if isinstance(field.limit, Choice):
        return rng.choice(list(field.limit.known))
    if field.kind is float:
        return rng.choice((1, 1.0, 0.1, 1e-5, rng.random(), 0.5))
    return rng.randint(1, 500)


def random_fields(name: str, rng: random.Random) -> dict[str, Any]:
    """Every field that a policy string must have, and some of the others."""
    fields = {}
    for field in METHODS[name].fields.values():
        if field.required or rng.random() < 0.6:
            fields[field.name] = random_value(field, rng)
    for limit in {"k_max", "max_rank"} & set(fields):
        fields[limit] = max(fields[limit], fields["k0"])
        fields["fill"] = rng.choice(("native", "executed", "preserved"))
    return fields


def example_fields(name: str) -> dict[str, Any]:
    """The fields of a method's example, as Python values."""
    return {key: METHODS[name].fields[key].read(value) for key, value in split_fields(METHODS[name].example)}


@pytest.mark.parametrize("name", METHODS)
def test_policies_are_read_as_they_are_written(name: str) -> None:
    rng = random.Random(name)
    for _ in range(60):
        fields = random_fields(name, rng)
        policy = METHODS[name].function(**fields)
        assert parse(str(policy)) == policy
        assert str(parse(str(policy))) == str(policy) == policy.name
        settings = [f"{k}={rng.choice(FLAGS[v]) if isinstance(v, bool) else v}" for k, v in fields.items()]
        rng.shuffle(settings)
        assert parse(f" {name}:" + " , ".join(settings)) == policy


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("native", "native"),
        ("native:", "native"),
        ("topk:k=2", "topk:k=2"),
        ("oea:k0=3,fill=executed", "oea:k0=3"),
        ("oea:fill=native,k0=3", "oea:k0=3,fill=native"),
        ("base:budget=10,fill=native", "base:budget=10"),
        ("base:budget=10,level=true", "base:budget=10,level=yes"),
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
        ("reap_static:budget=4,protect=false", "reap_static:budget=4,protect=no"),
    ],
)
def test_policy_strings_are_the_shortest(text: str, written: str) -> None:
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
def test_budgeted_methods_are_made_of_their_parts(name: str, score: Any) -> None:
    make = METHODS[name].function
    policy = make(7)
    assert (policy.score, policy.select, policy.fill) == (score, TopBudget(7), Backfill("native"))
    assert policy.budget == 7
    assert make(7, fill="executed").fill == Backfill("executed")
    assert make(7, fill="drop").fill == Drop()


def test_methods_without_a_budget_are_made_of_their_parts() -> None:
    native, topk, oea = presets.native(), presets.topk(2), presets.oea(2)
    assert (native.select, native.fill) == (NativeUnion(), Drop())
    assert (topk.score, topk.select, topk.fill) == (RouteRank(2), Voted(), NativeRoutes())
    assert (oea.score, oea.select, oea.fill) == (RouteRank(2), Voted(), Backfill("executed"))
    assert presets.oea(2, 0.5, 4, 9, "native").fill == Backfill("native", 4, 9)
    assert [p.budget for p in (native, topk, oea)] == [None] * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bsae:budget=10", r"unknown policy 'bsae' \(did you mean 'base'\?\); known: .*base, .*oea, .*worth"),
        ("zzz", "unknown policy 'zzz'; known: acceptmoe, .*oracle, .*native, "),
        ("", "unknown policy ''; known: "),
        ("base:bugdet=10", r"base: unknown field 'bugdet' \(did you mean 'budget'\?\); known: budget, fill, relative"),
        ("base:budget=10,k0=2", "base: unknown field 'k0'; known: budget, fill, relative"),
        ("native:budget=10", "native: unknown field 'budget'; known: none"),
        ("base:10", r"base: unknown setting \(field=value expected\) '10'; known: budget, fill, relative"),
        ("base", "base: budget is missing; write for example base:budget=8"),
        ("base:fill=drop", "base: budget is missing"),
        ("oea", "oea: k0 is missing; write for example oea:k0=2"),
        ("topk:", "topk: k is missing"),
        ("base:budget=10,budget=11", "base: budget is given twice in 'base:budget=10,budget=11'"),
        (
            "base:budget=10,fill=zero",
            "base: unknown fill 'zero'; known fills: native, executed, geometric, preserved, drop, substitute",
        ),
        ("oea:k0=1,fill=", "oea: unknown fill ''"),
        ("base:budget=0", "base: budget=0 must be at least 1"),
        ("base:budget=-1", "base: budget=-1 must be at least 1"),
        ("base:budget=1.5", "base: budget='1.5' is not a whole number; .*base:budget=8"),
        ("base:budget=ten", "base: budget='ten' is not a whole number"),
        ("base:budget=True", "base: budget='True' is not a whole number"),
        ("base:budget=", "base: budget='' is not a whole number"),
        ("base:budget=8,level=maybe", "base: level='maybe' must be yes or no"),
        ("topk:k=0", "topk: k=0 must be at least 1"),
        ("oea:k0=-3", "oea: k0=-3 must be at least 1"),
        ("oea:k0=4,k_max=3", "oea: k_max=3 must be at least k0=4"),
        ("oea:k0=4,max_rank=3", "oea: max_rank=3 must be at least k0=4"),
        ("oea:k0=1,k_max=3,fill=drop", "oea: k_max and max_rank limit a backfill; fill=drop has none"),
        ("oea:k0=1,max_rank=3,fill=substitute", "oea: k_max and max_rank limit a backfill; fill=substitute has none"),
        ("oea:k0=1,p=some", "oea: p='some' is not a number"),
        ("xshare:k0=0,m=0", "xshare: k0, m and m_request are all 0, so no token could run any expert; give k0=1"),
        ("xshare_ep:k0=0,m_device=0", "xshare_ep: k0 and m_device are both 0, so no token could run any expert"),
        ("lynx", "lynx: alpha is missing; write for example lynx:alpha=1,beta=1"),
        ("skip:scale=", "skip: scale='' is not a number"),
    ],
)
def test_wrong_policy_strings_are_explained(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        parse(text)


def refuses(name: str, field: Field, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: {field.name}={re.escape(repr(value))} {why}"):
        METHODS[name].function(**{**example_fields(name), field.name: value})


@over_fields(NUMBERS)
def test_impossible_numbers_are_refused(name: str, field: Field) -> None:
    limit = field.limit
    assert isinstance(limit, Range)
    most = f" and at most {limit.high:g}" if limit.high < math.inf else ""
    for value in (math.nan, math.inf, -math.inf, "0.5", None, True, False, [1.0]):
        refuses(name, field, value, f"is not a number; as in {name}:{field.name}=0.5")
    for value in (0, -1, -0.25) if limit.above else (-1,):
        refuses(name, field, value, f"must be {'above' if limit.above else 'at least'} 0{most}$")
    for value in (1.5, 2):
        if limit.high == 1:
            refuses(name, field, value, "must be .* and at most 1$")
        else:
            METHODS[name].function(**{**example_fields(name), field.name: value})


@over_fields(COUNTS)
def test_impossible_counts_are_refused(name: str, field: Field) -> None:
    assert isinstance(field.limit, Range)
    least = int(field.limit.low)
    for value in (1.5, 10.0, "ten", True, False, math.nan, math.inf, [1], *(() if field.optional else (None,))):
        refuses(name, field, value, f"is not a whole number; give {field.name} >= {least}, as in .*=8$")
    for value in (-1, *range(least)):
        refuses(name, field, value, f"must be at least {least}")


@over_fields(NAMES)
def test_unknown_names_are_refused(name: str, field: Field) -> None:
    assert isinstance(field.limit, Choice)
    for value in ("maybe", "", "YES", True, None, 1):
        known = ", ".join(field.limit.known)
        says = f"^{name}: unknown {field.name} {re.escape(repr(value))}; known {field.name}s: {known}$"
        with pytest.raises(ValueError, match=says):
            METHODS[name].function(**{**example_fields(name), field.name: value})


@over_fields(SWITCHES)
def test_switches_are_bool_in_python_and_yes_or_no_in_strings(name: str, field: Field) -> None:
    for value in ("yes", 1, 0, None, "maybe"):
        refuses(name, field, value, r"must be yes or no \(in Python True or False\)$")
    without = {k: v for k, v in split_fields(METHODS[name].example) if k != field.name}
    for word, flag in (("yes", True), ("true", True), ("no", False), ("false", False)):
        text = f"{name}:" + ",".join(f"{k}={v}" for k, v in {**without, field.name: word}.items())
        assert parse(text) == METHODS[name].function(**{**example_fields(name), field.name: flag})


def test_every_kind_of_field_is_tried() -> None:
    assert len(NUMBERS) + len(COUNTS) + len(NAMES) + len(SWITCHES) == len(FIELDS)
    assert min(map(len, (NUMBERS, COUNTS, NAMES, SWITCHES))) > 5


@pytest.mark.parametrize("name", METHODS)
def test_registrations_are_complete(name: str) -> None:
    method = METHODS[name]
    assert parse(method.example).name.startswith(name)
    assert method.rule.endswith(".")
    assert method.source
    assert method.label
    required = [f.name for f in method.fields.values() if f.required]
    if required:
        with pytest.raises(ValueError, match=f"^{name}: {required[0]} is missing; write for example "):
            parse(name)
    assert all(tunable.field in method.fields for tunable in method.tune)
    assert bool(method.tune) == bool(method.variants) == (name != "native")
    for templates in method.variants.values():
        for template in templates:
            assert [v for _, v in split_fields(template)].count("{}") == 1
            parse(template.replace("{}", "1"))


def test_every_module_of_the_package_is_registered_and_has_a_page_and_a_test() -> None:
    modules = {m.name for m in pkgutil.iter_modules(moebudget.methods.__path__)}
    shared = {"registry", "common", "devices", "fills"}
    assert {m.module.rpartition(".")[2] for m in METHODS.values()} == modules - shared
    root = Path(__file__).parents[2]
    for module in modules - {"devices"}:
        assert (root / f"tests/methods/test_{module}.py").is_file(), module
    for method in METHODS.values():
        assert (root / "docs" / method.page).is_file(), method.page


def test_presets_are_the_registered_functions() -> None:
    assert set(METHODS) < set(dir(presets))
    assert presets.base(budget=10) == presets.parse("base:budget=10")
    with pytest.raises(AttributeError, match=r"no attribute 'bse': unknown policy 'bse' \(did you mean 'base'"):
        _ = presets.bse


def test_several_policies_are_read_from_one_text() -> None:
    policies = parse_many(["sere,exfold:budget=10,reap", "oea:k0=1,p=0.5,topk"])
    assert [p.name for p in policies] == [
        "sere:s=2",
        "exfold:budget=10",
        "reap:budget=8",
        "oea:k0=1,p=0.5",
        "topk:k=2",
    ]


@pytest.fixture
def registry() -> Iterator[None]:
    """The registry as it was, afterwards."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.usefixtures("registry")
def test_a_method_is_one_decorated_function() -> None:
    @register(source="here", example="mine:m=3", tune=Tunable("m", 1, "N"))
    def mine(m: Count, share: Share = 0.5, strict: bool = False) -> Policy:  # noqa: ARG001
        """The m largest, for a test."""
        return Policy(RouterMass(), TopBudget(m), FILLS["native"])

    assert mine(4).name == "mine:m=4"
    assert parse("mine:m=4,share=0.25,strict=yes").name == "mine:m=4,share=0.25,strict=yes"
    method = METHODS["mine"]
    assert (method.rule, method.label, method.signature) == ("The m largest, for a test.", "mine", "mine:m=..")
    assert dict(method.variants) == {"mine": ("mine:m={}",)}
    with pytest.raises(ValueError, match=r"^mine: share=2 must be above 0 and at most 1$"):
        mine(4, share=2)
    with pytest.raises(TypeError, match="unexpected keyword argument 'n'"):
        mine(4, n=3)  # type: ignore[call-arg]
    assert dataclasses.replace(mine(4), name="custom").select == TopBudget(4)


@pytest.mark.usefixtures("registry")
def test_wrong_registrations_are_refused() -> None:
    def base(budget: Count) -> Policy:  # noqa: ARG001
        raise AssertionError

    with pytest.raises(ValueError, match=r"'base' is registered already, by moebudget\.methods\.base"):
        register(source="here", example="base:budget=1")(base)
    base.__name__ = "other"
    with pytest.raises(ValueError, match="the example 'base:budget=1' of the method 'other' is of another name"):
        register(source="here", example="base:budget=1")(base)

    @register(source="here", example="untyped:m=1")
    def untyped(m: Annotated[complex, "no range"] | int) -> Policy:  # noqa: ARG001
        raise AssertionError

    @register(source="here", example="unlimited:m=1")
    def unlimited(m: int) -> Policy:  # noqa: ARG001
        raise AssertionError

    for name in ("untyped", "unlimited"):
        with pytest.raises(
            TypeError, match=rf"^{name}: m is annotated .*; use bool, a Literal of strings, or a type of"
        ):
            parse(f"{name}:m=1")


def test_methods_are_registered_once_however_often_they_are_imported() -> None:
    before = list(METHODS)
    importlib.reload(moebudget.methods)
    assert list(METHODS) == before
