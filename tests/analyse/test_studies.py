from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from moebudget.analyse import STUDIES, Setting, run_study
from moebudget.analyse.show import plot_studies, tables
from moebudget.analyse.studies import NEEDS
from moebudget.calibrate.run import KNOWN
from moebudget.demo.tasks import TaskItem
from tests.calibrate import reference
from tests.calibrate.fitted import built, fit
from tests.integrations import tiny


class Words:
    """One token a letter."""

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
def test_study_reads_statistics_that_it_does_not_name(study: str) -> None:
    stats = replace(setting().stats, tensors={n: t for n, t in setting().stats.tensors.items() if n in NEEDS[study]})
    found = run_study(study, replace(setting(), stats=stats))
    assert json.loads(json.dumps(found)) == found
    assert {row["model"] for row in found} == {"tiny"}


def test_selection_rules_have_other_budgets_than_the_top_1_union() -> None:
    found = {row["policy"]: row for row in rows("selection")}
    assert set(found) == {
        "dense", "top-1 union", "weight sum", "squared sum", "static", "linear", "nonlinear", "oracle"
    }  # fmt: skip
    assert found["oracle"]["retained_energy"] == pytest.approx(1)
    for name in ("weight sum", "static", "linear"):
        assert found[name]["fetched"] == pytest.approx(found["top-1 union"]["fetched"], rel=0.1)
        assert found[name]["retained_energy"] < 1


def test_fills_of_one_set_fetch_different_numbers() -> None:
    found = [row for row in rows("fill") if row["policy"] != "dense"]
    assert {row["fetched"] for row in found} == {3.0}
    assert len({row["nll"] for row in found}) >= 4


def test_batch_sizes_do_not_have_the_budget_that_oea_fetches() -> None:
    found = rows("batch")
    assert {row["B"] for row in found} == {8, 16}
    for size in (8, 16):
        mine = {row["policy"].partition(":")[0]: row for row in found if row["B"] == size}
        assert mine["base"]["fetched"] == round(mine["oea"]["fetched"])
        assert mine["dense"]["fetched"] == mine["dense"]["native_union"]


def test_draining_batch_is_as_full_as_a_constant_one() -> None:
    found = rows("draining")
    full, draining = ([r for r in found if r["batching"] == b] for b in ("constant", "draining"))
    assert [r["policy"] for r in full] == [r["policy"] for r in draining]
    assert draining[0]["rows_a_step"] < full[0]["rows_a_step"]
    with pytest.raises(ValueError, match="--tasks"):
        run_study("draining", replace(setting(), items=()))


def test_unknown_study_is_not_explained() -> None:
    with pytest.raises(ValueError, match="unknown study 'fills'; known: geometry, selection, fill, batch, draining"):
        run_study("fills", setting())


def test_table_or_picture_leaves_out_a_study(tmp_path: Path) -> None:
    every = [row for study in STUDIES for row in rows(study)]
    assert len(tables(every)) == len(STUDIES)
    plot_studies(every, tmp_path / "a.png")
    plot_studies(rows("fill"), tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000
    assert not (tmp_path / "b.png").exists()
