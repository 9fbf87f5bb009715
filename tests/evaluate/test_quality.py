from __future__ import annotations

import dataclasses
import io
import json
import math
from typing import Any

import pytest
import torch
from rich.console import Console

from moebudget import parse
from moebudget.core.provenance import stamp
from moebudget.evaluate import Quality, evaluate, evaluate_tasks, evaluate_text, retained_energy
from moebudget.evaluate.corpus import load_windows
from moebudget.evaluate.quality import expert_bytes, half_width, pm, quality_table
from tests.calibrate.fitted import built, usual_stats
from tests.engines.transformers import tiny
from tests.evaluate.test_tasks import Letters, questions

WINDOWS = tiny.prompts(7, 12, seed=5)
POLICIES = ("topk:k=1", "base:budget=3")
NO_GAPS: dict[str, Any] = {"loss_gap": None, "task_gap": None, "by_quarter": (), "fetched_by_layer": ()}
# Required fields of a line of benchmarks/results/quality.jsonl (the stamp adds commit, command, device and versions).
FIELDS = set(
    "bench model B policy fetched native_union nll native_nll tasks task_avg agreement retained_energy tokens".split()
)


def measure(*policies: str, **settings: Any) -> list[Quality]:
    usual: dict[str, Any] = {"batch": 3, "quiet": True, **settings}
    return evaluate(built("qwen3_moe"), [parse(p) for p in policies], usual_stats("qwen3_moe"), WINDOWS, **usual)


def quality(**changes: Any) -> Quality:
    values: dict[str, Any] = dict.fromkeys((f.name for f in dataclasses.fields(Quality)), 1.0)
    return Quality(
        **{
            **values,
            "policy": "base:budget=3",
            "batch": 16,
            "tasks": {},
            "tokens": 5,
            "items": 0,
            "slices": {},
            **NO_GAPS,
            **changes,
        }
    )


def test_row_has_the_required_fields() -> None:
    row = quality(tasks={"add": 50.0}, task_avg=50.0, nll=2.5).as_row("tiny")
    assert set(row) >= FIELDS
    assert set(row | stamp("cpu")) >= FIELDS | {"commit", "command", "device", "versions"}
    assert not set(row) & set(stamp("cpu"))
    assert (row["bench"], row["model"], row["B"], row["policy"]) == ("quality", "tiny", 16, "base:budget=3")
    assert (row["tasks"], row["task_avg"], row["nll"]) == ({"add": 50.0}, 50.0, 2.5)


def test_row_without_intervals_or_tasks_is_strict_json() -> None:
    nan = math.nan
    row = quality(nll_delta_half=nan, agreement_half=nan, task_avg=None, task_half=None, task_fetched=None).as_row(
        "tiny"
    )
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["nll_delta_ci95"] is row["agreement_ci95"] is row["task_avg"] is row["task_ci95"] is None


def test_interval_of_a_known_sample() -> None:
    """0, 1 and 2 in equal shares: the variance with n - 1 is 2/3 n/(n - 1)."""
    n = 300
    sample = torch.tensor([0.0, 1.0, 2.0]).repeat(n // 3)
    assert half_width(sample) == pytest.approx(1.96 * math.sqrt(2 / 3 / (n - 1)))


@pytest.mark.parametrize(("count", "interval"), [(1, False), (29, False), (30, True)])
def test_fewer_than_thirty_samples_have_no_interval(count: int, interval: bool) -> None:
    assert math.isnan(half_width(torch.arange(count).double())) != interval


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_expert_bytes_count_its_three_matrices(name: str) -> None:
    """gate, up and down, 24 x 32 each; no shared expert, no router."""
    assert expert_bytes(built(name)) == 2 * 3 * 24 * 32
    assert expert_bytes(built(name), 0.5) == 0.5 * 3 * 24 * 32


def test_windows_are_the_full_rows_in_mixed_order() -> None:
    ids = torch.arange(40)[:, None].repeat(1, 4)
    mask = torch.ones(40, 4, dtype=torch.bool)
    mask[7, 3] = False
    windows = load_windows(ids, mask)
    assert windows.shape == (39, 4)
    assert sorted(windows[:, 0].tolist()) == [i for i in range(40) if i != 7]
    assert windows[:, 0].tolist() != sorted(windows[:, 0].tolist())
    assert torch.equal(load_windows(ids, mask, 5), windows[:5])
    assert load_windows(ids, mask, 100).shape == windows.shape


def test_text_that_fills_no_window_is_refused() -> None:
    ids, mask = torch.zeros(1, 6, dtype=torch.int64), torch.tensor([[True] * 5 + [False]])
    with pytest.raises(ValueError, match="does not fill one window of 6 tokens; give more text or a shorter window"):
        load_windows(ids, mask)


def test_native_routing_is_added_if_missing() -> None:
    assert [q.policy for q in measure(*POLICIES)] == ["native", *POLICIES]
    assert [q.policy for q in measure("topk:k=1", "native")] == ["topk:k=1", "native"]


def test_quality_equals_its_separate_measurements() -> None:
    model, stats = built("qwen3_moe"), usual_stats("qwen3_moe")
    items, _ = questions("qwen3_moe", (1, 2, 3, 1))
    rows = measure("native", *POLICIES, items=items, tokenizer=Letters(), prefill=2, retained_windows=4)
    policies = [parse(p) for p in ("native", *POLICIES)]
    text = evaluate_text(model, policies, stats, WINDOWS, batch=3, prefill=2, quiet=True)
    tasks = evaluate_tasks(model, policies, stats, items, Letters(), batch=3, quiet=True)
    retained = retained_energy(model, policies, stats, WINDOWS[:4], batch=3)
    for q, t, k, r in zip(rows, text, tasks, retained, strict=True):
        assert (q.nll, q.native_nll) == (float(t.nll.mean()), float(text[0].nll.mean()))
        assert q.delta == q.nll - q.native_nll
        assert q.agreement == 100 * float(t.agreement.mean())
        assert (q.fetched, q.native_union) == (t.counters.fetched, t.counters.native_union)
        assert q.megabytes == pytest.approx(t.counters.fetched * 2 * 2 * 3 * 24 * 32 / 1e6)  # two layers
        assert (q.tasks, q.task_avg, q.task_half) == (k.accuracy, k.average, k.half_width)
        assert q.task_fetched == k.counters.fetched
        assert q.retained_energy == r
        assert (q.tokens, q.items, q.batch) == (7 * 9, 4, 3)
    assert rows[0].delta == 0
    assert rows[0].agreement == 100


def test_loss_intervals_are_paired_with_native_routing() -> None:
    """The difference varies far less from sequence to sequence than the loss itself."""
    windows = tiny.prompts(40, 8, seed=6)
    model, stats, policies = built("qwen3_moe"), usual_stats("qwen3_moe"), [parse("native"), parse("topk:k=2")]
    native, topk = evaluate_text(model, policies, stats, windows, batch=20, quiet=True)
    _, row = evaluate(model, policies, stats, windows, batch=20, retained_windows=2, quiet=True)
    assert row.nll_delta_half == pytest.approx(1.96 * float((topk.nll - native.nll).std()) / 40**0.5)
    assert row.nll_delta_half < half_width(topk.nll)
    assert row.agreement_half == pytest.approx(100 * half_width(topk.agreement))


def test_task_items_without_a_tokenizer_are_refused() -> None:
    items, _ = questions("qwen3_moe", (1, 2, 3, 1))
    with pytest.raises(ValueError, match="task items need the model's tokenizer"):
        measure("native", items=items)


@pytest.mark.parametrize(("half", "text"), [(0.01234, "1.235 ± 0.012"), (math.nan, "1.235")])
def test_value_without_an_interval_is_printed_alone(half: float, text: str) -> None:
    assert pm(1.23456, half, 3) == text


@pytest.mark.parametrize("tasks", [True, False])
def test_table_shows_every_policy_and_tasks_if_measured(tasks: bool) -> None:
    no_tasks = {} if tasks else {"task_avg": None, "task_half": None}
    native = quality(policy="native", nll=3.21, task_fetched=23.4, **no_tasks)
    rows = [native, quality(nll=3.5, native_nll=3.0, **no_tasks)]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(quality_table(rows, "a title"))
    shown = console.export_text()
    for part in ("a title", "native", "base:budget=3", "loss 3.210", "+0.500"):
        assert part in shown
    assert ("correct, %" in shown) == ("on tasks" in shown) == ("23.4" in shown) == tasks
