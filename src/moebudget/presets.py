"""Every method by name. A preset is a Score, a Select and a Fill; `parse` reads `base:budget=10`.

>>> from moebudget import presets
>>> presets.base(budget=10) == presets.parse("base:budget=10")
True
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from moebudget import fill, score, select
from moebudget.fill import Fill
from moebudget.policy import Policy

FILLS: dict[str, Fill] = {
    "original": fill.Backfill("original"),
    "executed": fill.Backfill("executed"),
    "drop": fill.Drop(),
}


def _count(preset: str, field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"{preset}: {field}={value!r} is not a whole number; give {field} >= 1, as in {preset}:{field}=8"
        )
    if value < 1:
        raise ValueError(f"{preset}: {field}={value} must be at least 1, or no token could run any expert")
    return value


def _fill(preset: str, name: str) -> Fill:
    if name not in FILLS:
        raise ValueError(f"{preset}: unknown fill {name!r}; known fills: {', '.join(FILLS)}")
    return FILLS[name]


def _name(preset: str, defaults: dict[str, object], **fields: object) -> str:
    given = ",".join(f"{k}={v}" for k, v in fields.items() if k not in defaults or defaults[k] != v)
    return f"{preset}:{given}" if given else preset


def _budgeted(preset: str, rule: score.Score, budget: int, fill: str) -> Policy:
    budget = _count(preset, "budget", budget)
    name = _name(preset, {"fill": "original"}, budget=budget, fill=fill)
    return Policy(rule, select.TopBudget(budget), _fill(preset, fill), name)


def dense() -> Policy:
    """The model as it is; every route of every row."""
    return Policy(score.RouterMass(), select.Union(), fill.Drop(), "dense")


def topk(k: int) -> Policy:
    """Plain top-k reduction: k routes a token instead of K, renormalised where the model renormalises."""
    k = _count("topk", "k", k)
    return Policy(score.RouteRank(k), select.Voted(), fill.FirstRoutes(k), f"topk:k={k}")


def oea(k0: int, fill: str = "executed") -> Policy:
    """OEA, simplified: the union of every row's top-k0, then each row's K best inside it, renormalised.

    https://arxiv.org/abs/2511.02237, section 3; p = 1, k_max = K, maxP = N. For models that do not renormalise the
    weights stay as the model makes them (our reading; the paper has renormalising models only).
    """
    k0 = _count("oea", "k0", k0)
    name = _name("oea", {"fill": "executed"}, k0=k0, fill=fill)
    return Policy(score.RouteRank(k0), select.Voted(), _fill("oea", fill), name)


def router_mass(budget: int, fill: str = "original") -> Policy:
    """The `budget` experts with the largest sum of router weights over the batch's routes, sum_t w_tu."""
    return _budgeted("router_mass", score.RouterMass(), budget, fill)


def squared(budget: int, fill: str = "original") -> Policy:
    """The `budget` experts with the largest sum_t w_tu^2."""
    return _budgeted("squared", score.SquaredWeight(), budget, fill)


def static(budget: int, fill: str = "original") -> Policy:
    """The `budget` experts with the largest sum_t w_tu^2 mu_u, mu_u the expert's mean output energy."""
    return _budgeted("static", score.StaticEnergy(), budget, fill)


def base(budget: int, fill: str = "original") -> Policy:
    """BASE: the `budget` experts with the largest predicted removal cost, sum_t w_tu^2 e_u(z_t).

    https://arxiv.org/abs/2609.36222, sections 3.2 and 3.3. `fill` is "original" in the paper; "executed" and "drop"
    are its ablations.
    """
    return _budgeted("base", score.PredictedEnergy(), budget, fill)


def oracle(budget: int, fill: str = "original") -> Policy:
    """BASE with true instead of predicted output energies: the bound of any energy predictor. Analysis only."""
    return _budgeted("oracle", score.TrueEnergy(), budget, fill)


PRESETS: dict[str, Callable[..., Policy]] = {
    f.__name__: f for f in (dense, topk, oea, router_mass, squared, static, base, oracle)
}


def _unknown(kind: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}"


def parse(text: str) -> Policy:
    """Read `preset` or `preset:field=value,field=value`; `str(policy)` writes the same.

    Raises ValueError that lists what is known for an unknown preset or field, and names the missing field.
    """
    preset, _, rest = text.strip().partition(":")
    if preset not in PRESETS:
        raise ValueError(_unknown("policy", preset, list(PRESETS)))
    make, fields = PRESETS[preset], dict[str, object]()
    parameters = inspect.signature(make).parameters
    for part in filter(None, (p.strip() for p in rest.split(","))):
        field, equals, value = (s.strip() for s in part.partition("="))
        if not equals or field not in parameters:
            what = "field" if equals else "setting (field=value expected)"
            raise ValueError(f"{preset}: {_unknown(what, field, list(parameters) or ['none'])}")
        if field in fields:
            raise ValueError(f"{preset}: {field} is given twice in {text!r}")
        fields[field] = value if parameters[field].annotation == "str" else _whole(value)
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in fields]
    if missing:
        example = f"{preset}:{missing[0]}=8"
        raise ValueError(f"{preset}: {missing[0]} is missing; write for example {example}")
    return make(**fields)


def _whole(value: str) -> int | str:
    try:
        return int(value)
    except ValueError:
        return value  # the preset names the field and rejects it
