"""The search on made-up models with known losses, against trying everything; targets, timings and the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moebudget.diagnose.timing import read_timing
from moebudget.evaluate.paired import Paired
from moebudget.evaluate.report import Quality
from moebudget.policy import Policy
from moebudget.stats import ModelFacts
from moebudget.tune.ledger import Ledger, hash_items, hash_windows, setting
from moebudget.tune.search import Search, confirm, defaults, families_of
from moebudget.tune.target import Target, read_target, require_samples

FACTS = ModelFacts("qwen3_moe", tuple(range(6)), 64, 8, 16, "")
UNION = 35.5
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
Loss = Callable[[str, int], float]


def quality(policy: str, fetched: float, loss: float, half: float = 0.01) -> Quality:
    gap = None if policy == "dense" else Paired(loss, loss - half, loss + half, 48)
    return Quality(
        policy, 16, fetched, UNION, 1.0, 3 + loss, 3.0, half, 90.0, 1.0, math.nan, {}, None, None, None, 1, 0, gap, gap
    )


def falling(preset: str, budget: int) -> float:
    """Loss of a setting: base's halves every four experts, base half's is a little lower, oea's is higher."""
    scale = {"base": 1.0, "base,fill=half": 0.85, "oea": 1.5}[preset]
    return scale * 2 ** (-budget / 4)


def ledger_of(path: Path, loss: Loss = falling, half: float = 0.01, **changes: Any) -> tuple[Ledger, list[str]]:
    """A ledger over made-up measurements, and the policies measured so far."""
    asked: list[str] = []

    def measure(policies: list[Policy]) -> list[Quality]:
        found = [quality("dense", UNION, 0.0)]
        for p in policies:
            asked.append(p.name)
            preset, number = p.name.split(":")[0], int(p.name.split("=")[1].split(",")[0])
            fetched = min(UNION, 8.0 * number if preset == "oea" else float(number))
            preset += ",fill=half" if "fill=half" in p.name else ""
            found.append(quality(p.name, fetched, loss(preset, round(fetched)), half))
        return found

    values = {"model_hash": "m", "stats_hash": "s", "dtype": "float32", "B": 16, "text_hash": "t", "items_hash": None}
    ledger = Ledger(path, "tiny", {**values, "length": 8, **changes}, {"commit": "c"}, measure)
    ledger.read()
    return ledger, asked


def best_by_trying(bound: float, half: float = 0.01) -> int:
    """The fewest experts within the bound, over every budget of both forms of base."""
    return min(
        b for b in range(1, 36) if min(falling("base", b), falling("base,fill=half", b)) + half <= bound
    )  # fmt: skip


@pytest.mark.parametrize("bound", [0.5, 0.1, 0.05, 0.02])
@pytest.mark.parametrize("order", [["base", "base:fill=half", "oea"], ["oea", "base:fill=half", "base"]])
def test_search_misses_the_smallest_budget_or_tries_them_all(bound: float, order: list[str], tmp_path: Path) -> None:
    ledger, asked = ledger_of(tmp_path / "rows.jsonl")
    found = Search(families_of(order, FACTS), ledger, Target("loss", bound), lambda _: None).by_quality()
    assert found[0][2]["fetched"] == best_by_trying(bound)
    assert "fill=half" in found[0][2]["policy"] or falling("base", best_by_trying(bound)) + 0.01 <= bound
    assert len(asked) <= 14
    assert len(asked) == len(set(asked))


def test_family_that_cannot_win_is_searched_to_the_end(tmp_path: Path) -> None:
    """oea:k0=4 meets the bound with too many experts, k0=2 fails it and still fetches more than base needs."""
    ledger, asked = ledger_of(tmp_path / "rows.jsonl")
    found = Search(families_of(["base:fill=half", "oea"], FACTS), ledger, Target("loss", 0.1), print).by_quality()
    assert [f[2]["policy"] for f in found] == ["base:budget=13,fill=half"]
    assert [a for a in asked if a.startswith("oea")] == ["oea:k0=4", "oea:k0=2"]


def test_bound_below_every_loss_has_an_operating_point(tmp_path: Path) -> None:
    ledger, _ = ledger_of(tmp_path / "rows.jsonl", half=0.2)
    assert Search(families_of(["base", "oea"], FACTS), ledger, Target("loss", 0.1), lambda _: None).by_quality() == []


def test_budget_above_the_union_is_a_gain(tmp_path: Path) -> None:
    """Only a loss of 0 is allowed: the union itself has it, and saves nothing."""
    ledger, _ = ledger_of(tmp_path / "rows.jsonl", loss=lambda _, b: 0.0 if b >= UNION - 0.6 else 1.0, half=0.0)
    found = Search(families_of(["base"], FACTS), ledger, Target("loss", 1e-6), lambda _: None).by_quality()
    assert [f[2]["fetched"] for f in found] in ([], [35.0])


def test_experts_are_exceeded_or_the_worse_rule_wins(tmp_path: Path) -> None:
    ledger, asked = ledger_of(tmp_path / "rows.jsonl")
    search = Search(families_of(["base", "base:fill=half", "oea"], FACTS), ledger, Target("experts", 17.5), print)
    found = search.by_experts(17.5)
    assert [f[2]["policy"] for f in found] == ["base:budget=17,fill=half", "base:budget=17", "oea:k0=2"]
    assert len([a for a in asked if a.startswith("base")]) == 2
    assert [f[2]["policy"] for f in search.by_experts(7)] == ["base:budget=7,fill=half", "base:budget=7"]
    fixed = Search(families_of(["base:budget=12", "base:budget=18"], FACTS), ledger, Target("experts", 17.5), print)
    assert [f[2]["policy"] for f in fixed.by_experts(17.5)] == ["base:budget=12"]


def test_choice_that_other_samples_refute_is_confirmed(tmp_path: Path) -> None:
    target = Target("loss", 0.1)
    first, _ = ledger_of(tmp_path / "rows.jsonl")
    found = Search(families_of(["base"], FACTS), first, target, lambda _: None).by_quality()
    assert found[0][1] == 14
    second, _ = ledger_of(tmp_path / "rows.jsonl", loss=lambda p, b: 1.2 * falling(p, b), text_hash="u")
    answer = confirm(found, second, target, 0.0, lambda _: None)
    assert (str(answer.policy), answer.tried) == ("base:budget=15", 2)
    worse, _ = ledger_of(tmp_path / "rows.jsonl", loss=lambda p, b: 9 * falling(p, b), text_hash="v")
    refused = confirm(found, worse, target, 0.0, lambda _: None)
    assert (refused.policy, refused.tried) == (None, 3)
    assert "base:budget=16 loses up to 0.573 at 95 % on the samples that the search did not see" in refused.reason


def test_row_is_measured_twice_or_used_for_other_samples(tmp_path: Path) -> None:
    path, policies = tmp_path / "rows.jsonl", [p.policy(9) for p in families_of(["base", "oea"], FACTS)[:1]]
    first, asked = ledger_of(path)
    rows = first.get(policies)
    assert (asked, first.measured) == (["base:budget=9"], 1)
    again, asked = ledger_of(path)
    assert again.get(policies) == rows
    assert (asked, again.measured) == ([], 0)
    for change in ({"text_hash": "u"}, {"model_hash": "n"}, {"stats_hash": "r"}, {"B": 8}, {"items_hash": "i"}):
        other, asked = ledger_of(path, **change)
        other.get(policies)
        assert asked == ["base:budget=9"], change
    free = [p.policy(2) for p in families_of(["oea"], FACTS)]
    first.get(free)
    shared, asked = ledger_of(path, stats_hash="another")
    shared.get(free)
    assert asked == []
    path.write_text('{"bench": "tune"}\nnot json\n')
    with pytest.raises(ValueError, match="line 2: not JSON"):
        ledger_of(path)
    path.write_text('{"bench": "tune"}\n\n[1]\n')
    with pytest.raises(ValueError, match="line 3: no row"):
        ledger_of(path)


def test_hash_does_not_tell_samples_apart(tmp_path: Path) -> None:
    windows = torch.arange(12).view(3, 4)
    assert hash_windows(windows) == hash_windows(windows.clone())
    assert len({hash_windows(w) for w in (windows, windows + 1, windows.view(4, 3), windows.flip(0))}) == 4
    assert hash_items([]) is None
    file = tmp_path / "s"
    file.write_bytes(b"1")
    values = {"model_hash": "m", "dtype": "float32", "batch": 2, "windows": windows, "items": []}
    one = setting(stats=file, **values)
    file.write_bytes(b"2")
    assert one["stats_hash"] != setting(stats=file, **values)["stats_hash"]
    assert one["length"] == 3


def timing(path: Path, a: float, b: float, wobble: float = 0.0, **changes: Any) -> Path:
    points = [[x, a + b * x + wobble * (-1) ** i, 1.0] for i, x in enumerate((30.0, 24.0, 16.0, 10.0, 8.0, 4.0))]
    row = {"bench": "diagnose", "engine": "vllm", "B": 16, "N": 64, "K": 8, "layers": 6, "points": points, **changes}
    path.write_text(json.dumps(row) + "\n")
    return path


def target_at(path: Path, **given: float) -> Target:
    target = read_target(timing=path, **given)
    target.prepare(FACTS, 16)
    return target


def test_speed_becomes_another_number_of_experts(tmp_path: Path) -> None:
    path = timing(tmp_path / "t.jsonl", 2.0, 0.1)
    assert target_at(path, tpot=3.0).experts_at(40) == pytest.approx(10)
    assert target_at(path, speedup=1.5).experts_at(40) == pytest.approx(20)
    for given, union, says in (
        ({"speedup": 3.0}, 40, "with one expert a layer it takes 2.100 ms, 2.86 times faster"),
        ({"tpot": 2.05}, 40, "asks for 2.050 ms a step"),
        ({"tpot": 5.0}, 25, "the unchanged model fetches 25.0 experts a layer, no more than the 30.0"),
    ):
        assert says in str(target_at(path, **given).experts_at(union))
    flat = timing(tmp_path / "flat.jsonl", 5.0, 0.0, 0.01)
    assert "does not depend on fetched experts" in str(target_at(flat, tpot=4.9).experts_at(40))


def test_timing_of_another_model_batch_or_an_estimate_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for changes, says in (
        ({"N": 128}, "N is 128 there and 64 here"),
        ({"layers": 48}, "layers is 48 there and 6 here"),
        ({"B": 8}, "measured batches: 8"),
        ({"engine": "none"}, "measured batches: none"),
    ):
        with pytest.raises(ValueError, match=says):
            read_timing(timing(path, 2, 0.1, **changes), FACTS, 16)
    with pytest.raises(FileNotFoundError, match="no timing at"):
        read_timing(tmp_path / "none.jsonl", FACTS, 16)
    path.write_text("{}\n[1]\nnot json\n")
    with pytest.raises(ValueError, match="line 3: not JSON"):
        read_timing(path, FACTS, 16)


def test_times_on_two_gpus_price_an_expert_on_one(tmp_path: Path) -> None:
    path = tmp_path / "timing.jsonl"
    rows = [
        {"bench": "decode", "model": "m", "B": 16, "date": "d", "fetched": m, "tpot_ms": 2 + m / 10} for m in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *({**r, "tp": 2, "tpot_ms": 9} for r in rows)]))
    assert read_timing(path, FACTS, 16).b == pytest.approx(0.1)


def test_line_of_bench_decode_is_another() -> None:
    """Against the fit that the bench itself has written beside its rows."""
    rows = [json.loads(line) for line in (RESULTS / "decode.jsonl").read_text().splitlines()]
    fits = [r for r in rows if r["bench"] == "decode_fit" and r.get("tp", 1) == 1]
    fitted = [r for r in fits if r["model"] == "qwen3-30b" and r["B"] == 16][-1]
    line = read_timing(RESULTS / "decode.jsonl", ModelFacts("qwen3_moe", tuple(range(48)), 128, 8, 2048, ""), 16)
    assert (line.a, line.b) == (pytest.approx(fitted["a_ms"], rel=1e-6), pytest.approx(fitted["b_ms"], rel=1e-6))


@pytest.mark.parametrize(
    ("given", "says"),
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
def test_impossible_target_is_taken(given: dict[str, float], says: str) -> None:
    options = dict.fromkeys(("experts", "speedup", "tpot", "loss", "task"))
    with pytest.raises(ValueError, match=says):
        read_target(**{**options, **given})


def test_samples_too_few_for_the_bound_are_taken() -> None:
    loss, task = Target("loss", 0.1), Target("task", 2.0)
    require_samples(loss, 30, 30, [])
    require_samples(task, 30, 30, ["a"] * 300)
    require_samples(Target("experts", 9), 5, 30, [])
    with pytest.raises(ValueError, match="29 windows of 59 are left to search on"):
        require_samples(loss, 29, 30, [])
    for target, windows, items, says in (
        (loss, 29, 0, "29 windows of 59 are left to confirm"),
        (task, 30, 50, "50 items are left to confirm a choice on, a verdict needs 200"),
        (Target("task", 0.5), 30, 300, "may lose up to 1.0 points; give about 1200 items"),
    ):
        with pytest.raises(ValueError, match=says):
            require_samples(target, 30, windows, ["a"] * items)
    with pytest.raises(ValueError, match="must lie between 1 and 63"):
        Target("experts", 64).prepare(FACTS, 16)


def test_default_that_the_statistics_do_not_hold_is_searched() -> None:
    predictor = ["predictor_weight", "predictor_bias"]
    assert defaults([], FACTS) == ["squared", "oea"]
    assert defaults(predictor, FACTS) == ["base:fill=half", "base", "oea"]
    assert defaults([*predictor, "layer_budget"], FACTS) == ["base:fill=half", "base", "spread", "oea"]


@pytest.mark.parametrize(
    ("text", "says"), [("lynx", "searches whole numbers"), ("lynx_lat", "lynx_lat's falls"), ("oracle", "analysis")]
)
def test_family_that_cannot_be_tuned_is_searched(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        families_of([text], FACTS)
