from __future__ import annotations

import pytest
import torch

from moebudget.evaluate import evaluate_text
from moebudget.evaluate.match import Family, match_fetched
from moebudget.presets import parse
from tests.calibrate.fitted import built, usual_stats
from tests.integrations import tiny

WINDOWS = tiny.prompts(8, 12, seed=4)
BATCH = 4


def match(families: list[Family], target: float, tolerance: float = 0.5) -> tuple[str, float]:
    found = match_fetched(
        built("qwen3_moe"), families, usual_stats("qwen3_moe"), WINDOWS, target, tolerance=tolerance, batch=BATCH
    )
    return found.policy.name, found.fetched


def fetched(policy: str) -> float:
    (result,) = evaluate_text(
        built("qwen3_moe"), [parse(policy)], usual_stats("qwen3_moe"), WINDOWS, batch=BATCH, quiet=True
    )
    return result.counters.fetched


def test_whole_number_is_not_found_or_its_count_is_not_the_measured_one() -> None:
    for budget in (2, 5):
        assert match([Family("base:budget={}", 1, 12, whole=True)], budget) == (f"base:budget={budget}", budget)


def test_number_with_a_fraction_is_not_found_between_grid_points() -> None:
    name, count = match([Family("dmoe:share={}", 0.05, 1)], 5.0, 0.2)
    assert abs(count - 5) <= 0.2
    assert fetched(name) == pytest.approx(count)


def test_falling_count_is_searched_the_wrong_way() -> None:
    """One lies left of the middle between the first two points of the grid, and only it fetches that many."""
    family = Family("lynx_lat:drop={}", 0, 48, whole=True)
    assert family.grid()[:2] == [0.0, 6.0]
    assert match([family], fetched("lynx_lat:drop=1"), 0.1)[0] == "lynx_lat:drop=1"


def test_setting_out_of_reach_is_not_the_closest_one() -> None:
    """The union of the first routes is the least that OEA fetches."""
    name, count = match([Family("oea:k0={}", 1, 3, whole=True)], 1.0)
    assert name == "oea:k0=1"
    assert count == pytest.approx(fetched("oea:k0=1"))
    assert count > 1.5


def test_family_with_the_higher_loss_wins() -> None:
    families = [Family(f"{rule}:budget={{}}", 3, 5, whole=True) for rule in ("router_mass", "oracle")]
    name, _ = match(families, 4.0)
    losses = {
        r.policy.name: float(r.nll.mean())
        for r in evaluate_text(
            built("qwen3_moe"),
            [parse("router_mass:budget=4"), parse("oracle:budget=4")],
            usual_stats("qwen3_moe"),
            WINDOWS,
            batch=BATCH,
            quiet=True,
        )
    }
    assert name == min(losses, key=lambda key: losses[key])


def test_grid_leaves_its_limits() -> None:
    grid = Family("skip:scale={}", 0.1, 10).grid()
    assert (grid[0], grid[-1]) == (pytest.approx(0.1), pytest.approx(10))
    assert torch.tensor(grid).log().diff().std() < 1e-5
    assert Family("topk:k={}", 2, 2, whole=True).grid() == [2.0]
