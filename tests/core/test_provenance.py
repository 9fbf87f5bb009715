from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moebudget.core import provenance


def test_rows_carry_all_that_is_needed_to_repeat_them() -> None:
    row = provenance.stamp("cpu")
    assert set(row) == {"date", "commit", "command", "device", "versions"}
    assert json.loads(json.dumps(row)) == row
    assert row["versions"]["torch"] == torch.__version__
    assert row["versions"]["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert row["device"].endswith(f", {torch.get_num_threads()} threads")
    assert len(row["date"]) == len("2026-01-01T00:00:00Z")
    assert row["date"].endswith("Z")


def test_lines_are_read_with_file_and_number(tmp_path: Path) -> None:
    """U+2028 is a line end for str.splitlines, and none in JSON."""
    path = tmp_path / "rows.jsonl"
    provenance.append_rows(path, [{"a": 1}])
    path.write_text(path.read_text() + '\n{"b": "x\u2028y"}\n', encoding="utf-8")
    assert list(provenance.json_lines(path)) == [(f"{path}, line 1", {"a": 1}), (f"{path}, line 3", {"b": "x\u2028y"})]
    path.write_text('{"a": 1}\n{\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not JSON \(Expecting property name"):
        list(provenance.json_lines(path))


def test_versions_leave_out_packages_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "PACKAGES", ("torch", "no-such-package"))
    assert set(provenance.versions()) == {"python", "torch"}


TRACKED = {"ls_files": "provenance.py\n"}


def answer(monkeypatch: pytest.MonkeyPatch, **outputs: str) -> None:
    """Let git answer `ls-files`, `rev-parse` and `status` with these outputs; anything else fails."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == "git"
        key = command[1].replace("-", "_")
        if key not in outputs:
            raise subprocess.CalledProcessError(128, command)
        return subprocess.CompletedProcess(command, 0, outputs[key], "")

    monkeypatch.setattr(provenance.subprocess, "run", run)


@pytest.mark.parametrize(
    ("outputs", "commit"),
    [
        ({**TRACKED, "rev_parse": "0123456789ab\n", "status": "\n"}, "0123456789ab"),
        ({**TRACKED, "rev_parse": "0123456789ab\n", "status": " M src/moebudget/score.py\n"}, "0123456789ab+dirty"),
        ({}, "unknown"),
        ({**TRACKED, "rev_parse": "0123456789ab\n"}, "unknown"),
        ({"rev_parse": "0123456789ab\n", "status": "\n"}, "unknown"),  # somebody else's checkout around us
    ],
)
def test_changed_code_is_marked_dirty(monkeypatch: pytest.MonkeyPatch, outputs: dict[str, str], commit: str) -> None:
    answer(monkeypatch, **outputs)
    assert provenance.commit() == commit


def test_machines_without_git_have_an_unknown_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(provenance.subprocess, "run", run)
    assert provenance.commit() == "unknown"


def test_commands_can_be_pasted_and_name_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/home/someone/.venv/bin/moebudget", "eval", "--data", "a file.txt"])
    assert provenance.command() == "moebudget eval --data 'a file.txt'"


def test_rows_are_appended_and_the_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rows.jsonl"
    provenance.append_rows(path, [{"a": 1}, {"a": 2}])
    provenance.append_rows(path, [{"a": 3}])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"a": 1}, {"a": 2}, {"a": 3}]
