"""The number that a search turns in each preset, and tables of methods at one count."""

from __future__ import annotations

import pytest

from moebudget import parse
from moebudget.evaluate import evaluate
from moebudget.evaluate.compare import compare, distinct, methods_of, unmatched
from moebudget.evaluate.families import caps, family, near
from moebudget.evaluate.match import Family
from moebudget.presets import PRESETS
from moebudget.stats import ModelFacts
from tests.calibrate.fitted import built, usual_stats
from tests.integrations import tiny

FACTS = ModelFacts("qwen3_moe", (0, 1), 64, 8, 16, "")
NAME = "qwen3_moe"


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "dense"])
def test_preset_has_no_number_to_search(preset: str) -> None:
    found = family(preset, FACTS)
    assert found is not None
    for value in (found.low, found.high):
        assert found.policy(value).name.startswith(preset)
    assert found.policy(found.low) != found.policy(found.high)


@pytest.mark.parametrize(
    ("text", "template", "high"),
    [
        ("base:fill=half", "base:budget={},fill=half", 64),
        ("oea", "oea:k0={}", 8),
        ("oea:k0=2", "oea:p={},k0=2", 0.98),
        ("lynx:beta=2", "lynx:alpha={},beta=2", 8),
    ],
)
def test_given_field_is_searched_or_lost(text: str, template: str, high: float) -> None:
    found = family(text, FACTS)
    assert found is not None
    assert (found.template, found.high) == (template, high)


@pytest.mark.parametrize(
    ("text", "says"),
    [("bass", "did you mean 'base'"), ("base:fil=half", "did you mean 'fill'"), ("dense", "nothing to search")],
)
def test_misspelt_family_is_searched(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        family(text, FACTS)


def test_settings_that_fetch_the_target_are_left_out() -> None:
    base, oea = family("base", FACTS), family("oea", FACTS)
    assert base is not None
    assert oea is not None
    assert near(base, 10.5) == Family("base:budget={}", 10, 12, whole=True)
    assert near(base, 64) == Family("base:budget={}", 64, 64, whole=True)
    assert near(oea, 10) == oea
    assert (caps(base), caps(oea)) == (True, False)


def test_methods_are_compared_on_windows_of_the_search_or_at_other_counts() -> None:
    windows, model, stats = tiny.prompts(12, 12, seed=4), built(NAME), usual_stats(NAME)
    methods = methods_of(["base", "topk", "squared:budget=3"], stats.facts, 4.0)
    assert list(methods) == ["topk", "base", "squared:budget=3"]
    said: list[str] = []
    rows = compare(
        model, methods, stats, windows, [4.0], search=4, batch=4, say=said.append, retained_windows=0, quiet=True
    )
    assert [r.method for r in rows] == ["unchanged model", "topk", "base", "squared:budget=3"]
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
