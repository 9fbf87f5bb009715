"""The tunable number of each method, and comparisons at equal fetched experts."""

from __future__ import annotations

import pytest

from moebudget import parse
from moebudget.core.stats import ModelFacts
from moebudget.evaluate import evaluate
from moebudget.evaluate.compare import compare, distinct, methods_of, unmatched
from moebudget.evaluate.sweep import Sweep, caps, near, sweep_of
from moebudget.methods.registry import METHODS
from tests.calibrate.fitted import built, usual_stats
from tests.engines.transformers import tiny

FACTS = ModelFacts("qwen3_moe", (0, 1), 64, 8, 16, "")
NAME = "qwen3_moe"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "native"])
def test_every_method_has_a_number_to_search(method: str) -> None:
    sweep = sweep_of(method, FACTS)
    assert sweep is not None
    for value in (sweep.low, sweep.high):
        assert sweep.policy(value).name.startswith(method)
    assert sweep.policy(sweep.low) != sweep.policy(sweep.high)


@pytest.mark.parametrize(
    ("text", "template", "high"),
    [
        ("base:fill=geometric", "base:budget={},fill=geometric", 64),
        ("oea", "oea:k0={}", 8),
        ("oea:k0=2", "oea:p={},k0=2", 0.98),
        ("lynx:beta=2", "lynx:alpha={},beta=2", 8),
    ],
)
def test_fields_of_the_policy_string_are_kept(text: str, template: str, high: float) -> None:
    sweep = sweep_of(text, FACTS)
    assert sweep is not None
    assert (sweep.template, sweep.high) == (template, high)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bass", "did you mean 'base'"),
        ("base:fil=geometric", "did you mean 'fill'"),
        ("native", "no number to search"),
    ],
)
def test_unknown_names_and_native_are_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sweep_of(text, FACTS)


def test_search_starts_near_the_target_if_the_number_is_the_count() -> None:
    base, oea = sweep_of("base", FACTS), sweep_of("oea", FACTS)
    assert base is not None
    assert oea is not None
    assert near(base, 10.5) == Sweep("base:budget={}", 10, 12, whole=True)
    assert near(base, 64) == Sweep("base:budget={}", 64, 64, whole=True)
    assert near(oea, 10) == oea
    assert (caps(base), caps(oea)) == (True, False)


def test_methods_are_compared_at_equal_counts_on_windows_without_the_search() -> None:
    windows, model, stats = tiny.prompts(12, 12, seed=4), built(NAME), usual_stats(NAME)
    methods = methods_of(["base", "topk", "squared:budget=3"], stats.facts, 4.0)
    assert list(methods) == ["topk", "base", "squared:budget=3"]
    said: list[str] = []
    rows = compare(
        model, methods, stats, windows, [4.0], search=4, batch=4, say=said.append, retained_windows=0, quiet=True
    )
    assert [r.method for r in rows] == ["native", "topk", "base", "squared:budget=3"]
    assert [r.target for r in rows] == [None, 4.0, 4.0, None]
    assert rows[2].quality.policy == "base:budget=4"
    assert rows[2].matched
    alone = evaluate(model, [parse("base:budget=4")], stats, windows[:8], batch=4, retained_windows=0, quiet=True)[1]
    assert rows[2].quality.nll == alone.nll
    assert "base at 4: base:budget=4 fetches 4.00" in said
    row = rows[2].as_row("tiny", "compare")
    assert (row["bench"], row["method"], row["matched"]) == ("compare", "base", True)
    far = compare(model, methods, stats, windows, [1.0], search=4, batch=4, retained_windows=0, quiet=True)
    assert any(line.startswith("topk: its nearest setting, topk:k=1") for line in unmatched(far))
    assert len(distinct(rows)) == 4
    with pytest.raises(ValueError, match="12 of 12 windows for the search leave none"):
        compare(model, methods, stats, windows, [4.0], search=12, batch=4)
