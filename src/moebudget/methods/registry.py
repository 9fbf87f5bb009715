"""Registry of methods: a decorated policy function is all that a named method needs.

A policy string is `name:field=value,field=value`. Everything that lists, parses, searches or tabulates methods reads
`METHODS`, and the signature of the policy function is the only place of a field's type, range and default.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, ParamSpec

from moebudget.core.errors import unknown
from moebudget.core.policy import Policy

P = ParamSpec("P")
METHODS: dict[str, Method] = {}
FLAGS = {"yes": True, "true": True, "no": False, "false": False}


@dataclass(frozen=True, slots=True)
class Range:
    """Values of a number: from `low` on, or above it, up to `high`."""

    low: float
    high: float = math.inf
    above: bool = False  # `low` itself is not allowed


@dataclass(frozen=True, slots=True)
class Choice:
    """Names of a table; read when a value is checked, so that the table may grow."""

    known: Mapping[str, object]


Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1, above=True)]
Exponent = Annotated[float, Range(0, 1)]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A number that a search turns, and its range; `high` may be "N", the experts, or "K", the routes per token.

    `counts`: it is the number of fetched experts while the native union is larger. `rises`: so do fetched experts.
    """

    field: str
    low: float
    high: float | Literal["N", "K"]
    counts: bool = False
    rises: bool = True

    @property
    def whole(self) -> bool:
        """Whether the number is an integer."""
        return isinstance(self.low, int) and isinstance(self.high, str)


@dataclass(frozen=True, slots=True)
class Method:
    """Everything about a named method. `function` checks its arguments and names the policy that it returns."""

    name: str
    function: Callable[..., Policy]
    source: str  # the paper's link and section, or whose rule it is
    example: str  # a policy string, used where a name alone is given
    label: str  # the name in tables
    tune: tuple[Tunable, ...]  # the first that a policy string does not give is searched
    variants: Mapping[str, tuple[str, ...]]  # label -> policy strings with {} in the place of the number to search
    module: str

    @property
    def rule(self) -> str:
        """The first line of the docstring."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]

    @property
    def page(self) -> str:
        """The docs page, named as the module is."""
        return "methods/" + self.module.rpartition(".")[2].replace("_", "-") + ".md"

    @property
    def needs(self) -> frozenset[str]:
        """Statistics and placement that the example reads."""
        return parse(self.example).needs

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the policy string, by name."""
        return _fields(self.function)

    @property
    def signature(self) -> str:
        """The policy string with `..` in the place of the values that it must have."""
        required = ",".join(f"{n}=.." for n, f in self.fields.items() if f.required)
        return f"{self.name}:{required}" if required else self.name

    def check(self, name: str, value: object) -> object:
        """The value of a field as the rule takes it; ValueError names the field, the value and the limit."""
        return self.fields[name].check(self.name, value)

    def string(self, values: Mapping[str, object]) -> str:
        """The shortest policy string: fields at their defaults are left out."""
        shown = {n: values[n] for n, f in self.fields.items() if n in values and not f.is_default(values[n])}
        return ":".join(filter(None, (self.name, ",".join(f"{n}={shortest(v)}" for n, v in shown.items()))))


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a policy string: type, range or names, and default, as the signature has them."""

    name: str
    kind: type  # int, float, bool or str
    limit: Range | Choice | None
    optional: bool  # None is a value
    default: object = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def is_default(self, value: object) -> bool:
        return not self.required and type(value) is type(self.default) and value == self.default

    def check(self, method: str, value: object) -> object:
        """See `Method.check`."""
        if value is None and self.optional:
            return None
        if self.kind is bool:
            if not isinstance(value, bool):
                raise ValueError(f"{method}: {self.name}={value!r} must be yes or no (in Python True or False)")
            return value
        if isinstance(self.limit, Choice):
            if value not in self.limit.known:
                names = ", ".join(self.limit.known)
                raise ValueError(f"{method}: unknown {self.name} {value!r}; known {self.name}s: {names}")
            return value
        assert isinstance(self.limit, Range)
        return self._count(method, value, self.limit) if self.kind is int else self._number(method, value, self.limit)

    def _count(self, method: str, value: object, limit: Range) -> int:
        least = int(limit.low)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(
                f"{method}: {self.name}={value!r} is not a whole number; give {self.name} >= {least}, as in "
                f"{method}:{self.name}=8"
            )
        if value < least:
            why = ", or no token could run any expert" if least == 1 else ""
            raise ValueError(f"{method}: {self.name}={value} must be at least {least}{why}")
        return value

    def _number(self, method: str, value: object, limit: Range) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{method}: {self.name}={value!r} is not a number; as in {method}:{self.name}=0.5")
        if not limit.low <= value <= limit.high or (limit.above and value == limit.low):
            most = f" and at most {limit.high:g}" if limit.high < math.inf else ""
            word = "above" if limit.above else "at least"
            raise ValueError(f"{method}: {self.name}={value:g} must be {word} {limit.low:g}{most}")
        return float(value)

    def read(self, text: str) -> object:
        """The value that a policy string spells; what cannot be read is returned as it is, for `check` to refuse."""
        if self.kind is bool:
            return FLAGS.get(text, text)
        if self.kind is str:
            return text
        try:
            value: object = self.kind(text)
        except ValueError:
            return text
        return value


@functools.cache
def _fields(function: Callable[..., Policy]) -> dict[str, Field]:
    hints = typing.get_type_hints(inspect.unwrap(function), include_extras=True)
    fields = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        union = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        members = [member for member in union if member is not type(None)]
        optional, kind = len(members) < len(union), members[0]
        limit: Any = None
        if typing.get_origin(kind) is Annotated:
            kind, limit = typing.get_args(kind)[:2]
        elif typing.get_origin(kind) is Literal:
            kind, limit = str, Choice(dict.fromkeys(typing.get_args(kind)))
        limits: dict[Any, Any] = {int: Range, float: Range, str: Choice, bool: type(None)}
        if len(members) > 1 or kind not in limits or not isinstance(limit, limits[kind]):
            raise TypeError(
                f"{function.__name__}: {name} is annotated {hint!r}; use bool, a Literal of strings, or a type of "
                "moebudget.methods.registry, such as Count or Share"
            )
        fields[name] = Field(name, kind, limit, optional, parameter.default)
    return fields


def register(
    *,
    source: str,
    example: str,
    label: str | None = None,
    tune: Tunable | tuple[Tunable, ...] = (),
    variants: Mapping[str, tuple[str, ...]] | None = None,
) -> Callable[[Callable[P, Policy]], Callable[P, Policy]]:
    """Register the decorated policy function as a method of its name.

    `source` says whose rule it is (paper link and section), `example` is a policy string, `tune` the number that
    `compare` and `tune` search, `label` the name in tables, and `variants` the searches of the comparison table, if
    there are others than the example's. Raises ValueError for a name that is taken or an example of another name.

    The function returns the policy of checked arguments; its name is set here, so that `str(policy)` parses back.
    """

    def decorate(function: Callable[P, Policy]) -> Callable[P, Policy]:
        name = function.__name__
        if name in METHODS:
            raise ValueError(f"a method named {name!r} is registered already, by {METHODS[name].module}")
        if example.partition(":")[0] != name:
            raise ValueError(f"the example {example!r} of the method {name!r} is of another name")
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> Policy:
            bound = signature.bind(*args, **kwargs)
            for field_name, value in bound.arguments.items():
                bound.arguments[field_name] = method.check(field_name, value)
            policy = function(*bound.args, **bound.kwargs)
            return dataclasses.replace(policy, name=method.string(bound.arguments))

        tunables = tune if isinstance(tune, tuple) else (tune,)
        title = name if label is None else label
        searches = variants
        if searches is None:
            searches = {title: (_template(example, tunables[0].field),)} if tunables else {}
        method = Method(name, checked, source, example, title, tunables, searches, function.__module__)
        METHODS[name] = method
        return checked

    return decorate


def _template(example: str, name: str) -> str:
    """The example with {} in the place of one field's value."""
    values = {**dict(split_fields(example)), name: "{}"}
    return example.partition(":")[0] + ":" + ",".join(f"{k}={v}" for k, v in values.items())


def split_fields(text: str) -> list[tuple[str, str]]:
    """The fields of a policy string and their values, as texts."""
    parts = (part.partition("=") for part in text.partition(":")[2].split(",") if part.strip())
    return [(name.strip(), value.strip()) for name, _, value in parts]


def get_method(name: str) -> Method:
    """The method of a name. Raises ValueError that lists the known ones."""
    if name not in METHODS:
        raise ValueError(unknown("policy", name, METHODS))
    return METHODS[name]


def parse(text: str) -> Policy:
    """Read a policy string, `method` or `method:field=value,field=value`; `str(policy)` writes the same.

    Raises ValueError that lists what is known for an unknown method or field, and names the missing field.
    """
    name, _, rest = text.strip().partition(":")
    method = get_method(name)
    values = dict[str, object]()
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = (s.strip() for s in part.partition("="))
        if not equals or key not in method.fields:
            what = "field" if equals else "setting (field=value expected)"
            raise ValueError(f"{name}: {unknown(what, key, list(method.fields) or ['none'])}")
        if key in values:
            raise ValueError(f"{name}: {key} is given twice in {text!r}")
        values[key] = method.fields[key].read(value)
    missing = [f.name for f in method.fields.values() if f.required and f.name not in values]
    if missing:
        raise ValueError(f"{name}: {missing[0]} is missing; write for example {method.example}")
    return method.function(**values)


def parse_many(texts: Iterable[str]) -> list[Policy]:
    """Policies from texts that may hold several, separated by commas: `sere,exfold:budget=10,reap`.

    A name without settings means the method's example. Raises ValueError as `parse` does.
    """
    return [parse(METHODS[text].example if text in METHODS else text) for text in split_many(texts)]


def split_many(texts: Iterable[str]) -> list[str]:
    """The single policy strings in texts that may hold several, as `parse_many` reads them."""
    strings: list[str] = []
    for part in (p.strip() for text in texts for p in text.split(",")):
        if "=" in part and ":" not in part and strings:
            strings[-1] += f",{part}"
        else:
            strings.append(part)
    return strings


def shortest(value: object) -> str:
    """A value as a policy string has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    text = f"{value:g}"
    return text if float(text) == value else repr(value)
