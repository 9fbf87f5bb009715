from __future__ import annotations

import pytest
import torch

from moebudget.evaluate import evaluate_text
from moebudget.evaluate.match import match_fetched
from moebudget.evaluate.sweep import Sweep
from moebudget.methods.registry import parse
from tests.calibrate.fitted import built, usual_stats
from tests.engines.transformers import tiny

WINDOWS = tiny.prompts(8, 12, seed=4)
BATCH = 4


def match(sweeps: list[Sweep], target: float, tolerance: float = 0.5) -> tuple[str, float]:
    best = match_fetched(
        built("qwen3_moe"), sweeps, usual_stats("qwen3_moe"), WINDOWS, target, tolerance=tolerance, batch=BATCH
    )
    return best.policy.name, best.fetched


def fetched(policy: str) -> float:
    (result,) = evaluate_text(
        built("qwen3_moe"), [parse(policy)], usual_stats("qwen3_moe"), WINDOWS, batch=BATCH, quiet=True
    )
    return result.counters.fetched


def test_integer_setting_is_found_with_its_measured_count() -> None:
    for budget in (2, 5):
        assert match([Sweep("base:budget={}", 1, 12, whole=True)], budget) == (f"base:budget={budget}", budget)


def test_float_setting_is_found_between_grid_points() -> None:
    name, count = match([Sweep("dmoe:share={}", 0.05, 1)], 5.0, 0.2)
    assert abs(count - 5) <= 0.2
    assert fetched(name) == pytest.approx(count)


def test_setting_is_found_if_the_count_falls_with_the_number() -> None:
    """1 is left of the midpoint of the first two grid points, and no other setting fetches that many experts."""
    sweep = Sweep("lynx_lat:drop={}", 0, 48, whole=True)
    assert sweep.grid()[:2] == [0.0, 6.0]
    assert match([sweep], fetched("lynx_lat:drop=1"), 0.1)[0] == "lynx_lat:drop=1"


def test_closest_setting_is_returned_if_the_target_is_out_of_reach() -> None:
    """OEA always fetches the union of the first routes."""
    name, count = match([Sweep("oea:k0={}", 1, 3, whole=True)], 1.0)
    assert name == "oea:k0=1"
    assert count == pytest.approx(fetched("oea:k0=1"))
    assert count > 1.5


def test_sweep_with_the_lowest_loss_wins() -> None:
    sweeps = [Sweep(f"{rule}:budget={{}}", 3, 5, whole=True) for rule in ("router_mass", "oracle")]
    name, _ = match(sweeps, 4.0)
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


def test_grid_is_logarithmic_within_its_limits() -> None:
    grid = Sweep("skip:scale={}", 0.1, 10).grid()
    assert (grid[0], grid[-1]) == (pytest.approx(0.1), pytest.approx(10))
    assert torch.tensor(grid).log().diff().std() < 1e-5
    assert Sweep("topk:k={}", 2, 2, whole=True).grid() == [2.0]
