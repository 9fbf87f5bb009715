"""The command line: its output, and errors about bad input before the slow step."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, JambaConfig, LlamaConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moebudget.cli import main
from moebudget.core.stats import load_stats
from moebudget.demo.run import MODEL

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def save_model(folder: Path, vocabulary: int = 8192, **changes: Any) -> Path:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=vocabulary, tie_word_embeddings=True, norm_topk_prob=True, **(sizes | changes))
    model = Qwen3MoeForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data.normal_()
    model.save_pretrained(folder)
    for name in TOKENIZER:
        (folder / name).write_bytes((MODEL / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    document = " ".join(f"The {i}th sentence of a text about {i * 7} things." for i in range(40))
    path.write_text("\n<|endoftext|>\n".join(f"{n} {document}" for n in range(8)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stats(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stats") / "stats.safetensors"
    run(["calibrate", model, "--data", text, "-o", path, "--length", 64])
    return path


def run(arguments: list[Any]) -> int:
    """Exit code of the command."""
    before, sys.argv = sys.argv, ["moebudget", *map(str, arguments)]
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


def refused(arguments: list[Any], capsys: pytest.CaptureFixture[str], *parts: str) -> None:
    """The command ends with code 2 and one line of error that holds all parts."""
    capsys.readouterr()
    assert run(arguments) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, captured.err
    assert "Traceback" not in captured.err
    for part in parts:
        assert part in errors[0], errors[0]


def evaluation(model: Path, text: Path, *more: Any) -> list[Any]:
    return ["eval", model, "--data", text, "--windows", 4, "--length", 32, "--batch", 4, *more]


def test_help_loads_no_torch() -> None:
    code = "import sys; sys.argv = ['moebudget', '--help']\nfrom moebudget.cli import main\ntry: main()\n"
    code += "except SystemExit: pass\nassert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_module_is_the_command_line() -> None:
    shown = subprocess.run([sys.executable, "-m", "moebudget", "--help"], check=True, capture_output=True, text=True)
    assert "python -m moebudget" in shown.stdout
    assert all(command in shown.stdout for command in ("demo", "calibrate", "eval", "tune", "bench"))


def test_calibrate_then_eval_prints_json_last_and_appends_rows(
    model: Path, text: Path, stats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, rows = tmp_path / "tasks.jsonl", tmp_path / "rows.jsonl"
    tasks.write_text('{"task": "add", "prompt": "question: 1 + 1 = answer:", "target": " 2"}\n')
    options = [
        "--stats",
        stats,
        "--tasks",
        tasks,
        "--results",
        rows,
        "--policy",
        "base:budget=3",
        "--policy",
        "oea:k0=1",
    ]
    capsys.readouterr()
    assert run(evaluation(model, text, *options)) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [r["policy"] for r in last["rows"]] == ["native", "base:budget=3", "oea:k0=1"]
    assert last["rows"][1]["fetched"] <= 3 < last["rows"][1]["native_union"]
    for row in last["rows"]:
        assert len(row["fetched_by_layer"]) == 2
        assert sum(row["fetched_by_layer"]) / 2 == pytest.approx(row["fetched"], abs=1e-3)
    assert last["rows"][0]["nll"] == last["rows"][0]["native_nll"]
    assert [json.loads(line)["policy"] for line in rows.read_text().splitlines()] == [
        "native",
        "base:budget=3",
        "oea:k0=1",
    ]
    assert {"commit", "command", "device", "versions", "date"} <= last["rows"][0].keys()


def test_stats_command_prints_what_the_file_says(stats: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["stats", stats]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["facts"]["experts"] == 8
    assert shown["tensors"]["predictor_weight"] == [2, 8, 32]
    assert str(shown["alpha"]) in shown["retained_energy_by_alpha"] or shown["alpha"] in (1e-4, 1.0)


def test_policies_lists_every_method_with_statistics_and_source(capsys: pytest.CaptureFixture[str]) -> None:
    from moebudget.methods.registry import METHODS

    assert run(["policies"]) == 0
    printed = capsys.readouterr().out
    lines = {line.split()[1].partition(":")[0]: line for line in printed.splitlines() if line.startswith("│")}
    assert set(METHODS) <= set(lines)
    for name, statistics, source in (
        ("native", "none", "the model itself"),
        ("base", "calibrate", "arXiv:2609.36222"),
        ("base_ep", "calibrate, placement", "ours"),
        ("spread", "calibrate, allocate", "ours"),
        ("skip", "calibrate", "arXiv:2402.14800"),
    ):
        assert [cell.strip() for cell in lines[name].split("│")[-3:-1]] == [statistics, source]


def test_statistics_for_several_policies_are_collected_and_read(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, common = tmp_path / "s.safetensors", ["--length", 64]
    assert (
        run(
            ["calibrate", model, "--data", text, "-o", path, *common, "--for", "sere,exfold:budget=3", "--for", "skip"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["output"] == str(path)
    held = set(load_file(path))
    assert {"similarity_frobenius", "fold_loss", "route_ratio"} <= held
    assert not {"predictor_weight", "similarity_cka"} & held
    names = ("sere:s=1", "exfold:budget=3", "skip", "caee:theta=0.5", "xshare_ep:k0=1,m_device=1")
    options = [x for name in names for x in ("--policy", name)]
    refused(evaluation(model, text, "--stats", path, *options), capsys, "placement_", "--devices 4")
    assert run(evaluation(model, text, "--stats", path, "--devices", 2, *options)) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [r["policy"] for r in rows] == ["native", *names]
    refused(["calibrate", model, "--data", text, "-o", path, "--for", "oea"], capsys, "--for oea", "none")
    refused(["calibrate", model, "--data", text, "-o", path, "--for", "seer"], capsys, "'seer'", "did you mean 'sere'")


def test_allocation_is_written_and_read(
    model: Path, text: Path, stats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, common = tmp_path / "a.safetensors", ["--data", text, "--windows", 4, "--length", 32, "--batch", 4]
    options = ["--stats", stats, "--policy", "spread:budget=3"]
    refused(evaluation(model, text, *options), capsys, "'layer_budget'", "moebudget allocate MODEL")
    arguments = ["allocate", model, "--stats", stats, *common, "-o"]
    refused([*arguments, tmp_path / "no" / "a.safetensors"], capsys, "does not exist")
    refused([*arguments, path, "--fill", "quarter"], capsys, "unknown fill 'quarter'")
    refused([*arguments, path, "--average", 9], capsys, "averages=[9]", "8 experts")
    assert run([*arguments, path, "--average", 2, "--average", 3]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["output"] == str(path)
    assert sum(report["averages"]["3"]["budgets"]) == 6
    assert (
        run(evaluation(model, text, "--stats", path, "--policy", "spread:budget=3", "--policy", "price:budget=3")) == 0
    )
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert rows[1]["fetched"] <= 3
    assert rows[1]["nll"] - rows[0]["nll"] < 1
    assert run(["calibrate", model, "--data", text, "-o", tmp_path / "s", "--length", 64, "--for", "spread"]) == 0
    assert f"moebudget allocate {model}" in capsys.readouterr().err.replace("\n", "")


def test_analyse_runs_every_study_that_it_can(
    model: Path, text: Path, stats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["analyse", model, "--data", text, "--windows", 8, "--length", 32, "--batch", 4, "--budget", 3]
    command += ["--out", tmp_path]
    capsys.readouterr()
    assert run([*command, "--stats", stats]) == 0
    printed = capsys.readouterr()
    rows = json.loads(printed.out.splitlines()[-1])["rows"]
    assert {r["bench"] for r in rows} == {"geometry", "batch_size"}
    assert "left out, because statistics or task items are missing: selection, fill, draining" in printed.err
    assert (tmp_path / "analysis.png").is_file()
    assert json.loads((tmp_path / "analysis.json").read_text()) == rows
    assert {"commit", "device", "command"} <= set(rows[0])
    refused([*command, "--study", "fill", "--stats", stats], capsys, "study fill", "similarity_frobenius", "calibrate")
    refused([*command, "--study", "fills"], capsys, "'fills'", "geometry, selection, fill, batch, draining")
    refused([*command, "--study", "draining", "--stats", stats], capsys, "similarity_frobenius")


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ("bass:budget=10", ("'bass'", "did you mean 'base'", "known: acceptmoe, base, router_mass")),
        ("base:bugdet=10", ("'bugdet'", "did you mean 'budget'")),
        ("base", ("budget is missing",)),
        ("base:budget=0", ("budget=0", "at least 1")),
        ("base:budget=-3", ("budget=-3", "at least 1")),
        ("base:budget=ten", ("'ten'", "whole number")),
        ("base:budget=1.5", ("'1.5'", "whole number")),
        ("base:budget=4,fill=best", ("'best'", "native, executed, geometric, preserved, drop, substitute")),
    ],
)
def test_bad_policy_is_refused_before_the_model_is_read(
    policy: str, parts: tuple[str, ...], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refused(evaluation(Path("no-such-model"), text, "--policy", policy), capsys, *parts)


def test_policy_without_its_statistics_is_refused(model: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(evaluation(model, text, "--policy", "base:budget=3"), capsys, "predictor_bias", "moebudget calibrate")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_experts": 12}, ("experts is 8", "and 12")),
        ({"num_hidden_layers": 3}, ("layers is (0, 1)", "(0, 1, 2)")),
        ({"hidden_size": 48}, ("hidden is 32", "and 48")),
        ({"num_experts_per_tok": 3}, ("routes per token is 2", "and 3")),
    ],
)
def test_statistics_of_another_model_are_refused_before_its_weights(
    changes: dict[str, int],
    parts: tuple[str, ...],
    text: Path,
    stats: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = save_model(tmp_path / "other", **changes)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_a, **_k: pytest.fail("weights were read"))
    refused(evaluation(other, text, "--policy", "base:budget=3", "--stats", stats), capsys, *parts)


def test_statistics_of_a_fine_tune_are_refused(
    text: Path, stats: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = load_stats(stats)
    other = replace(known, facts=replace(known.facts, router_hash="0123456789ab"))
    other.save(tmp_path / "other.safetensors")
    more = ["--policy", "base:budget=3", "--stats", tmp_path / "other.safetensors"]
    refused(evaluation(model, text, *more), capsys, "router weights", "0123456789ab", known.facts.router_hash)


def test_damaged_statistics_are_refused(
    model: Path, text: Path, stats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.safetensors"
    command = evaluation(model, text, "--policy", "base:budget=3", "--stats", path)
    refused(command, capsys, "no statistics at", "moebudget calibrate")
    path.write_bytes(b"")
    refused(command, capsys, "0 bytes", "empty, truncated")
    path.write_bytes(stats.read_bytes()[:-1000])
    refused(command, capsys, "empty, truncated")
    tensors = load_file(stats)
    save_file(tensors, path)
    refused(command, capsys, "not statistics of moebudget")
    save_file(tensors, path, metadata={"moebudget_schema": "99"})
    refused(command, capsys, "schema 99", "reads schema 1")


def test_dense_and_unknown_models_are_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config, parts in (
        (LlamaConfig(), ("'llama' is a dense model", "no experts")),
        (JambaConfig(), ("architecture 'jamba'", "qwen3_moe", "families.py")),
    ):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        refused(["calibrate", folder, "--data", text, "-o", tmp_path / "s"], capsys, *parts)
        refused(evaluation(folder, text, "--policy", "squared:budget=3"), capsys, *parts)
    refused(["calibrate", tmp_path / "none", "--data", text, "-o", tmp_path / "s"], capsys, "no transformers model at")


def test_unusable_text_and_tokenizer_are_refused(
    model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short\n<|endoftext|>\nalso short")
    refused(
        ["calibrate", model, "--data", short, "-o", tmp_path / "s"], capsys, "2 are shorter than 128", "--min-document"
    )
    refused(["calibrate", model, "--data", tmp_path / "none.txt", "-o", tmp_path / "s"], capsys, "none.txt")
    refused(["calibrate", model, "--data", text, "-o", tmp_path / "no" / "s"], capsys, "does not exist")
    small = save_model(tmp_path / "small", vocabulary=100)
    refused(["calibrate", small, "--data", text, "-o", tmp_path / "s"], capsys, "8192 entries", "embeds 100")
    bad = tmp_path / "items.jsonl"
    bad.write_text('{"task": "add", "prompt": "1 + 1 ="}\n')
    refused(evaluation(model, text, "--policy", "squared:budget=3", "--tasks", bad), capsys, "line 1", "target")
    refused(evaluation(model, text, "--policy", "squared:budget=3", "--dtype", "int5"), capsys, "'int5'", "bfloat16")


def test_traceback_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEBUDGET_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown policy"):
        run(["eval", "m", "--data", "d", "--policy", "nothing"])
