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
from moebudget.evaluate import Quality, evaluate, evaluate_tasks, evaluate_text, retained_energy
from moebudget.evaluate.report import expert_bytes, half_width, pm, quality_table
from moebudget.evaluate.windows import load_windows
from moebudget.provenance import stamp
from tests.calibrate.fitted import built, usual_stats
from tests.evaluate.test_tasks import Letters, questions
from tests.integrations import tiny

WINDOWS = tiny.prompts(7, 12, seed=5)
POLICIES = ("topk:k=1", "base:budget=3")
NO_GAPS: dict[str, Any] = {"loss_gap": None, "task_gap": None, "by_quarter": (), "fetched_by_layer": ()}
# What a line of benchmarks/results/quality.jsonl must hold (with the stamp's commit, command, device and versions).
FIELDS = set(
    "bench model B policy fetched native_union nll dense_nll tasks task_avg agreement retained_energy tokens".split()
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


def test_a_row_has_the_fields_that_readers_of_the_results_rely_on() -> None:
    row = quality(tasks={"add": 50.0}, task_avg=50.0, nll=2.5).as_row("tiny")
    assert set(row) >= FIELDS
    assert set(row | stamp("cpu")) >= FIELDS | {"commit", "command", "device", "versions"}
    assert not set(row) & set(stamp("cpu"))
    assert (row["bench"], row["model"], row["B"], row["policy"]) == ("quality", "tiny", 16, "base:budget=3")
    assert (row["tasks"], row["task_avg"], row["nll"]) == ({"add": 50.0}, 50.0, 2.5)


def test_a_row_without_intervals_or_tasks_is_strict_json() -> None:
    nan = math.nan
    row = quality(nll_delta_half=nan, agreement_half=nan, task_avg=None, task_half=None, task_fetched=None).as_row(
        "tiny"
    )
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["nll_delta_ci95"] is row["agreement_ci95"] is row["task_avg"] is row["task_ci95"] is None


def test_the_interval_of_a_known_sample() -> None:
    """0, 1 and 2 in equal shares: the variance with n - 1 is 2/3 n/(n - 1)."""
    n = 300
    sample = torch.tensor([0.0, 1.0, 2.0]).repeat(n // 3)
    assert half_width(sample) == pytest.approx(1.96 * math.sqrt(2 / 3 / (n - 1)))


@pytest.mark.parametrize(("count", "known"), [(1, False), (29, False), (30, True)])
def test_a_few_samples_have_no_interval(count: int, known: bool) -> None:
    assert math.isnan(half_width(torch.arange(count).double())) != known


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_the_bytes_of_an_expert_are_its_three_matrices(name: str) -> None:
    """gate, up and down, 24 x 32 each; no shared expert, no router."""
    assert expert_bytes(built(name)) == 2 * 3 * 24 * 32
    assert expert_bytes(built(name), 0.5) == 0.5 * 3 * 24 * 32


def test_windows_are_the_full_rows_in_a_mixed_order() -> None:
    ids = torch.arange(40)[:, None].repeat(1, 4)
    mask = torch.ones(40, 4, dtype=torch.bool)
    mask[7, 3] = False
    windows = load_windows(ids, mask)
    assert windows.shape == (39, 4)
    assert sorted(windows[:, 0].tolist()) == [i for i in range(40) if i != 7]
    assert windows[:, 0].tolist() != sorted(windows[:, 0].tolist())
    assert torch.equal(load_windows(ids, mask, 5), windows[:5])
    assert load_windows(ids, mask, 100).shape == windows.shape


def test_text_that_fills_no_window_is_an_error() -> None:
    ids, mask = torch.zeros(1, 6, dtype=torch.int64), torch.tensor([[True] * 5 + [False]])
    with pytest.raises(ValueError, match="does not fill one window of 6 tokens; give more text or a shorter window"):
        load_windows(ids, mask)


def test_the_dense_model_is_added_where_it_is_missing() -> None:
    assert [q.policy for q in measure(*POLICIES)] == ["dense", *POLICIES]
    assert [q.policy for q in measure("topk:k=1", "dense")] == ["topk:k=1", "dense"]


def test_quality_is_what_its_parts_measured() -> None:
    model, stats = built("qwen3_moe"), usual_stats("qwen3_moe")
    items, _ = questions("qwen3_moe", (1, 2, 3, 1))
    found = measure("dense", *POLICIES, items=items, tokenizer=Letters(), prefill=2, retained_windows=4)
    policies = [parse(p) for p in ("dense", *POLICIES)]
    text = evaluate_text(model, policies, stats, WINDOWS, batch=3, prefill=2, quiet=True)
    tasks = evaluate_tasks(model, policies, stats, items, Letters(), batch=3, quiet=True)
    retained = retained_energy(model, policies, stats, WINDOWS[:4], batch=3)
    for q, t, k, r in zip(found, text, tasks, retained, strict=True):
        assert (q.nll, q.dense_nll) == (float(t.nll.mean()), float(text[0].nll.mean()))
        assert q.delta == q.nll - q.dense_nll
        assert q.agreement == 100 * float(t.agreement.mean())
        assert (q.fetched, q.native_union) == (t.counters.fetched, t.counters.native_union)
        assert q.megabytes == pytest.approx(t.counters.fetched * 2 * 2 * 3 * 24 * 32 / 1e6)  # two layers
        assert (q.tasks, q.task_avg, q.task_half) == (k.accuracy, k.average, k.half_width)
        assert q.task_fetched == k.counters.fetched
        assert q.retained_energy == r
        assert (q.tokens, q.items, q.batch) == (7 * 9, 4, 3)
    assert found[0].delta == 0
    assert found[0].agreement == 100


def test_loss_intervals_are_paired_with_the_dense_model() -> None:
    """The difference varies far less from sequence to sequence than the loss itself."""
    windows = tiny.prompts(40, 8, seed=6)
    model, stats, policies = built("qwen3_moe"), usual_stats("qwen3_moe"), [parse("dense"), parse("topk:k=2")]
    dense, topk = evaluate_text(model, policies, stats, windows, batch=20, quiet=True)
    _, found = evaluate(model, policies, stats, windows, batch=20, retained_windows=2, quiet=True)
    assert found.nll_delta_half == pytest.approx(1.96 * float((topk.nll - dense.nll).std()) / 40**0.5)
    assert found.nll_delta_half < half_width(topk.nll)
    assert found.agreement_half == pytest.approx(100 * half_width(topk.agreement))


def test_task_items_without_a_tokenizer_are_an_error() -> None:
    items, _ = questions("qwen3_moe", (1, 2, 3, 1))
    with pytest.raises(ValueError, match="task items need the model's tokenizer"):
        measure("dense", items=items)


@pytest.mark.parametrize(("half", "text"), [(0.01234, "1.235 ± 0.012"), (math.nan, "1.235")])
def test_a_value_without_an_interval_stands_alone(half: float, text: str) -> None:
    assert pm(1.23456, half, 3) == text


@pytest.mark.parametrize("tasks", [True, False])
def test_the_table_shows_every_policy_and_tasks_only_where_there_are_some(tasks: bool) -> None:
    of_tasks = {} if tasks else {"task_avg": None, "task_half": None}
    rows = [quality(policy="dense", nll=3.21, **of_tasks), quality(nll=3.5, dense_nll=3.0, **of_tasks)]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(quality_table(rows, "a title"))
    shown = console.export_text()
    for part in ("a title", "dense", "base:budget=3", "loss 3.210", "+0.500"):
        assert part in shown
    assert ("correct, %" in shown) == tasks
