"""ExFold: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.conftest import over_kinds, used_slots
from tests.methods.steps import (
    hand_made,
    is_native,
    members,
    one_row,
    run,
    sized,
    with_stats,
)


@over_kinds
@pytest.mark.parametrize("name", ["exfold", "exfold_static"])
def test_exfold_with_a_pool_of_all_experts_is_native(name: str, kind: str) -> None:
    for problem in sized(kind):
        assert is_native(f"{name}:budget={problem.spec.num_experts}", problem)


def test_exfold_folds_into_the_closest_expert_with_its_scale() -> None:
    """Rows of the tables are the expert that is missing. 3 folds into 1 (loss .2 < .4), 2 into nothing."""
    loss = {(3, 0): 0.4, (3, 1): 0.2, (0, 3): 0.0, (1, 3): 0.0}
    problem = one_row({0: 0.4, 1: 0.3, 2: 0.1, 3: 0.2}, 5, **hand_made(loss, {(3, 1): -0.5, (3, 0): 9.0}, 5))
    (routes,) = used_slots(run("exfold:budget=2", problem))
    assert [u for u, _ in routes] == [0, 1, 1]
    assert [w for _, w in routes] == pytest.approx([0.4, 0.3, -0.1])


def test_exfold_breaks_equal_losses_by_the_lowest_expert() -> None:
    """The lowest expert of the pool, not the heaviest route; both rules."""
    loss = {(1, 4): 0.5, (1, 2): 0.5}
    problem = one_row({4: 0.5, 2: 0.3, 1: 0.2}, 5, **hand_made(loss, {(1, 4): 1.0, (1, 2): 1.0}, 5))
    for text in ("exfold:budget=2", "exfold_prefill:p=2"):
        (routes,) = used_slots(run(text, problem))
        assert [u for u, _ in routes] == [4, 2, 2], text


def test_exfold_prefill_folds_into_the_rows_own_experts() -> None:
    loss = {(1, 4): 0.5, (1, 3): 0.0}
    problem = one_row({4: 0.7, 1: 0.3}, 5, **hand_made(loss, {(1, 4): 2.0, (1, 3): 1.0}, 5))
    both = dataclasses.replace(
        problem,
        logits=torch.cat([problem.logits, one_row({3: 0.7, 1: 0.3}, 5).logits]),
        hidden=problem.hidden.repeat(2, 1),
        energies=problem.energies.repeat(2, 1),
    )
    first, second = used_slots(run("exfold_prefill:p=1", both))
    assert [u for u, _ in first] == [4, 4]
    assert [w for _, w in first] == pytest.approx([0.7, 0.6])
    assert [u for u, _ in second] == [3, 3]


def test_exfold_rescues_rows_without_any_known_pair() -> None:
    """The pool {0} holds no route of the row and no partner: it runs the pool's best at the row's own weight."""
    heavy = one_row({0: 0.9, 1: 0.1}, 4, **hand_made({}, {}, 4))
    light = one_row({2: 0.6, 3: 0.4}, 4).logits
    both = dataclasses.replace(
        heavy, logits=torch.cat([heavy.logits, light]), hidden=torch.ones(2, 6), energies=torch.ones(2, 4)
    )
    routing = run("exfold:budget=1", both)
    assert routing.ids.tolist() == [[0, 0], [0, 0]]
    assert routing.weights[0].tolist() == pytest.approx([0.9, 0.0])
    assert (routing.weights[1] > 0).tolist() == [True, False]


def test_exfold_pool_is_weight_times_norm() -> None:
    problem = one_row({0: 0.5, 1: 0.3, 2: 0.2}, 4, **hand_made({}, {}, 4))
    louder = with_stats(problem, output_norm=torch.tensor([1.0, 1.0, 3.0, 99.0]))
    assert members("exfold:budget=2", louder) == {0, 2}  # .5, .3, .6; squared weights would give .25, .09, .12
    assert members("exfold:budget=1", louder) == {2}
    assert members("exfold_static:budget=1", louder) == {3}
