"""Native routing: the model as it is."""

from __future__ import annotations

import torch

from moebudget.core.counters import Counter, count_step
from tests.conftest import make_problem, over_kinds
from tests.methods.steps import fetched, is_native, sized, union_of


@over_kinds
def test_native_is_the_model_bit_for_bit_and_restricts_nothing(kind: str) -> None:
    for problem in sized(kind):
        assert is_native("native", problem)
        assert fetched("native", problem) == union_of(problem)
        counts = count_step(problem.batch, problem.policy("native")(problem.batch, problem.stats))
        assert counts[Counter.UNRESTRICTED] == counts[Counter.STEPS] == 1
        assert counts[Counter.DROPPED] == counts[Counter.BACKFILLED] == 0


def test_native_fetches_nothing_for_padding() -> None:
    problem = make_problem("softmax_renorm", 3, 16, 2)
    batch = problem.spec(problem.hidden, problem.logits, kind=torch.tensor([True, False, True]))
    routing = problem.policy("native")(batch, problem.stats)
    assert set(routing.ids[1].tolist()) <= set(batch.ids[[0, 2]].flatten().tolist())
    assert routing.weights[1].tolist() == [0.0, 0.0]
