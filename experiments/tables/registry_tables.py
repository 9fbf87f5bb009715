"""Tables of the methods and of the counters, from the code that defines them."""

from __future__ import annotations

import re

from experiments.tables.tables import Blocks, table
from moebudget.core.counters import WHAT
from moebudget.core.types import makers
from moebudget.methods.registry import METHODS, Method, shortest

URL = re.compile(r"https://arxiv\.org/abs/([\w.]+)")


def blocks() -> Blocks:
    """The blocks of docs/methods.md and docs/vllm.md."""
    return {("docs/methods.md", "methods"): methods_table(), ("docs/vllm.md", "counters"): counters_table()}


def methods_table() -> str:
    """One row per registered method; methods of one page follow each other."""
    cells = []
    for method in sorted(METHODS.values(), key=lambda method: (method.name != "native", method.page)):
        optional = ", ".join(
            f"`{n}` (unset)" if f.default is None else f"`{n}={shortest(f.default)}`"
            for n, f in method.fields.items()
            if not f.required
        )
        title = method.page.removeprefix("methods/").removesuffix(".md")
        cells.append([f"`{method.signature}`", cell(method.rule), optional, reads(method)])
        cells[-1] += [cell(URL.sub(r"[arXiv \1](\g<0>)", method.source)), f"[{title}]({method.page})"]
    heads = ["policy string", "rule", "optional fields and defaults", "reads", "source", "page"]
    return table(heads, cells, left=len(heads))


def reads(method: Method) -> str:
    """What a user must provide: calibrated statistics, a placement, an allocation, sketches."""
    words = {
        "calibrate": f"statistics (`calibrate --for {method.name}`)",
        "allocate": "allocation (`allocate`)",
        "sketch": "sketches (`sketch`)",
        "placement": "placement",
    }
    return ", ".join(words[maker] for maker in makers(method.needs))


def cell(text: str) -> str:
    """Text of a table cell: bars are escaped."""
    return text.replace("|", "\\|")


def counters_table() -> str:
    """One row per counter."""
    return table(["counter", "counts"], [[f"`{c.name.lower()}`", cell(what)] for c, what in WHAT.items()], left=2)
