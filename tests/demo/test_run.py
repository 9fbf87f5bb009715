"""A small demo on the embedded model: its output, and the claims about the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moebudget.demo.run import MODEL, NAME, Size, embedded_text, findings, run_demo


def test_demo_writes_plot_rows_and_a_json_document_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("native", "squared:budget=10", "base:budget=10", "oracle:budget=10")
    results = tmp_path / "rows.jsonl"
    run_demo(Size(tokens=16_000, windows=16, items=2), tmp_path, policies=policies, device="cpu", results=results)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["demo"] == NAME
    rows = {r["policy"]: r for r in last["rows"]}
    assert list(rows) == list(policies)
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    assert json.loads((tmp_path / "quality.json").read_text()) == last["rows"]
    assert len(results.read_text().splitlines()) == len(policies)
    assert rows["base:budget=10"]["fetched"] == 10 < rows["native"]["fetched"]
    assert rows["native"]["nll"] < rows["oracle:budget=10"]["nll"] < rows["squared:budget=10"]["nll"]
    assert rows["oracle:budget=10"]["retained_energy"] == pytest.approx(1)
    assert rows["squared:budget=10"]["retained_energy"] < rows["base:budget=10"]["retained_energy"] < 1
    kept = tmp_path / "stats.safetensors"
    run_demo(Size(16_000, 2, 1), tmp_path / "again", policies=("native",), device="cpu", stats=kept)
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["calibration"] == last["calibration"]


def test_findings_speak_only_of_what_was_run() -> None:
    from moebudget.evaluate.quality import Quality

    def quality(policy: str, nll: float) -> Quality:
        return Quality(policy, 16, 40.0, 40.0, 7.0, nll, 3.0, 0.1, 90.0, 1.0, 0.9, {}, None, None, None, 1000, 0)

    assert len(findings([quality("native", 3.0)])) == 1
    lines = findings([quality("native", 3.0), quality("base:budget=10", 3.5)])
    assert len(lines) == 2
    assert "0.50 nats" in lines[1]


def test_checkpoint_and_texts_stay_small_enough_for_a_repository() -> None:
    assert (MODEL / "model.safetensors").stat().st_size <= 16 * 2**20
    for part in ("calibration", "heldout"):
        files = embedded_text(part)
        assert len(files) == 4
        assert all(f.stat().st_size <= 2**20 for f in files)


def test_missing_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no heldout text"):
        embedded_text("heldout", tmp_path)
