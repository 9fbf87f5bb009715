"""How policies are spelled, `preset:field=value,...`, and what is said about a value that cannot be."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping

from moebudget.fill import Backfill, Drop, Fill, StandIn, Substitute
from moebudget.gain_fills import ByLayer, EnergyGain, Sketch
from moebudget.policy import Policy

FILLS: dict[str, Fill] = {
    "original": Backfill("original"),
    "executed": Backfill("executed"),
    "half": Backfill("half"),
    "preserved": Backfill("preserved"),
    "drop": Drop(),
    "substitute": Substitute(),
    "stand_in": StandIn(),
    "energy": EnergyGain(),
    "by_layer": ByLayer(),
    "sketch": Sketch(),
}


def count(preset: str, field: str, value: object, least: int = 1) -> int:
    """A whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"{preset}: {field}={value!r} is not a whole number; give {field} >= {least}, as in {preset}:{field}=8"
        )
    if value < least:
        why = ", or no token could run any expert" if least == 1 else ""
        raise ValueError(f"{preset}: {field}={value} must be at least {least}{why}")
    return value


def number(preset: str, field: str, value: object, most: float = math.inf, zero: bool = False) -> float:
    """A finite number above 0, or from 0 on where `zero` is allowed, and up to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{preset}: {field}={value!r} is not a number; as in {preset}:{field}=0.5")
    if not 0 <= value <= most or not (value or zero):
        limit = f" and at most {most:g}" if most < math.inf else ""
        raise ValueError(f"{preset}: {field}={value:g} must be {'at least' if zero else 'above'} 0{limit}")
    return float(value)


def choice(preset: str, field: str, value: object, known: Iterable[str]) -> str:
    """One of the known words."""
    known = list(known)
    if value not in known:
        raise ValueError(f"{preset}: unknown {field} {value!r}; known {field}s: {', '.join(known)}")
    return str(value)


def fill_of(preset: str, name: str) -> Fill:
    return FILLS[choice(preset, "fill", name, FILLS)]


def spell(preset: str, defaults: Mapping[str, object], **fields: object) -> str:
    """The shortest spelling: fields at their defaults are left out."""
    given = {k: v for k, v in fields.items() if k not in defaults or defaults[k] != v}
    texts = (f"{k}={_shortest(v) if isinstance(v, float) else v}" for k, v in given.items())
    return ":".join(filter(None, (preset, ",".join(texts))))


def _shortest(value: float) -> str:
    text = f"{value:g}"
    return text if float(text) == value else repr(value)


def unknown(kind: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}"


def read(text: str, presets: Mapping[str, Callable[..., Policy]], examples: Mapping[str, str]) -> Policy:
    """See `moebudget.presets.parse`."""
    preset, _, rest = text.strip().partition(":")
    if preset not in presets:
        raise ValueError(unknown("policy", preset, list(presets)))
    make, fields = presets[preset], dict[str, object]()
    parameters = inspect.signature(make).parameters
    for part in filter(None, (p.strip() for p in rest.split(","))):
        field, equals, value = (s.strip() for s in part.partition("="))
        if not equals or field not in parameters:
            what = "field" if equals else "setting (field=value expected)"
            raise ValueError(f"{preset}: {unknown(what, field, list(parameters) or ['none'])}")
        if field in fields:
            raise ValueError(f"{preset}: {field} is given twice in {text!r}")
        fields[field] = _read_value(value, str(parameters[field].annotation))
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in fields]
    if missing:
        raise ValueError(f"{preset}: {missing[0]} is missing; write for example {examples[preset]}")
    return make(**fields)


def _read_value(value: str, annotation: str) -> object:
    for kind, convert in (("int", int), ("float", float)):
        if kind in annotation:
            try:
                return convert(value)
            except ValueError:
                return value  # the preset names the field and rejects it
    return value
