"""Dynamic programming, exchanges and the table, against exhaustive search and their definitions."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from moebudget.calibrate.allocation.run import capped, middle, refine
from moebudget.calibrate.allocation.solve import interpolate, rounded, solve, table


@pytest.mark.parametrize("seed", range(20))
def test_budgets_are_the_best_of_all_allocations(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    layers, n = 3, 5
    curves = torch.rand(layers, n, generator=g, dtype=torch.float64)
    for total in range(layers, layers * n + 2):
        budgets = solve(curves, total)
        every = [b for b in itertools.product(range(1, n + 1), repeat=layers) if sum(b) == min(total, layers * n)]
        best = min(sum(float(curves[i, m - 1]) for i, m in enumerate(b)) for b in every)
        assert sum(budgets) == min(total, layers * n)
        assert sum(float(curves[i, m - 1]) for i, m in enumerate(budgets)) == pytest.approx(best)


def test_budgets_may_sum_to_less_if_layers_are_capped() -> None:
    assert sum(solve(torch.zeros(3, 4, dtype=torch.float64), 8)) == 8
    capped = torch.tensor([[1.0, 0.0, torch.inf], [1.0, 0.5, torch.inf]], dtype=torch.float64)
    assert solve(capped, 5) == [2, 2]


def test_fewer_experts_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 experts for 3 layers: every layer needs at least one"):
        solve(torch.zeros(3, 4, dtype=torch.float64), 2)


def test_curve_interpolates_its_points_falls_and_ends_at_zero() -> None:
    curve = interpolate({2: 1.0, 4: 0.5, 6: 0.6, 8: 0.0}, 10)
    assert curve.tolist() == pytest.approx([1.25, 1.0, 0.75, 0.6, 0.6, 0.6, 0.3, 0.0, 0.0, 0.0])
    assert interpolate({2: 0.1, 4: -0.2}, 5).tolist() == pytest.approx([0.25, 0.1, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("points", [{3: 1.0}, {0: 1.0, 3: 0.0}, {2: 1.0, 11: 0.0}])
def test_curve_of_impossible_points_is_refused(points: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=r"must be at least two numbers from 1 to 10"):
        interpolate(points, 10)


def test_rounding_keeps_the_sum_and_at_least_one_expert_per_layer() -> None:
    rng = random.Random(0)
    for _ in range(200):
        values = [rng.uniform(1, 9) for _ in range(rng.randint(1, 6))]
        total = max(len(values), round(sum(values)) + rng.randint(-3, 3))
        budgets = rounded(torch.tensor(values, dtype=torch.float64), total)
        assert sum(budgets) == total
        assert min(budgets) >= 1
    assert rounded(torch.tensor([2.6, 2.5, 2.9], dtype=torch.float64), 8) == [3, 2, 3]


def test_table_keeps_solved_averages_and_sums() -> None:
    solved = {4: [8, 2, 2], 6: [12, 3, 3]}
    budgets = table(solved, [16, 8, 6], 20)
    assert budgets.shape == (3, 20)
    assert budgets[:, 3].tolist() == [8, 2, 2]
    assert budgets[:, 5].tolist() == [12, 3, 3]
    assert budgets[:, 4].tolist() == [10, 3, 2]
    assert budgets[:, 0].tolist() == [1, 1, 1]
    assert [int(s) for s in budgets[:, :9].sum(0)] == [3 * m for m in range(1, 10)]
    assert (budgets[:, 9:] == 20).all(), "from average 10 on, 30 experts in sum, all unions fit"


def test_middle_keeps_the_sum() -> None:
    assert middle([18, 5, 7], 10) == [14, 8, 8]
    assert sum(middle([19, 5, 6], 10)) == 30


def separable(weights: list[float]):  # type: ignore[no-untyped-def]
    """Joint losses sum_l w_l / M_l, and the list of every measured vector."""
    measured: list[list[int]] = []

    def losses(vectors: list[list[int]]) -> list[float]:
        measured.extend(vectors)
        return [sum(w / m for w, m in zip(weights, v, strict=True)) for v in vectors]

    return losses, measured


def test_exchanges_reach_the_optimum_and_keep_the_sum() -> None:
    losses, measured = separable([9.0, 1.0, 1.0, 4.0])
    budgets, values = refine(losses, [[10, 10, 10, 10]], [64] * 4, rounds=40)
    assert sum(budgets) == 40
    assert values[-1] == pytest.approx(min(losses([budgets])))
    assert values[-1] <= values[0]
    for i, j in itertools.permutations(range(4), 2):
        nearby = list(budgets)
        nearby[i], nearby[j] = nearby[i] + 1, nearby[j] - 1
        assert losses([nearby])[0] >= values[-1]
    assert all(min(v) >= 1 for v in measured)


def test_exchange_gives_a_layer_at_most_its_union() -> None:
    losses, measured = separable([100.0, 1.0])
    budgets, _ = refine(losses, [[10, 10]], [12, 64], rounds=20)
    assert budgets == [12, 8]
    assert max(v[0] for v in measured) == 12


def test_zero_rounds_return_the_best_start() -> None:
    losses, _ = separable([9.0, 1.0])
    budgets, values = refine(losses, [[10, 10], [15, 5], [2, 18]], [64, 64], rounds=0)
    assert budgets == [15, 5]
    assert values == [*losses([[10, 10], [15, 5], [2, 18]]), losses([[15, 5]])[0]]


def test_layers_keep_the_least_budget_up_to_their_union() -> None:
    curves = torch.stack([torch.linspace(9, 0, 10), torch.linspace(0.9, 0, 10), torch.zeros(10)]).double()
    union = [10, 10, 2]
    assert solve(capped(curves, union), 14) == [10, 3, 1]
    assert solve(capped(curves, union, 4), 14) == [8, 4, 2]

    def losses(vectors: list[list[int]]) -> list[float]:
        return [float(sum(curves[i, m - 1] for i, m in enumerate(v))) for v in vectors]

    budgets, _ = refine(losses, [[6, 6, 2]], union, rounds=20, least=4)
    assert budgets[:2] == [8, 4]
    assert refine(losses, [[6, 6, 2]], union, rounds=20)[0][1] < 4
