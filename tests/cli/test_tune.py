"""`moebudget tune` and `moebudget compare` on the embedded model, and the readers of the config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moebudget import attach, load_stats
from moebudget.calibrate.run import DEFAULT_NEEDS
from moebudget.core.stats import Stats
from moebudget.demo.run import MODEL
from moebudget.engines.config import read_settings
from moebudget.engines.transformers.families import facts_of
from moebudget.engines.transformers.loading import load_model, require_memory, skeleton, weight_bytes
from tests.cli.test_cli import refused, run
from tests.tune.test_search import timing

SMALL = ("--windows", 52, "--length", 8)


def stats_file(folder: Path) -> Path:
    """Statistics of the embedded model with made-up numbers."""
    facts = facts_of(load_model(str(MODEL), device="cpu", dtype="float32")[0])
    generator = torch.Generator().manual_seed(0)
    shape = (len(facts.layers), facts.experts)
    tensors = {name: torch.rand(*shape, generator=generator) for name in DEFAULT_NEEDS}
    tensors["predictor_weight"] = torch.zeros(*shape, facts.hidden)
    Stats(facts, tensors).save(folder / "stats.safetensors")
    return folder / "stats.safetensors"


def last(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.out


def test_config_is_read_by_attach_and_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stats, out = stats_file(tmp_path), tmp_path / "out"
    command = ["tune", "demo", "--stats", stats, "--out", out, *SMALL]
    assert run([*command, "--experts", 9, "--policies", "squared,base,oea"]) == 0
    answer, shown = last(capsys)
    assert answer["config"] == str(out / "tuned.json")
    assert "(32 windows)" in shown
    config = json.loads((out / "tuned.json").read_text())
    settings = read_settings(config)
    assert settings is not None
    assert (settings.policy.name, settings.policy.budget) == (answer["policy"], 9)
    assert settings.stats == (stats if settings.policy.needs else None)
    inside = config["moebudget"]["evidence"]
    assert inside["confirmed"]["policy"] == answer["policy"]
    assert (inside["confirmed"]["nll_n"], inside["target"]["bound"]) == (32, 9)
    assert {"commit", "date", "command"} <= set(inside["target"])
    assert {"native", "squared:budget=9", "base:budget=9"} <= {r["policy"] for r in inside["search"]}
    model, _ = load_model(str(MODEL), device="cpu", dtype="float32")
    prompts = torch.arange(24).view(4, 6) + 300
    with attach(model, config) as attached:
        tokens = model.generate(prompts, max_new_tokens=4, do_sample=False)
    with attach(model, answer["policy"], load_stats(stats)):
        assert torch.equal(model.generate(prompts, max_new_tokens=4, do_sample=False), tokens)
    assert attached.counters.fetched <= 9
    assert run([*command, "--experts", 9, "--policies", "squared,base,oea"]) == 0
    again, shown = last(capsys)
    assert "0 settings measured in this run" in shown
    assert again == answer
    config["moebudget"]["enabled"] = False
    with attach(model, config) as attached:
        assert attached.policy.name == "native"
    with pytest.raises(ValueError, match="no 'moebudget' among its keys"), attach(model, {"policy": "native"}):
        pass


def test_config_is_written_only_if_a_setting_meets_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["tune", "demo", "--out", tmp_path, *SMALL, "--policies", "squared", "--windows", 80]
    for target, says in (
        (("--max-loss-increase", 1e-7), "allow more loss"),
        (("--speedup", 9, "--timing", timing(tmp_path / "t.jsonl", 2, 0.1)), "with one expert per layer"),
    ):
        assert run([*command, *target]) == 1
        answer, shown = last(capsys)
        assert (answer["policy"], answer["config"]) == (None, None)
        assert says in answer["reason"]
        assert "no setting meets the target" in shown
    assert not (tmp_path / "tuned.json").exists()
    assert run([*command, "--max-loss-increase", 2.5]) == 0
    answer, _ = last(capsys)
    confirmed = json.loads((tmp_path / "tuned.json").read_text())["moebudget"]["evidence"]["confirmed"]
    assert confirmed["policy"] == answer["policy"] != "native"
    assert 0 < confirmed["nll_delta_high"] <= 2.5
    assert confirmed["nll_n"] == 48


def test_compare_includes_native_and_topk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    speed = ["--tpot", 2.9, "--timing", timing(tmp_path / "t.jsonl", 2, 0.1)]
    options = ["--windows", 12, "--length", 8, "--out", tmp_path, "--results", rows, "--items", 1]
    assert run(["compare", "demo", "--policies", "squared,router_mass:budget=7", *speed, *options]) == 0
    answer, shown = last(capsys)
    by_method = {r["method"]: r for r in answer["rows"]}
    assert list(by_method) == ["native", "topk", "squared", "router_mass:budget=7"]
    assert (by_method["squared"]["policy"], by_method["squared"]["tpot_ms_by_line"]) == ("squared:budget=9", 2.9)
    assert by_method["squared"]["target"] == pytest.approx(9)
    assert "step times on the line of" in shown
    assert [json.loads(line)["policy"] for line in rows.read_text().splitlines()] == [
        r["policy"] for r in answer["rows"]
    ]
    assert by_method["squared"]["task_verdict"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["tune", "demo", "--experts", 10, "--speedup", 2], "exactly one target"),
        (["tune", "demo", "--experts", 10, "--windows", 40], "24 of 40 windows are left to confirm"),
        (["tune", "elsewhere", "--max-task-drop", 2], "needs task items"),
        (["tune", "elsewhere", "--experts", 10], "there is no text: use --data"),
        (["tune", "demo", "--experts", 10, "--policies", "bass"], "did you mean 'base'"),
        (["compare", "demo", "--policies", "base"], "exactly one target"),
        (["compare", "demo", "--policies", "sere", "--experts", 10], "moebudget calibrate"),
    ],
)
def test_bad_input_is_refused_before_the_weights(
    arguments: list[Any],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_a, **_k: pytest.fail("weights were read"))
    refused([*arguments, "--out", tmp_path], capsys, says)


def test_model_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    from transformers import AutoModelForCausalLM

    empty = skeleton(str(MODEL))
    in_file = (MODEL / "model.safetensors").stat().st_size  # bf16
    assert weight_bytes(empty, "bfloat16") == pytest.approx(in_file, rel=0.01)
    assert weight_bytes(empty, "float32") == 2 * weight_bytes(empty, "bfloat16") == 2 * weight_bytes(empty, "auto")
    require_memory(1e9, "meta", "anything")
    pages = {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 10_000}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_a, **_k: pytest.fail("weights were read"))
    with pytest.raises(MemoryError, match=r"does not fit: its weights take 0.0 GB, cpu has 0.0 GB in all"):
        load_model(str(MODEL), device="cpu", dtype="float32")
