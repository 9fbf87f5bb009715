"""Gradients of layers and denominators by layer, against finite differences and their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moebudget.calibrate.allocation import allocate
from moebudget.calibrate.allocation.gains import choose_denominators, gradient_curves, layer_gradients
from moebudget.calibrate.allocation.measure import Trials
from moebudget.core.stats import layer_budgets
from moebudget.engines.transformers.families import moe_layers
from moebudget.evaluate import evaluate_text
from moebudget.methods.base import base
from moebudget.methods.registry import parse
from tests.calibrate.fitted import built, usual_stats
from tests.engines.transformers import tiny

NAME = "qwen3_moe"
WINDOWS = tiny.prompts(6, 14, seed=5)
BATCH = 3
N = tiny.EXPERTS


@torch.no_grad()
def moved_losses(model: Any, window: Tensor, layer: int, moves: Tensor) -> Tensor:
    """The window's summed loss [n] for every move [n, S, d] of the layer's routed outputs, in one pass."""

    def move(_m: nn.Module, _a: Any, out: Tensor) -> Tensor:
        return out + moves.view_as(out)

    handle = moe_layers(model)[layer].experts.register_forward_hook(move)
    many = window.expand(len(moves), -1)
    logits = model(input_ids=many[:, :-1], use_cache=False).logits[:, 1:].double()
    handle.remove()
    return nn.functional.cross_entropy(logits.mT, many[:, 2:], reduction="none").sum(-1)


def test_layer_gradients_equal_finite_differences() -> None:
    model, windows, step = built(NAME), WINDOWS[:2, :5], 1e-2
    d, gradients = model.config.hidden_size, layer_gradients(built(NAME), windows, batch=2)
    wanted = torch.zeros(2, dtype=torch.float64)
    for layer in range(2):
        for window in windows:
            for token in (1, 2, 3):  # the first is prefill
                moves = torch.zeros(d, 4, d)
                moves[:, token] = step * torch.eye(d)
                slope = moved_losses(model, window, layer, moves) - moved_losses(model, window, layer, -moves)
                wanted[layer] += (slope / (2 * step)).square().sum() / 6
    torch.testing.assert_close(gradients, wanted, rtol=0.02, atol=0)
    assert all(p.grad is None for p in model.parameters())


def test_gradient_curve_is_the_gain_times_the_cost_left_out() -> None:
    trials = Trials(built(NAME), base(1, "geometric"), usual_stats(NAME), WINDOWS, batch=BATCH)
    curves = gradient_curves(trials, [7, N])
    gains = layer_gradients(built(NAME), WINDOWS, batch=BATCH)
    for layer, costs in enumerate(trials.costs([N, N])):
        for m in (1, 4):
            left = [sum(sorted((c for c in step if c > 0), reverse=True)[m:]) for step in costs.tolist()]
            wanted = float(gains[layer]) * sum(left) / len(left) / BATCH
            assert float(curves[layer, m - 1]) == pytest.approx(wanted, rel=1e-6)
    assert float(curves[0, 6:].abs().max()) == 0 < float(curves[0, 5])
    assert bool((curves.diff(dim=-1) <= 0).all())


def test_gradients_replace_passes_with_one_layer_restricted() -> None:
    settings = {"averages": (3,), "batch": BATCH, "rounds": 0, "prices": False, "quiet": True}
    usual = allocate(built(NAME), usual_stats(NAME), WINDOWS, **settings)  # type: ignore[arg-type]
    by_gradient = allocate(built(NAME), usual_stats(NAME), WINDOWS, gains="gradient", **settings)  # type: ignore[arg-type]
    assert by_gradient.info["allocation"]["passes"] < 10 < usual.info["allocation"]["passes"]
    assert sum(layer_budgets(by_gradient, 3)) == 6
    assert by_gradient.info["allocation"]["gains"] == "gradient"


def test_denominator_with_the_lowest_loss_is_chosen() -> None:
    curves = {
        "native": torch.tensor([[0.5, 0.2, 0.1, 0.0], [0.5, 0.3, 0.2, 0.0]]),
        "geometric": torch.tensor([[0.4, 0.2, 0.2, 0.0], [0.6, 0.2, 0.1, 0.0]]),
        "executed": torch.tensor([[0.6, 0.1, 0.3, 0.0], [0.1, 0.4, 0.0, 0.0]]),
    }
    exponents, losses = choose_denominators(curves, [4, 3])
    assert exponents.tolist() == [[0.5, 1.0, 0.0, 0.0], [1.0, 0.5, 0.0, 0.0]]
    assert losses[0].tolist() == pytest.approx([0.4, 0.1, 0.1, 0.0])


def test_denominators_by_layer_are_stored_and_executed() -> None:
    stats = allocate(
        built(NAME), usual_stats(NAME), WINDOWS, averages=(3,), batch=BATCH, rounds=0, fill="by_layer", quiet=True
    )
    assert stats.tensors["layer_fill"].shape == (2, N)
    assert set(stats.tensors["layer_fill"].flatten().tolist()) <= {0.0, 0.5, 1.0}
    (result,) = evaluate_text(
        built(NAME), [parse("spread:budget=3,fill=by_layer")], stats, WINDOWS, batch=BATCH, quiet=True
    )
    report = stats.info["allocation"]
    increase = float(result.nll.mean()) - report["native_loss"]
    assert increase == pytest.approx(report["averages"]["3"]["loss_over_native"], abs=2e-5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"gains": "guessed"}, "gains='guessed' is unknown; known: measured, gradient"),
        ({"gains": "gradient", "fill": "by_layer"}, "fill='by_layer' chooses by one-layer losses"),
    ],
)
def test_impossible_gains_are_refused(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        allocate(built(NAME), usual_stats(NAME), WINDOWS, averages=(2,), batch=BATCH, **settings)  # type: ignore[arg-type]
