"""AcceptMoE: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.conftest import Problem, make_problem
from tests.methods import reference_published
from tests.methods.steps import (
    members,
    step_of,
)


def uniform(rows: int, n: int, k: int = 2) -> Problem:
    problem = make_problem("softmax_renorm", rows, n, k)
    return dataclasses.replace(problem, logits=torch.zeros(rows, n))


@pytest.mark.parametrize("n", [8, 60, 64, 100])
def test_acceptmoe_on_even_demand_wants_all_experts(n: int) -> None:
    """exp(log n) = n: rounding must not make it n + 1 or, halved, one more than half."""
    assert len(members("acceptmoe", uniform(3, n))) == n
    assert len(members("acceptmoe:scale=0.5", uniform(3, n))) == n // 2
    assert len(members("acceptmoe:scale=0.001", uniform(3, n))) == 1


def test_acceptmoe_ignores_rejected_drafts() -> None:
    problem = make_problem("softmax_renorm", 4, 64, 4)
    accept = torch.tensor([1.0, 0.0, 0.25, 0.0])
    batch = problem.spec(problem.hidden, problem.logits, accept=accept)
    step = dataclasses.replace(step_of(problem), accept=accept.tolist())
    assert members("acceptmoe", problem, batch) == reference_published.acceptmoe_set(step, 1.0)
    first = problem.take(torch.tensor([0]))
    only = dataclasses.replace(batch, accept=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert members("acceptmoe", problem, only) == members("acceptmoe", first)
    assert members("acceptmoe", problem, batch) != members("acceptmoe", problem)
