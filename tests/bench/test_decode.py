"""Rows of `bench decode` from timings, and refusals before an engine starts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moebudget.bench import decode
from moebudget.bench.decode import ramp, remarks, rows_of, run_decode, run_policies
from moebudget.bench.engine import Plan, RandomWeights, Timing
from moebudget.bench.sizes import SIZES, moe_facts, random_stats
from moebudget.engines.transformers.loading import MissingExtraError
from moebudget.methods.registry import parse

DEMO = Path(decode.__file__).parents[1] / "demo/model"


def timing(batch: int, budget: int, fetched: float, tpot: float) -> Timing:
    return Timing(batch, budget, tpot, 1000 / tpot, fetched, 80.0, fetched, "kernel", 10, 4)


TIMINGS = [
    timing(16, 128, 80.0, 12.0),
    timing(16, 16, 16.0, 5.6),
    timing(16, 10, 10.0, 5.0),
    timing(5, 128, 30.0, 7.0),
]


def test_line_is_fitted_to_the_settings() -> None:
    def fitted(timings: list[Timing]) -> dict[str, Any]:
        rows = rows_of(Plan("m", True, (16,)), "m", "p", timings, [], None)
        return next(row for row in rows if row["bench"] == "decode_fit")

    row = fitted(TIMINGS[:3])
    assert (row["a_ms"], row["b_ms"], row["r2"]) == pytest.approx((4.0, 0.1, 1.0))
    assert fitted([*TIMINGS[:3], timing(16, 64, 64.0, 11.4)])["r2"] < 0.99


def test_rows_are_kept_without_a_line_if_all_settings_fetch_the_same() -> None:
    timings = [timing(1, m, 8.0, 4.0) for m in (128, 16, 10)]
    assert [r["bench"] for r in rows_of(Plan("m", True, (1,)), "m", "p", timings, [], None)] == ["decode"] * 3


def test_speedup_is_relative_to_native_routing() -> None:
    rows = list(rows_of(Plan("m", True, (16, 5)), "m", "base:budget=16", TIMINGS, [Timing(16, None, 11.9, 80)], 48.0))
    assert [(r["bench"], r["B"], r.get("M")) for r in rows] == [
        ("decode", 16, 128), ("decode", 16, 16), ("decode", 16, 10), ("decode_fit", 16, None), ("decode", 5, 128),
    ]  # fmt: skip
    assert [r["speedup"] for r in rows if r["bench"] == "decode"] == pytest.approx([1.0, 12 / 5.6, 2.4, 1.0])
    assert [r["baseline_tpot_ms"] for r in rows if r["bench"] == "decode"] == [11.9, 11.9, 11.9, None]
    assert [r["baseline_same_tokens"] for r in rows if r["bench"] == "decode"] == [False, False, False, None]
    assert rows[1]["gb_s"] == pytest.approx(16 * 10 * 4 / 5.6e-3 / 1e9)
    # On the line 4 + .1 x: 48 experts take 8.8, 10 take 5.
    assert rows[3]["speedup_at_union"] == pytest.approx({"128": 1.0, "16": 8.8 / 5.6, "10": 8.8 / 5.0})


@pytest.mark.parametrize(
    ("digests", "same"), [(("ab", "ab"), True), (("ab", "cd"), False), (("", ""), False), (("ab", ""), False)]
)
def test_equal_digests_mean_that_the_baseline_did_the_same_work(digests: tuple[str, str], same: bool) -> None:
    timings = [dataclasses.replace(timing(16, 64, 40.0, 9.0), digest=digests[0], tpots=(9.0, 9.9, 9.3))]
    baseline = [Timing(16, None, 8.0, 80, digest=digests[1], tpots=(8.8, 8.0))]
    [row] = rows_of(Plan("m", True, (16,)), "m", "p", timings, baseline, None)
    assert row["baseline_same_tokens"] is same
    assert (row["digest"], row["spread"]) == (digests[0], pytest.approx(0.1))
    assert (row["native_spread"], row["baseline_spread"]) == (pytest.approx(0.1), pytest.approx(0.1))


def test_remark_on_the_plugins_cost_says_whether_the_tokens_were_the_same() -> None:
    row = {"B": 16, "M": 128, "spread": 0.02, "native_tpot_ms": 8.2, "baseline_tpot_ms": 8.0, "in_process": False}
    [said] = remarks([{**row, "baseline_same_tokens": True, "M": 10}, {**row, "baseline_same_tokens": True}])
    assert said.startswith(
        "B=16: 8.00 ms for the baseline without the plugin; the plugin with native routing: +2.5 % (both"
    )
    for in_process in (False, True):
        [said] = remarks([{**row, "baseline_same_tokens": False, "in_process": in_process}])
        assert "different tokens" in said
        assert ("--in-process" in said) != in_process
    assert list(remarks([{**row, "baseline_tpot_ms": None}])) == []


def test_repeats_that_differ_get_a_remark() -> None:
    row = {"B": 8, "M": 10, "baseline_tpot_ms": None}
    assert list(remarks([{**row, "spread": spread} for spread in (None, 0.1)])) == []
    [said] = remarks([{**row, "spread": 1.4}])
    assert said.startswith("B=8, budget 10: repeats differ by 140 %;")


@pytest.mark.parametrize("tpots", [(), (3.0,), (-0.1, 3.0)])
def test_single_or_negative_times_have_no_spread(tpots: tuple[float, ...]) -> None:
    assert Timing(16, None, 3.0, 80, tpots=tpots).spread is None


def test_uneven_budgets_do_not_take_part_in_the_line() -> None:
    uneven = dataclasses.replace(timing(16, 16, 16.0, 6.0), budgets=(8, 24))
    rows = list(rows_of(Plan("m", True, (16,)), "m", "base:budget=16", [*TIMINGS[:3], uneven], [], None))
    assert [r["bench"] for r in rows] == ["decode", "decode", "decode", "decode_fit", "decode_uneven"]
    assert (rows[3]["a_ms"], rows[3]["b_ms"]) == pytest.approx((4.0, 0.1))
    assert (rows[4]["M"], rows[4]["budgets"], rows[4]["tpot_ms"]) == (16, [8, 24], 6.0)
    assert rows[4]["line_ms"] == pytest.approx(5.6)


@pytest.mark.parametrize(
    ("budget", "layers", "experts"), [(16, 48, 128), (10, 6, 64), (1, 5, 8), (60, 24, 64), (9, 4, 8)]
)
def test_ramp_keeps_the_mean_and_the_limits(budget: int, layers: int, experts: int) -> None:
    budgets = ramp(budget, layers, experts)
    assert len(budgets) == layers
    assert sum(budgets) == min(budget, experts) * layers
    assert 1 <= min(budgets) <= max(budgets) <= experts
    if 2 < budget < experts:
        assert max(budgets) - min(budgets) >= min(budget, 2 * (experts - budget)) - 1


def test_bandwidth_counts_the_experts_of_the_fullest_rank() -> None:
    """With two ranks the fullest one sets the pace, and no line is fitted to the sum."""
    engine = (("tensor_parallel_size", 2), ("enable_expert_parallel", True))
    parallel = [
        dataclasses.replace(t, ranks=2, by_rank=(1.0, 2.0), fullest=0.6 * (t.fetched or 0)) for t in TIMINGS[:3]
    ]
    rows = list(rows_of(Plan("m", True, (16,), engine=engine), "m", "base:budget=16", parallel, [], None))
    assert [r["bench"] for r in rows] == ["decode"] * 3
    assert {(r["tp"], r["ep"]) for r in rows} == {(2, 2)}
    assert [r["max_fetched_per_rank"] for r in rows] == pytest.approx([48.0, 9.6, 6.0])
    assert rows[0]["fetched_per_rank"] == [1.0, 2.0]
    assert rows[1]["gb_s"] == pytest.approx(9.6 * 10 * 4 / 5.6e-3 / 1e9)
    alone = list(rows_of(Plan("m", True, (16,), engine=engine[:1]), "m", "base:budget=16", TIMINGS[:3], [], None))
    assert {(r["tp"], r["ep"]) for r in alone} == {(2, 1)}
    assert alone[-1]["bench"] == "decode_fit"
    assert alone[0]["max_fetched_per_rank"] is None


def test_all_policies_are_compared_with_one_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, ...]] = []

    def timed(arguments: tuple[Any, ...]) -> list[Timing]:
        started.append(arguments)
        _, policy, _, budgets, _ = arguments
        if policy is None:
            return [Timing(16, None, 11.0, 80)]
        return [timing(16, m, m, 4 + m / 10 + ("ep" in policy)) for m in budgets[16]]

    monkeypatch.setattr(decode, "_run_engine", timed)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    policies = {"base:budget=16": [16], "base_ep:budget=8": [8]}
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    rows = [r for r in run_policies("qwen1.5-moe", policies, **engine) if r["bench"] == "decode"]
    assert [(r["policy"], r["M"]) for r in rows] == [
        ("base:budget=16", 60), ("base:budget=16", 16), ("base_ep:budget=8", 60), ("base_ep:budget=8", 8),
    ]  # fmt: skip
    assert [r["tpot_ms"] for r in rows] == pytest.approx([10.0, 5.6, 11.0, 5.8])
    assert {r["baseline_tpot_ms"] for r in rows} == {11.0}
    assert [policy for _, policy, *_ in started] == [None, *policies]
    assert {plan.engine for plan, *_ in started} == {tuple(engine.items())}


@pytest.mark.parametrize("baseline", [True, False])
def test_engines_of_several_models_share_one_turn(baseline: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    def run(name: str, turn: Any = None, **options: Any) -> list[dict[str, Any]]:
        started[name] = turn
        return [{"model": name, **options}]

    manager = SimpleNamespace(Barrier=threading.Barrier, Condition=threading.Condition, list=list)
    context = SimpleNamespace(Manager=lambda: contextlib.nullcontext(manager))
    monkeypatch.setattr(decode, "run_decode", run)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    rows = list(decode.run_models(["a", "b"], together=True, baseline=baseline))
    assert rows == [[{"model": "a", "baseline": baseline}], [{"model": "b", "baseline": baseline}]]
    assert started["a"] is started["b"]
    assert started["a"].started.parties == (4 if baseline else 2)
    assert list(decode.run_models(["c"], baseline=baseline)) == [[{"model": "c", "baseline": baseline}]]
    assert started["c"] is None


def test_union_applies_to_the_first_batch_size_only() -> None:
    timings = [timing(b, m, f, 4 + f / 10) for b in (16, 64) for m, f in ((128, 80.0), (16, 16.0), (10, 10.0))]
    rows = rows_of(Plan("m", True, (16, 64)), "m", "p", timings, [], 48.0)
    assert [r["at_union"] for r in rows if r["bench"] == "decode_fit"] == [48.0, 80.0]


@pytest.mark.parametrize("name", SIZES)
def test_random_statistics_have_the_shapes_of_the_model(name: str) -> None:
    stats = random_stats({**SIZES[name], "hidden_size": 8}, parse("base:budget=4").needs)
    facts = moe_facts(SIZES[name])
    layers = SIZES[name]["num_hidden_layers"] - (1 if name.startswith("deepseek") else 0)
    assert len(facts.layers) == layers
    assert stats.tensors["predictor_weight"].shape == (layers, facts.experts, 8)


def test_random_layers_differ_and_have_unit_gain() -> None:
    worker, width = RandomWeights(), 256
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Linear(width, 64) for i in range(2)})
    model["norm"], model["packed"] = torch.nn.LayerNorm(width, bias=False), torch.nn.Module()
    model["packed"].weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    worker.model_runner = SimpleNamespace(model=model)
    worker.randomize_weights(0)
    first = model["layer0"].weight.detach().clone()
    assert not torch.equal(first, model["layer1"].weight)
    assert float((torch.randn(512, width) @ first.T).std()) == pytest.approx(1, rel=0.1)
    assert (model["norm"].weight == 1).all()
    assert (model["layer1"].bias == 0).all()
    assert (model["packed"].weight == 1).all()
    worker.randomize_weights(0)  # as in the baseline
    assert torch.equal(first, model["layer0"].weight)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"name": "qwen3-30b", "policy": "oea:k0=1"}, ValueError, "has no budget to sweep"),
        ({"name": "qwen3-30b", "budgets": [8, 0]}, ValueError, "budget=0 must be"),
        ({"name": "qwen3-30b", "batches": [0]}, ValueError, r"batch sizes \[0\]"),
        ({"name": "qwen3-30b", "batches": []}, ValueError, "a list of at least one"),
        (
            {"name": "nowhere"},
            FileNotFoundError,
            "'nowhere' is not a folder with a config.json, not a config.json, and not one of",
        ),
        ({"name": "qwen3-30b", "budgets": {16: [8], 4: [0]}, "batches": [16, 4]}, ValueError, "budget=0 must be"),
        ({"name": "qwen3-30b", "policy": "exfold:budget=4"}, ValueError, "random statistics do not include fold_loss"),
        ({"name": str(DEMO), "policy": "base:budget=4"}, ValueError, "reads predictor_bias, predictor_weight: give"),
        (
            {"name": "qwen3-30b", "tensor_parallel_size": 4},
            ValueError,
            r"ask for 4 GPUs \(tensor_parallel_size=4\), and 2 are visible",
        ),
        ({"name": "qwen3-30b", "policy": "base_ep:budget=4"}, ValueError, "reads which device holds an expert"),
        (
            {"name": "qwen3-30b", "policy": "base:budget=4,level=yes", "tensor_parallel_size": 2},
            ValueError,
            "and enable_expert_parallel=True",
        ),
        (
            {"name": "qwen3-30b", "uneven": [4], "tensor_parallel_size": 2, "enable_expert_parallel": True},
            ValueError,
            r"uneven=\[4\] is compared with a line",
        ),
    ],
)
def test_wrong_argument_is_refused_before_an_engine_starts(
    arguments: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_run_engine", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(error, match=says):
        run_decode(**arguments)


def test_model_without_experts_is_refused_before_an_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_run_engine", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    Path(tmp_path, "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    with pytest.raises(ValueError, match="model_type 'llama' has no number of experts"):
        run_decode(str(tmp_path), "squared:budget=4")


def test_missing_vllm_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(MissingExtraError, match=r"pip install 'moebudget\[vllm\]'"):
        run_decode("qwen3-30b")
