"""Policy functions of all methods by name: `presets.base(budget=10)` is `parse("base:budget=10")`.

>>> from moebudget import presets
>>> presets.base(budget=10) == presets.parse("base:budget=10")
True
"""

from __future__ import annotations

from typing import Any

from moebudget.methods import METHODS, get_method
from moebudget.methods import parse as parse


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    try:
        return get_method(name).function
    except ValueError as error:
        raise AttributeError(f"module 'moebudget.presets' has no attribute {name!r}: {error}") from None


def __dir__() -> list[str]:
    return sorted([*METHODS, "parse"])
