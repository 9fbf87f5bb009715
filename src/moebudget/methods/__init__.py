"""Methods: one module per docs page, with its score, its selection and its policy function.

Importing this package registers the methods of all modules in it, and those of installed packages that name a module
under the entry point group `moebudget.methods`.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

from moebudget.methods.registry import METHODS, Method, Tunable, get_method, parse, parse_many, register

__all__ = ["METHODS", "Method", "Tunable", "get_method", "parse", "parse_many", "register"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
for _entry in entry_points(group="moebudget.methods"):
    _entry.load()
