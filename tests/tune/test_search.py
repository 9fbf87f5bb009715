"""The search on made-up models with known losses, against exhaustive search; targets, timings and the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moebudget.bench.diagnose.timing import read_timing
from moebudget.core.policy import Policy
from moebudget.core.stats import ModelFacts
from moebudget.evaluate.paired import Paired
from moebudget.evaluate.quality import Quality
from moebudget.tune.ledger import Ledger, hash_items, hash_windows, setting
from moebudget.tune.search import Search, confirm, defaults, sweeps_of
from moebudget.tune.target import Target, read_target, require_samples

FACTS = ModelFacts("qwen3_moe", tuple(range(6)), 64, 8, 16, "")
UNION = 35.5
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
Loss = Callable[[str, int], float]


def quality(policy: str, fetched: float, loss: float, half: float = 0.01) -> Quality:
    gap = None if policy == "native" else Paired(loss, loss - half, loss + half, 48)
    return Quality(
        policy, 16, fetched, UNION, 1.0, 3 + loss, 3.0, half, 90.0, 1.0, math.nan, {}, None, None, None, 1, 0, gap, gap
    )


def falling(method: str, budget: int) -> float:
    """Loss of a setting: base's halves every four experts, with fill=geometric it is lower, oea's is higher."""
    scale = {"base": 1.0, "base,fill=geometric": 0.85, "oea": 1.5}[method]
    return scale * 2 ** (-budget / 4)


def ledger_of(path: Path, loss: Loss = falling, half: float = 0.01, **changes: Any) -> tuple[Ledger, list[str]]:
    """A ledger over made-up measurements, and the policies measured so far."""
    measured: list[str] = []

    def measure(policies: list[Policy]) -> list[Quality]:
        results = [quality("native", UNION, 0.0)]
        for p in policies:
            measured.append(p.name)
            method, number = p.name.split(":")[0], int(p.name.split("=")[1].split(",")[0])
            fetched = min(UNION, 8.0 * number if method == "oea" else float(number))
            method += ",fill=geometric" if "fill=geometric" in p.name else ""
            results.append(quality(p.name, fetched, loss(method, round(fetched)), half))
        return results

    values = {"model_hash": "m", "stats_hash": "s", "dtype": "float32", "B": 16, "text_hash": "t", "items_hash": None}
    ledger = Ledger(path, "tiny", {**values, "length": 8, **changes}, {"commit": "c"}, measure)
    ledger.read()
    return ledger, measured


def best_by_trying(bound: float, half: float = 0.01) -> int:
    """The fewest experts within the bound, over every budget of both fills of base."""
    return min(
        b for b in range(1, 36) if min(falling("base", b), falling("base,fill=geometric", b)) + half <= bound
    )  # fmt: skip


@pytest.mark.parametrize("bound", [0.5, 0.1, 0.05, 0.02])
@pytest.mark.parametrize("order", [["base", "base:fill=geometric", "oea"], ["oea", "base:fill=geometric", "base"]])
def test_search_finds_the_smallest_budget_with_few_evaluations(bound: float, order: list[str], tmp_path: Path) -> None:
    ledger, measured = ledger_of(tmp_path / "rows.jsonl")
    candidates = Search(sweeps_of(order, FACTS), ledger, Target("loss", bound), lambda _: None).by_quality()
    assert candidates[0][2]["fetched"] == best_by_trying(bound)
    assert "fill=geometric" in candidates[0][2]["policy"] or falling("base", best_by_trying(bound)) + 0.01 <= bound
    assert len(measured) <= 14
    assert len(measured) == len(set(measured))


def test_sweep_that_cannot_win_is_left_early(tmp_path: Path) -> None:
    """oea:k0=4 meets the bound with too many experts, k0=2 fails it and still fetches more than base needs."""
    ledger, measured = ledger_of(tmp_path / "rows.jsonl")
    candidates = Search(
        sweeps_of(["base:fill=geometric", "oea"], FACTS), ledger, Target("loss", 0.1), print
    ).by_quality()
    assert [f[2]["policy"] for f in candidates] == ["base:budget=13,fill=geometric"]
    assert [a for a in measured if a.startswith("oea")] == ["oea:k0=4", "oea:k0=2"]


def test_bound_below_every_loss_has_no_candidate(tmp_path: Path) -> None:
    ledger, _ = ledger_of(tmp_path / "rows.jsonl", half=0.2)
    assert Search(sweeps_of(["base", "oea"], FACTS), ledger, Target("loss", 0.1), lambda _: None).by_quality() == []


def test_budget_of_the_union_or_more_is_no_candidate(tmp_path: Path) -> None:
    """Only a loss increase of 0 is allowed, which the union itself has, but the union saves nothing."""
    ledger, _ = ledger_of(tmp_path / "rows.jsonl", loss=lambda _, b: 0.0 if b >= UNION - 0.6 else 1.0, half=0.0)
    candidates = Search(sweeps_of(["base"], FACTS), ledger, Target("loss", 1e-6), lambda _: None).by_quality()
    assert [f[2]["fetched"] for f in candidates] in ([], [35.0])


def test_candidates_fetch_at_most_the_target_best_loss_first(tmp_path: Path) -> None:
    ledger, measured = ledger_of(tmp_path / "rows.jsonl")
    search = Search(sweeps_of(["base", "base:fill=geometric", "oea"], FACTS), ledger, Target("experts", 17.5), print)
    candidates = search.by_experts(17.5)
    assert [f[2]["policy"] for f in candidates] == ["base:budget=17,fill=geometric", "base:budget=17", "oea:k0=2"]
    assert len([a for a in measured if a.startswith("base")]) == 2
    assert [f[2]["policy"] for f in search.by_experts(7)] == ["base:budget=7,fill=geometric", "base:budget=7"]
    fixed = Search(sweeps_of(["base:budget=12", "base:budget=18"], FACTS), ledger, Target("experts", 17.5), print)
    assert [f[2]["policy"] for f in fixed.by_experts(17.5)] == ["base:budget=12"]


def test_candidate_is_confirmed_on_other_samples(tmp_path: Path) -> None:
    target = Target("loss", 0.1)
    first, _ = ledger_of(tmp_path / "rows.jsonl")
    candidates = Search(sweeps_of(["base"], FACTS), first, target, lambda _: None).by_quality()
    assert candidates[0][1] == 14
    second, _ = ledger_of(tmp_path / "rows.jsonl", loss=lambda p, b: 1.2 * falling(p, b), text_hash="u")
    answer = confirm(candidates, second, target, 0.0, lambda _: None)
    assert (str(answer.policy), answer.tried) == ("base:budget=15", 2)
    worse, _ = ledger_of(tmp_path / "rows.jsonl", loss=lambda p, b: 9 * falling(p, b), text_hash="v")
    refused = confirm(candidates, worse, target, 0.0, lambda _: None)
    assert (refused.policy, refused.tried) == (None, 3)
    assert "base:budget=16 loses up to 0.573 at 95 % on samples that the search did not see" in refused.reason


def test_row_is_measured_once_per_setting(tmp_path: Path) -> None:
    path, policies = tmp_path / "rows.jsonl", [p.policy(9) for p in sweeps_of(["base", "oea"], FACTS)[:1]]
    first, measured = ledger_of(path)
    rows = first.get(policies)
    assert (measured, first.measured) == (["base:budget=9"], 1)
    again, measured = ledger_of(path)
    assert again.get(policies) == rows
    assert (measured, again.measured) == ([], 0)
    for change in ({"text_hash": "u"}, {"model_hash": "n"}, {"stats_hash": "r"}, {"B": 8}, {"items_hash": "i"}):
        second, measured = ledger_of(path, **change)
        second.get(policies)
        assert measured == ["base:budget=9"], change
    free = [p.policy(2) for p in sweeps_of(["oea"], FACTS)]
    first.get(free)
    shared, measured = ledger_of(path, stats_hash="another")
    shared.get(free)
    assert measured == []
    path.write_text('{"bench": "tune"}\nnot json\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        ledger_of(path)
    path.write_text('{"bench": "tune"}\n\n[1]\n')
    with pytest.raises(ValueError, match="line 3: not a row"):
        ledger_of(path)


def test_hashes_tell_samples_apart(tmp_path: Path) -> None:
    windows = torch.arange(12).view(3, 4)
    assert hash_windows(windows) == hash_windows(windows.clone())
    assert len({hash_windows(w) for w in (windows, windows + 1, windows.view(4, 3), windows.flip(0))}) == 4
    assert hash_items([]) is None
    file = tmp_path / "s"
    file.write_bytes(b"1")
    values = {"model_hash": "m", "dtype": "float32", "batch": 2, "windows": windows, "items": []}
    first = setting(stats=file, **values)
    file.write_bytes(b"2")
    assert first["stats_hash"] != setting(stats=file, **values)["stats_hash"]
    assert first["length"] == 3


def timing(path: Path, a: float, b: float, wobble: float = 0.0, **changes: Any) -> Path:
    points = [[x, a + b * x + wobble * (-1) ** i, 1.0] for i, x in enumerate((30.0, 24.0, 16.0, 10.0, 8.0, 4.0))]
    row = {"bench": "diagnose", "engine": "vllm", "B": 16, "N": 64, "K": 8, "layers": 6, "points": points, **changes}
    path.write_text(json.dumps(row) + "\n")
    return path


def target_at(path: Path, **bounds: float) -> Target:
    target = read_target(timing=path, **bounds)
    target.prepare(FACTS, 16)
    return target


def test_speed_becomes_a_number_of_experts_on_the_line(tmp_path: Path) -> None:
    path = timing(tmp_path / "t.jsonl", 2.0, 0.1)
    assert target_at(path, tpot=3.0).experts_at(40) == pytest.approx(10)
    assert target_at(path, speedup=1.5).experts_at(40) == pytest.approx(20)
    for bounds, union, says in (
        ({"speedup": 3.0}, 40, "with one expert per layer a step takes 2.100 ms, 2.86 times faster"),
        ({"tpot": 2.05}, 40, "needs 2.050 ms per step"),
        ({"tpot": 5.0}, 25, "native routing fetches 25.0 experts per layer, which the target of 30.0 does not limit"),
    ):
        assert says in str(target_at(path, **bounds).experts_at(union))
    flat = timing(tmp_path / "flat.jsonl", 5.0, 0.0, 0.01)
    assert "does not depend on fetched experts" in str(target_at(flat, tpot=4.9).experts_at(40))


def test_timing_of_another_model_or_batch_and_estimates_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for changes, says in (
        ({"N": 128}, "N is 128 in the file and 64 in this model"),
        ({"layers": 48}, "layers is 48 in the file and 6 in this model"),
        ({"B": 8}, "measured batch sizes: 8"),
        ({"engine": "none"}, "measured batch sizes: none"),
    ):
        with pytest.raises(ValueError, match=says):
            read_timing(timing(path, 2, 0.1, **changes), FACTS, 16)
    with pytest.raises(FileNotFoundError, match="there is no timing file"):
        read_timing(tmp_path / "none.jsonl", FACTS, 16)
    path.write_text("{}\n[1]\nnot json\n")
    with pytest.raises(ValueError, match="line 3: not JSON"):
        read_timing(path, FACTS, 16)


def test_times_on_two_gpus_do_not_price_an_expert(tmp_path: Path) -> None:
    path = tmp_path / "timing.jsonl"
    rows = [
        {"bench": "decode", "model": "m", "B": 16, "date": "d", "fetched": m, "tpot_ms": 2 + m / 10} for m in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *({**r, "tp": 2, "tpot_ms": 9} for r in rows)]))
    assert read_timing(path, FACTS, 16).b == pytest.approx(0.1)


def test_line_equals_the_fit_of_bench_decode() -> None:
    """Compared with the fit among the rows of the bench."""
    rows = [json.loads(line) for line in (RESULTS / "decode.jsonl").read_text().splitlines()]
    fits = [r for r in rows if r["bench"] == "decode_fit" and r.get("tp", 1) == 1]
    fitted = [r for r in fits if r["model"] == "qwen3-30b" and r["B"] == 16][-1]
    line = read_timing(RESULTS / "decode.jsonl", ModelFacts("qwen3_moe", tuple(range(48)), 128, 8, 2048, ""), 16)
    assert (line.a, line.b) == (pytest.approx(fitted["a_ms"], rel=1e-6), pytest.approx(fitted["b_ms"], rel=1e-6))


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ({}, "given: none"),
        ({"experts": 10, "loss": 0.1}, "given: --experts 10 and --max-loss-increase 0.1"),
        ({"experts": 0.5}, "--experts 0.5 must be at least 1"),
        ({"speedup": 1.0}, "--speedup 1 must be above 1"),
        ({"loss": 0.0}, "--max-loss-increase 0 must be above 0"),
        ({"task": math.nan}, "--max-task-drop nan must be above 0"),
        ({"tpot": 5.0}, "--tpot needs step times"),
    ],
)
def test_impossible_target_is_refused(bounds: dict[str, float], says: str) -> None:
    options = dict.fromkeys(("experts", "speedup", "tpot", "loss", "task"))
    with pytest.raises(ValueError, match=says):
        read_target(**{**options, **bounds})


def test_samples_too_few_for_the_bound_are_refused() -> None:
    loss, task = Target("loss", 0.1), Target("task", 2.0)
    require_samples(loss, 30, 30, [])
    require_samples(task, 30, 30, ["a"] * 300)
    require_samples(Target("experts", 9), 5, 30, [])
    with pytest.raises(ValueError, match="29 of 59 windows are left to search on"):
        require_samples(loss, 29, 30, [])
    for target, windows, items, says in (
        (loss, 29, 0, "29 of 59 windows are left to confirm"),
        (task, 30, 50, "50 items are left to confirm a choice on, and a verdict needs 200"),
        (Target("task", 0.5), 30, 300, "may lose up to 1.0 points; give about 1200 items"),
    ):
        with pytest.raises(ValueError, match=says):
            require_samples(target, 30, windows, ["a"] * items)
    with pytest.raises(ValueError, match="must be between 1 and 63"):
        Target("experts", 64).prepare(FACTS, 16)


def test_defaults_are_the_policies_whose_statistics_are_held() -> None:
    predictor = ["predictor_weight", "predictor_bias"]
    assert defaults([], FACTS) == ["squared", "oea"]
    assert defaults(predictor, FACTS) == ["base:fill=geometric", "base", "oea"]
    assert defaults([*predictor, "layer_budget"], FACTS) == ["base:fill=geometric", "base", "spread", "oea"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lynx", "searches whole numbers"),
        ("lynx_lat", "the free number of 'lynx_lat' lowers them"),
        ("oracle", "analysis"),
    ],
)
def test_sweep_that_cannot_be_tuned_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sweeps_of([text], FACTS)
