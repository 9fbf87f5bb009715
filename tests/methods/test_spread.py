"""Spread and price: a layer's own number of experts, or the price above which it fetches one."""

from __future__ import annotations

import pytest
import torch

from moebudget.methods import parse
from tests.conftest import make_problem, over_kinds
from tests.methods.steps import loads, members, run, sized, union_of, with_stats


@over_kinds
def test_spread_takes_the_layers_number_for_the_average(kind: str) -> None:
    for problem in sized(kind):
        table = problem.plain_stats["layer_budget"]
        for average in (1, 3, 6):
            base = members(f"base:budget={int(table[average - 1])}", problem)
            assert members(f"spread:budget={average}", problem) == base
        assert members("spread:budget=1000", problem) == union_of(problem)  # the last entry is N


@over_kinds
def test_spread_with_a_floor_keeps_first_routes_before_others(kind: str) -> None:
    for problem in sized(kind):
        for average in (1, 3, 6):
            number, first = int(problem.plain_stats["layer_budget"][average - 1]), union_of(problem, 1)
            kept = members(f"spread:budget={average},floor=yes", problem)
            assert len(kept) == min(number, len(union_of(problem)))
            assert first <= kept or kept <= first


@over_kinds
def test_price_fetches_what_exceeds_it_and_always_the_largest(kind: str) -> None:
    for problem in sized(kind):
        policy = parse("price:budget=3")
        total = policy.score(problem.batch, problem.stats).double().sum(0)
        threshold = float(problem.plain_stats["layer_price"][2])
        wanted = {u for u in union_of(problem) if float(total[u]) > threshold} | {int(total.argmax())}
        assert members("price:budget=3", problem) == wanted
        assert members("price:budget=1000", problem) == union_of(problem)
        assert len(members("price:budget=3,ceiling=2", problem)) == min(2, len(wanted))
        assert members("price:budget=3,floor=yes", problem) == wanted | union_of(problem, 1)


def test_budgets_of_spread_and_price_change_as_values_and_as_tensors() -> None:
    problem = make_problem("softmax_renorm", 16, 64, 4)
    for text in ("spread:budget=3", "price:budget=3", "price:budget=3,level=yes", "spread:budget=3,level=yes"):
        policy, table = parse(text), text.replace("3", "9", 1)
        assert policy.with_budget(9) == parse(table)
        assert members(policy.with_budget(torch.tensor(9)), problem) == members(table, problem)
    assert parse("price:budget=3,hold=0.5").select.get_hold() == 0.5
    assert parse("price:budget=3,hold=0.5,level=yes").select.get_hold() == 0.5
    assert parse("spread:budget=3").select.get_hold() == 0.0
    with pytest.raises(ValueError, match="budget=0 must be a whole number of at least 1"):
        parse("spread:budget=3,level=yes").with_budget(0)


def test_level_fills_every_device_up_to_the_fullest() -> None:
    problem = make_problem("softmax_renorm", 16, 64, 8)
    problem = with_stats(problem, placement_cost=torch.ones(64))
    for text in ("spread:budget=4", "price:budget=6"):
        plain, leveled = loads(members(text, problem), problem), loads(members(f"{text},level=yes", problem), problem)
        native = loads(union_of(problem), problem)
        assert leveled == [min(max(plain), room) for room in native]


def test_weights_have_the_geometric_denominator() -> None:
    problem = make_problem("softmax_renorm", 16, 64, 4)
    native, spread = run("spread:budget=3,fill=native", problem), run("spread:budget=3", problem)
    executed = run("spread:budget=3,fill=executed", problem)
    torch.testing.assert_close(spread.weights, (native.weights * executed.weights).sqrt())
