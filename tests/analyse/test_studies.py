"""The studies of `moebudget analyse` on a tiny model, their tables and their plot."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moebudget.analyse import STUDIES, Setting, run_study
from moebudget.analyse.studies import NEEDS
from moebudget.calibrate.run import KNOWN
from moebudget.demo.tasks import TaskItem
from moebudget.report.analyses import plot_studies, tables
from tests.calibrate import reference
from tests.calibrate.fitted import built, fit
from tests.engines.transformers import tiny


class Words:
    """A tokenizer with one token per letter."""

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:  # noqa: ARG002
        return {"input_ids": [4 + ord(letter) % 56 for letter in text]}


ITEMS = [TaskItem("a" if i % 2 else "b", f"item {i} is", "xyzw"[: 1 + i % 4]) for i in range(12)]


@cache
def setting() -> Setting:
    model = built("qwen3_moe")
    stats = fit(model, reference.make_corpus(), needs=KNOWN)
    return Setting(
        model,
        "tiny",
        stats,
        tiny.prompts(16, 10, seed=5),
        ITEMS,
        Words(),
        tiny.BOS,
        batch=4,
        budget=3,
        quiet=True,  # type: ignore[arg-type]
    )


@cache
def rows(study: str) -> list[dict[str, Any]]:
    return run_study(study, setting())


@pytest.mark.parametrize("study", STUDIES)
def test_study_runs_with_the_statistics_that_it_names(study: str) -> None:
    stats = replace(setting().stats, tensors={n: t for n, t in setting().stats.tensors.items() if n in NEEDS[study]})
    result = run_study(study, replace(setting(), stats=stats))
    assert json.loads(json.dumps(result)) == result
    assert {row["model"] for row in result} == {"tiny"}


def test_selection_rules_have_the_budget_of_the_top_1_union() -> None:
    by_policy = {row["policy"]: row for row in rows("selection")}
    assert set(by_policy) == {
        "native", "top-1 union", "weight sum", "squared sum", "static", "linear", "nonlinear", "oracle"
    }  # fmt: skip
    assert by_policy["oracle"]["retained_energy"] == pytest.approx(1)
    for name in ("weight sum", "static", "linear"):
        assert by_policy[name]["fetched"] == pytest.approx(by_policy["top-1 union"]["fetched"], rel=0.1)
        assert by_policy[name]["retained_energy"] < 1


def test_fills_of_one_set_fetch_equal_numbers() -> None:
    fills = [row for row in rows("fill") if row["policy"] != "native"]
    assert {row["fetched"] for row in fills} == {3.0}
    assert len({row["nll"] for row in fills}) >= 4


def test_budget_at_each_batch_size_is_the_number_that_oea_fetches() -> None:
    assert {row["B"] for row in rows("batch")} == {8, 16}
    for size in (8, 16):
        by_rule = {row["policy"].partition(":")[0]: row for row in rows("batch") if row["B"] == size}
        assert by_rule["base"]["fetched"] == round(by_rule["oea"]["fetched"])
        assert by_rule["native"]["fetched"] == by_rule["native"]["native_union"]


def test_draining_batch_has_fewer_rows_than_a_constant_one() -> None:
    full, draining = ([r for r in rows("draining") if r["batching"] == b] for b in ("constant", "draining"))
    assert [r["policy"] for r in full] == [r["policy"] for r in draining]
    assert draining[0]["rows_per_step"] < full[0]["rows_per_step"]
    with pytest.raises(ValueError, match="--tasks"):
        run_study("draining", replace(setting(), items=()))


def test_unknown_study_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown study 'fills'; known: geometry, selection, fill, batch, draining"):
        run_study("fills", setting())


def test_every_study_has_a_table_and_is_plotted(tmp_path: Path) -> None:
    every = [row for study in STUDIES for row in rows(study)]
    assert len(tables(every)) == len(STUDIES)
    plot_studies(every, tmp_path / "a.png")
    plot_studies(rows("fill"), tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000
    assert not (tmp_path / "b.png").exists()
