"""Slices of text: the language or domain of each window, and a separate loss difference per slice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moebudget.calibrate.data import DataError, tokenize
from moebudget.demo.run import LANGUAGES, MODEL, embedded_text, heldout_slices, heldout_windows
from moebudget.engines.transformers.loading import load_tokenizer, skeleton, vocabulary
from moebudget.evaluate.corpus import read_sliced, read_windows, sliced_windows
from moebudget.evaluate.paired import by_slice, paired
from tests.calibrate.test_data import END, LETTERS, Letters
from tests.cli.test_cli import run


def rows_file(path: Path, rows: list[dict[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixed(count: int, length: int = 11) -> list[dict[str, str]]:
    """Documents of one letter each, `a` in one slice and `z` in the other, in turns."""
    names = {"en": "a", "fr": "z"}
    return [{"lang": lang, "text": letter * length} for _ in range(count) for lang, letter in names.items()]


def test_window_belongs_to_the_slice_of_most_of_its_tokens(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "text.jsonl", mixed(30))
    windows, slices = read_sliced(data, Letters(), 28, 5, 40, END, "lang")
    assert len(windows) == len(slices) == 40
    for window, name in zip(windows.tolist(), slices, strict=True):
        counted = {lang: window.count(LETTERS.index(letter) + 1) for lang, letter in (("en", "a"), ("fr", "z"))}
        assert counted[name] == max(counted.values())
    assert {"en", "fr"} == set(slices)
    assert sum(len(set(window.tolist()) - {END}) == 2 for window in windows) <= 1  # documents of a slice are adjacent


def test_slice_at_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "text.jsonl", mixed(100)[::2] + mixed(3)[1::2])
    plain = read_windows(data, Letters(), 28, 5, 5, END)
    assert 26 not in plain
    documents = tokenize(data, Letters(), 28, min_document=2)[0]
    assert sum(map(len, documents)) > 4 * 5 * 6
    assert "fr" in read_sliced(data, Letters(), 28, 5, 40, END, "lang")[1]


def test_text_without_slices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: no string in a field 'lang' \(the line holds: text\)"):
        read_sliced(rows_file(tmp_path / "a.jsonl", [{"text": "aaaa"}]), Letters(), 28, 2, 4, END, "lang")
    Path(tmp_path, "b.txt").write_text("aaaa")
    with pytest.raises(
        DataError, match=r"b.txt has no slices: the field 'lang' is read from the rows of a .jsonl file"
    ):
        read_sliced(str(tmp_path / "b.txt"), Letters(), 28, 2, 4, END, "lang")
    with pytest.raises(DataError, match="the tokenizer has 28 entries, the model embeds 20"):
        read_sliced(rows_file(tmp_path / "c.jsonl", mixed(3)), Letters(), 20, 2, 4, END, "lang")


def test_labels_match_windows_without_an_end_token() -> None:
    windows, slices = sliced_windows({"x": [[1] * 7], "y": [[2] * 7]}, 1, None, None)
    assert [{"x": 1, "y": 2}[name] for name in slices if name] == [int(window.mode().values) for window in windows]


def test_domains_of_the_demo_keep_its_windows() -> None:
    """Rows in benchmarks/results depend on these windows."""
    tokenizer, entries = load_tokenizer(str(MODEL)), vocabulary(skeleton(str(MODEL)))
    windows, domains = heldout_slices(tokenizer, entries, 40, 64)
    assert torch.equal(windows, heldout_windows(tokenizer, entries, 40, 64))
    flat = [
        token
        for file in embedded_text("heldout")
        for document in tokenize(str(file), tokenizer, entries, min_document=2)[0]
        for token in (*document, tokenizer.eos_token_id)
    ]
    expected = {tuple(flat[i : i + 65]) for i in range(0, len(flat) - 64, 65)}
    assert all(tuple(window) in expected for window in windows.tolist())
    assert set(domains) == {"code", "docs", "prose", "speeches"}
    code = [tokenizer.decode(w) for w, d in zip(windows, domains, strict=True) if d == "code"]
    assert any("def " in text for text in code)


def test_differences_are_grouped_by_slice() -> None:
    differences = torch.arange(70).double()
    slices = ["b" if i % 2 else "a" for i in range(70)]
    gaps = by_slice(differences, slices)
    assert list(gaps) == ["a", "b"]
    assert gaps["b"] == paired(differences[1::2])
    assert (gaps["a"].n, gaps["a"].mean) == (35, 34.0)
    assert by_slice(differences, ()) == {}


@pytest.mark.parametrize("command", ["eval", "compare", "tune"])
def test_commands_print_and_return_slices(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = {
        "eval": ["--policy", "squared:budget=9", "--items", 0, "--no-noise"],
        "compare": ["--policies", "squared", "--experts", 9, "--items", 0],
        "tune": ["--policies", "squared", "--experts", 9],
    }[command]
    options = ["--windows", 52, "--length", 8, "--slices", "domain", "--out", tmp_path]
    assert run([command, "demo", *more, *options]) == 0
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    budgeted = [row for row in rows if row["policy"].startswith("squared")]
    assert budgeted
    for row in budgeted:
        parts = row["slices"].values()
        assert sum(part["nll_n"] for part in parts) == row["nll_n"]
        mean = sum(part["nll_n"] * part["nll_delta"] for part in parts) / row["nll_n"]
        assert mean == pytest.approx(row["nll_delta"], abs=2e-5)
    assert "slices" not in rows[0]  # native
    assert all(name in out.splitlines()[i] for i, name in _lines(out, ("code", "speeches")))
    assert run([command, "demo", *more, *options[:4], "--slices", "tongue", "--out", tmp_path]) == 2


def test_languages_of_the_demo_are_separate_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--windows", 40, "--length", 16, "--items", 0, "--no-noise", "--out", tmp_path]
    assert run(["eval", "demo", "--policy", "squared:budget=9", "--slices", "lang", *options]) == 0
    captured = capsys.readouterr()
    _, row = json.loads(captured.out.splitlines()[-1])["rows"]
    assert set(row["slices"]) == {"de", "es", "fr", "ru", "zh"}
    assert "outside its domain" in captured.err
    assert LANGUAGES not in embedded_text("heldout")
    assert LANGUAGES not in embedded_text("calibration")


def _lines(out: str, names: tuple[str, ...]) -> list[tuple[int, str]]:
    """The line before the JSON that names each slice; fails if there is none."""
    lines = out.splitlines()[:-1]
    return [(next(i for i, line in enumerate(lines) if name in line), name) for name in names]
