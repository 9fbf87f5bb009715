"""`experiments/build/rename_rows.py`: names change, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from experiments.build import rename_rows
from experiments.build.rename_rows import KEYS, RESULTS, check, renamed

OLD = (
    '{"bench": "decode", "policy": "dense", "dense_nll": 3.50, "tpot_ms": 1e-05, "off_tpot_ms": null, '
    '"inner": [{"mb_a_step": 7, "off_same_tokens": true}, -0.0], "command": "eval --policy dense", '
    '"versions": {"dense_nll": "0.10"}, "note": "fill=half", "text": "half, \\u00b1"}\n'
)
NEW = (
    '{"bench": "decode", "policy": "native", "native_nll": 3.50, "tpot_ms": 1e-05, "baseline_tpot_ms": null, '
    '"inner": [{"mb_per_step": 7, "baseline_same_tokens": true}, -0.0], "command": "eval --policy dense", '
    '"versions": {"dense_nll": "0.10"}, "note": "fill=half", "text": "half, \\u00b1"}\n'
)


def test_keys_and_policies_are_renamed_and_all_other_text_stays() -> None:
    assert renamed(OLD) == NEW
    assert renamed(NEW) == NEW
    check(OLD, NEW)
    check(NEW, NEW)


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [
        ("policy", "base:budget=10,fill=half,relative=0.5", "base:budget=10,fill=geometric,relative=0.5"),
        ("policy", "spread:budget=10,fill=original", "spread:budget=10,fill=native"),
        ("policy", "base:budget=10,fill=stand_in of energy", "base:budget=10,fill=mean_direction of energy"),
        ("policy", "base:budget=10,fill=preserved", "base:budget=10,fill=preserved"),
        ("method", "unchanged model", "native"),
        ("method", "BASE, half, relative", "BASE, geometric, relative"),
        ("method", "spread, original", "spread, native denominator"),
        ("method", "spread, stand_in", "spread, mean direction"),
        ("method", "stand-in", "mean direction"),
        ("method", "with the original denominator", "with the native denominator"),
        ("domain", "half", "half"),
    ],
)
def test_names_in_strings_are_renamed(key: str, old: str, new: str) -> None:
    row = json.dumps({key: old})
    assert json.loads(renamed(row)) == {key: new}
    check(row, renamed(row))
    assert renamed(renamed(row)) == renamed(row)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("3.50", "3.5", "row 2: a number, a boolean or a null changed"),
        ("1e-05", "1e-5", "a number"),
        ("null", "false", "a number"),
        ("eval --policy dense", "eval --policy native", "row 2, command: 'eval --policy dense' became"),
        ('"dense_nll": "0.10"', '"native_nll": "0.10"', "row 2, versions: the keys are not the renamed ones"),
        ("0.10", "0.1", "versions, dense_nll"),
        ("fill=half", "fill=geometric", "note"),
        ('"policy": "native"', '"policy": "topk:k=1"', "row 2, policy: 'dense' became 'topk:k=1'"),
        ('"native_nll"', '"nll"', "row 2: the keys are not the renamed ones in their order"),
        ('{"mb_per_step": 7, ', '{"mb_per_step": 7}, {', "2 values became 3"),
        ('"text": "half', '"text": "geometric', "text"),
    ],
)
def test_any_other_change_is_refused(old: str, new: str, message: str) -> None:
    assert old in NEW
    with pytest.raises(ValueError, match=message):
        check(NEW + OLD, NEW + NEW.replace(old, new))


def test_lost_rows_and_merged_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="2 rows became 1"):
        check(OLD + OLD, NEW)
    both = '{"above_dense": 1, "against_dense": 2}'
    with pytest.raises(ValueError, match="two keys became one"):
        check(both, renamed(both))


def test_a_refused_file_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    good.write_text(OLD)
    bad.write_text(OLD)
    monkeypatch.setattr(sys, "argv", ["rename_rows", "--results", str(tmp_path)])
    rename_rows.main()
    assert good.read_text() == bad.read_text() == NEW
    bad.write_text(OLD)
    monkeypatch.setattr(rename_rows, "renamed", lambda line: renamed(line).replace("3.50", "3.51"))
    with pytest.raises(SystemExit, match=r"a\.jsonl: row 1: a number.* nothing was written to it"):
        rename_rows.main()
    assert bad.read_text() == OLD


def test_committed_rows_have_todays_names() -> None:
    for path in RESULTS.glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert renamed(line) == line, path.name
            assert not KEYS.keys() & json.loads(line).keys()
