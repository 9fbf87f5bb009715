from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from moebudget import parse
from moebudget.evaluate import retained_energy
from tests.calibrate import reference
from tests.calibrate.fitted import CASES, built, usual_stats
from tests.engines.transformers import tiny

WINDOWS = tiny.prompts(5, 10, seed=4)
BATCH, BUDGET = 3, 3
METHODS = ("base", "static", "squared", "router_mass", "oracle")

over_models = pytest.mark.parametrize("name", CASES)


def measure(name: str, *policies: str, windows: torch.Tensor = WINDOWS) -> list[float]:
    return retained_energy(built(name), [parse(p) for p in policies], usual_stats(name), windows, batch=BATCH)


def by_loops(name: str, method: str) -> float:
    """Mean over layers, positions and batches of RE(A) for the sets that a method selects on native states."""
    stats, shares = usual_stats(name), []
    for position, layer in enumerate(reference.layers_of(built(name), WINDOWS[:, :-1])):
        tensors = {key: tensor[position] for key, tensor in stats.tensors.items()}
        for rows in (range(BATCH), range(BATCH, len(WINDOWS))):
            for s in range(WINDOWS.shape[1] - 1):
                true = reference.removal_costs(layer, rows, s)
                costs: dict[int, float] = defaultdict(float)
                if method == "base":
                    a, b = tensors["predictor_weight"], tensors["predictor_bias"]
                    costs |= reference.predicted_costs(layer, rows, s, a, b)
                for row in rows if method != "base" else ():
                    routes = layer.routes(row, s)
                    for u, w, e in routes:
                        costs[u] += {
                            "static": w**2 * float(tensors["energy_mean"][u]),
                            "squared": w**2,
                            "router_mass": w,
                            "oracle": w**2 * e,
                            "top1": float(w == max(r[1] for r in routes)),
                        }[method]
                chosen = [u for u in costs if costs[u] > 0] if method == "top1" else reference.best(costs, BUDGET)
                shares.append(reference.retained(true, chosen))
    return sum(shares) / len(shares)


@over_models
def test_retained_energy_follows_its_definition(name: str) -> None:
    shares = measure(name, *(f"{method}:budget={BUDGET}" for method in METHODS))
    for method, share in zip(METHODS, shares, strict=True):
        assert share == pytest.approx(by_loops(name, method), abs=1e-4), method


def test_method_without_a_budget_is_compared_at_the_size_of_its_active_set() -> None:
    topk, oea = measure("qwen3_moe", "topk:k=1", "oea:k0=1")
    assert topk == oea == pytest.approx(by_loops("qwen3_moe", "top1"), abs=1e-4)
    assert topk < 1


@over_models
def test_oracle_and_native_routing_keep_everything(name: str) -> None:
    assert measure(name, "oracle:budget=1", "oracle:budget=4", "native") == pytest.approx([1.0, 1.0, 1.0], abs=1e-6)


@over_models
def test_methods_keep_between_nothing_and_everything(name: str) -> None:
    policies = [f"{method}:budget={budget}" for method in METHODS[:-1] for budget in (1, 2, 4)]
    shares = measure(name, *policies)
    assert all(0 < share <= 1 for share in shares)
    assert min(shares) < 0.95


@over_models
def test_budget_of_all_experts_keeps_everything(name: str) -> None:
    assert measure(name, f"squared:budget={tiny.EXPERTS}", f"base:budget={tiny.EXPERTS}") == pytest.approx([1, 1])


def test_policies_are_measured_on_native_states() -> None:
    """Alone or with other policies, whatever it would do to the model."""
    alone = [measure("qwen3_moe", policy)[0] for policy in ("squared:budget=1", "base:budget=2")]
    assert measure("qwen3_moe", "squared:budget=1", "base:budget=2") == pytest.approx(alone, abs=1e-12)


def test_methods_without_statistics_run_without_them() -> None:
    policies = [parse("squared:budget=2"), parse("oracle:budget=2")]
    without = retained_energy(built("qwen3_moe"), policies, None, WINDOWS, batch=BATCH)
    assert without == measure("qwen3_moe", "squared:budget=2", "oracle:budget=2")


def test_steps_with_zero_outputs_do_not_count() -> None:
    """They have no energy to keep, and a division by 0 must not hide the other steps."""
    model = tiny.build(tiny.available("qwen3_moe"))
    tiny.experts_modules(model)[0].down_proj.data.zero_()
    (share,) = retained_energy(model, [parse("squared:budget=2")], None, WINDOWS, batch=BATCH)
    assert 0 < share < 1
