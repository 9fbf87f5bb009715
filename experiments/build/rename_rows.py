"""Conversion of the rows in benchmarks/results to today's names, with a proof that no number changes.

    python -m experiments.build.rename_rows                   # convert the files that have old names
    python -m experiments.build.rename_rows --against COMMIT  # check the files against those of a commit

Keys are renamed at any depth, and names of policies and methods in the strings of `policy` and `method`. All other
text stays byte for byte: numbers are never parsed. A file is replaced only if the check passes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"

KEYS = {
    "dense_nll": "native_nll", "dense_tpot_ms": "native_tpot_ms", "dense_e2e_tok_s": "native_e2e_tok_s",
    "dense_spread": "native_spread", "off_tpot_ms": "baseline_tpot_ms", "off_spread": "baseline_spread",
    "off_same_tokens": "baseline_same_tokens", "against_dense": "over_native", "above_dense": "over_native",
    "over_stand_in": "over_mean_direction", "over_stand_in_ci95": "over_mean_direction_ci95",
    "expert_mb_a_step": "expert_mb_per_step", "mb_a_step": "mb_per_step", "rows_a_step": "rows_per_step",
    "slots_a_device": "slots_per_device", "gb_a_second": "gb_per_s", "solve_s_a_layer": "solve_s_per_layer",
    "layers_a_pass": "layers_per_pass", "sums_mb_a_layer": "sums_mb_per_layer",
    "most_in_a_layer": "most_in_one_layer",
}  # fmt: skip
NAMED = ("policy", "method")  # keys whose strings hold names of policies and methods
FROZEN = ("command", "commit", "date", "device", "versions", "note")  # what they hold stays as it was measured
FILLS = {"half": "geometric", "original": "native", "stand_in": "mean_direction"}
POLICIES = {"dense": "native"}
METHODS = {"unchanged model": "native", "with the original denominator": "with the native denominator"}
PARTS = {  # between the commas of a method's label
    "half": "geometric", "original": "native denominator", "stand-in": "mean direction", "stand_in": "mean direction",
}  # fmt: skip

TOKEN = re.compile(
    r'(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>-?\d[\d.eE+-]*|-?Infinity|NaN)|(?P<word>true|false|null)'
    r"|(?P<mark>[{}\[\],:])|(?P<space>\s+)"
)


def new_policy(text: str) -> str:
    """A policy string, or the label of a policy, in today's names."""
    text = POLICIES.get(text, text)
    return re.sub(r"\bfill=(half|original|stand_in)\b", lambda match: f"fill={FILLS[match[1]]}", text)


def new_method(text: str) -> str:
    """The label of a method in today's names."""
    if text in METHODS:
        return METHODS[text]
    return ", ".join(PARTS.get(part, part) for part in text.split(", "))


def renamed(line: str) -> str:
    """A row with today's names. Raises ValueError for text that is not JSON."""
    tokens, place = list[tuple[str, str]](), 0
    while place < len(line):
        match = TOKEN.match(line, place)
        if match is None:
            raise ValueError(f"no JSON at column {place}: {line[place : place + 20]!r}")
        tokens.append((str(match.lastgroup), match[0]))
        place = match.end()
    pieces, path, key = [], list[str](), ""  # the keys of the containers around, and the last key
    for i, (kind, text) in enumerate(tokens):
        new = text
        if kind == "mark" and text in "{[":
            path.append(key)
        elif kind == "mark" and text in "}]":
            key = path.pop()
        elif kind == "string" and not set(FROZEN) & {*path, *(() if is_key(tokens, i) else (key,))}:
            name = json.loads(text)
            if is_key(tokens, i):
                changed = KEYS.get(name, name)
            elif key in NAMED:
                changed = new_policy(name) if key == "policy" else new_method(name)
            else:
                changed = name
            new = text if changed == name else json.dumps(changed)
        if kind == "string" and is_key(tokens, i):
            key = json.loads(text)
        pieces.append(new)
    return "".join(pieces)


def is_key(tokens: list[tuple[str, str]], place: int) -> bool:
    """Whether the string at a place is the key of a pair."""
    after = next((text for kind, text in tokens[place + 1 :] if kind != "space"), "")
    return tokens[place][0] == "string" and after == ":"


class Text(str):
    """A number as the file has it."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """The keys and values of an object, in order."""

    __slots__ = ()


def read(line: str) -> Any:
    """A row whose numbers are their text and whose objects are lists of pairs."""
    return json.loads(line, parse_float=Text, parse_int=Text, parse_constant=Text, object_pairs_hook=Pairs)


def check(before: str, after: str) -> None:
    """Raise ValueError unless the rows are the same but for the renamed keys, policies and methods.

    Numbers are compared as text, strings of other keys byte for byte, and keys in their order.
    """
    old, new = before.splitlines(), after.splitlines()
    if len(old) != len(new):
        raise ValueError(f"{len(old)} rows became {len(new)}")
    for number, (first, second) in enumerate(zip(old, new, strict=True), 1):
        if scalars(first) != scalars(second):
            raise ValueError(f"row {number}: a number, a boolean or a null changed")
        compare(read(first), read(second), "", f"row {number}")


def scalars(line: str) -> list[str]:
    """The numbers, booleans and nulls of a row, as the file has them and in its order."""
    return [match[0] for match in TOKEN.finditer(line) if match.lastgroup in ("number", "word")]


def compare(old: Any, new: Any, key: str, place: str) -> None:
    """Raise ValueError unless a value is the same but for the renamed keys, policies and methods inside it."""
    frozen = key in FROZEN
    if type(old) is not type(new):
        raise ValueError(f"{place}: {old!r} became {new!r}")
    if isinstance(old, Pairs):
        names = [name if frozen else KEYS.get(name, name) for name, _ in old]
        if names != [name for name, _ in new]:
            raise ValueError(f"{place}: the keys are not the renamed ones in their order")
        if len(set(names)) < len(names):
            raise ValueError(f"{place}: two keys became one")
        for (name, value), (_, other) in zip(old, new, strict=True):
            compare(value, other, key if frozen else name, f"{place}, {name}")
    elif isinstance(old, list):
        if len(old) != len(new):
            raise ValueError(f"{place}: {len(old)} values became {len(new)}")
        for value, other in zip(old, new, strict=True):
            compare(value, other, key, place)
    elif old != new:
        rule = {"policy": new_policy, "method": new_method}.get(key)
        if isinstance(old, Text) or rule is None or rule(old) != new:
            raise ValueError(f"{place}: {old!r} became {new!r}")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--against", metavar="COMMIT", help="check the files against those of a commit, and write nothing")
    ap.add_argument("--results", type=Path, default=RESULTS)
    a = ap.parse_args()
    for path in sorted(a.results.glob("*.jsonl")):
        after = path.read_bytes().decode()
        if a.against:
            name = f"{a.against}:./{path.name}"
            before = subprocess.run(
                ["git", "show", name], cwd=a.results, check=True, capture_output=True
            ).stdout.decode()
        else:
            before, after = after, "".join(map(renamed, after.splitlines(keepends=True)))
        try:
            check(before, after)
        except ValueError as error:
            raise SystemExit(f"{path}: {error}; nothing was written to it") from error
        changed = sum(x != y for x, y in zip(before.splitlines(), after.splitlines(), strict=True))
        if changed and not a.against:
            path.write_bytes(after.encode())
        numbers = sum(len(scalars(line)) for line in after.splitlines())
        print(f"{path.name}: {changed} of {len(after.splitlines())} rows renamed, {numbers:,} numbers unchanged")


if __name__ == "__main__":
    main()
