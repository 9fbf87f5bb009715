from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moebudget.core.counters import COUNTERS, Counters, count_step, read_counters
from moebudget.core.layer_router import LayerRouter, chain
from moebudget.core.ops import fetched_experts
from moebudget.core.types import LayerStats, RouterBatch, Routing
from moebudget.methods.registry import parse
from tests.conftest import BUDGETED, POLICIES, make_problem, over_policies, solved, used_slots


def totals_of(router: LayerRouter) -> dict[str, float]:
    return dict(zip(COUNTERS, router.totals.tolist(), strict=True))


def loop_count(batch: RouterBatch, routing: Routing) -> dict[str, float]:
    """The counters of one step [T, ...], written as loops over what is executed."""
    count = dict.fromkeys(COUNTERS, 0.0)
    union, left_out = set[int](), False
    for t, executed in enumerate(used_slots(routing)):
        if any(math.isnan(w) for w in batch.weights[t].tolist()):
            count["nonfinite"] += 1
        if not batch.decode[t]:
            continue
        own, weights = batch.ids[t].tolist(), [abs(w) for w in batch.weights[t].tolist()]
        runs = {u for u, _ in executed}
        lost = [w for u, w in zip(own, weights, strict=True) if u not in runs]
        count["rows"] += 1
        count["backfilled"] += len(runs - set(own))
        count["dropped"] += len(lost)
        count["dropped_mass"] += sum(lost) / sum(weights)
        count["rescued"] += int(not runs & set(own))
        union |= set(own)
        left_out |= bool(lost)
    if count["rows"]:
        count["steps"] = 1
        count["native_union"] = len(union)
        count["fetched"] = len(set(routing.ids.flatten().tolist()))
        count["unrestricted"] = float(not left_out)
    return count


@over_policies()
def test_counters_agree_with_a_loop(text: str, kind: str) -> None:
    for problem, _, routing in solved(text, kind):
        found = dict(zip(COUNTERS, count_step(problem.batch, routing).tolist(), strict=True))
        assert found == pytest.approx(loop_count(problem.batch, routing), rel=1e-5), problem.shape


@pytest.mark.parametrize("text", POLICIES)
def test_padding_and_nonfinite_rows_are_no_rows(text: str) -> None:
    problem = make_problem("softmax_renorm", 5, 60, 8, budget=6)
    hidden = problem.hidden.clone()
    hidden[3] = math.nan
    step = dataclasses.replace(problem, hidden=hidden, kind=torch.tensor([True, False, True, True, True]))
    router = LayerRouter(step.policy(text), step.stats)
    routing = router(step.batch)
    counted = totals_of(router)
    assert counted == pytest.approx(loop_count(step.batch, routing), rel=1e-5)
    assert (counted["rows"], counted["nonfinite"], counted["steps"]) == (3, 1, 1)


@pytest.mark.parametrize("decode", [[False, False], []], ids=["all padding", "no row"])
def test_steps_without_a_voting_row_do_not_count(decode: list[bool]) -> None:
    problem = make_problem("softmax_renorm", len(decode), 8, 2)
    step = dataclasses.replace(problem, kind=torch.tensor(decode, dtype=torch.bool))
    router = LayerRouter(parse("base:budget=3"), step.stats)
    router(step.batch)
    assert totals_of(router) == dict.fromkeys(COUNTERS, 0.0)


@pytest.mark.parametrize("text", POLICIES)
def test_many_steps_in_one_call_count_like_one_at_a_time(text: str) -> None:
    steps = [make_problem("groups_top2", 5, 64, 4, budget=6, seed=seed) for seed in range(3)]
    policy, stats = steps[0].policy(text), steps[0].stats
    one, all_ = LayerRouter(policy, stats), LayerRouter(policy, stats)
    hidden, logits, energies = (
        torch.stack([getattr(step, name) for step in steps]) for name in ("hidden", "logits", "energies")
    )
    for s in range(3):
        one(steps[0].with_rows(hidden[s], logits[s], energies[s]).batch)
    all_(steps[0].with_rows(hidden, logits, energies).batch)
    assert totals_of(all_) == pytest.approx(totals_of(one), rel=1e-5)
    assert totals_of(all_)["steps"] == 3


def test_unused_and_padding_slots_count_as_fetched() -> None:
    problem = make_problem("softmax_renorm", 2, 8, 2)
    routing = Routing(torch.tensor([[1, 2], [5, 5]]), torch.tensor([[0.5, 0.0], [0.0, 0.0]]))
    assert fetched_experts(routing, problem.batch).nonzero()[:, 0].tolist() == [1, 2, 5]


def test_routes_of_weight_zero_do_not_count_as_dropped() -> None:
    """A softmax over logits that lie more than 104 apart is 0 in float32; native routing runs such a route too."""
    problem = make_problem("softmax_renorm", 1, 8, 2)
    step = dataclasses.replace(problem, logits=torch.tensor([[0.0, 300, 0, 0, 0, 0, 0, 0]]))
    router = LayerRouter(parse("native"))
    routing = router(step.batch)
    assert torch.equal(routing.weights, step.batch.weights)
    counted = totals_of(router)
    assert (counted["dropped"], counted["backfilled"], counted["unrestricted"]) == (0, 0, 1)


def test_union_within_the_budget_counts_as_unrestricted() -> None:
    problem = make_problem("softmax_renorm", 2, 64, 4, budget=8)
    router = LayerRouter(problem.policy("base:budget=M"), problem.stats)
    router(problem.batch)
    router.set_budget(2)
    router(problem.batch)
    assert (totals_of(router)["steps"], totals_of(router)["unrestricted"]) == (2, 1)


@pytest.mark.parametrize("text", BUDGETED)
def test_budgets_change_without_a_new_router(text: str) -> None:
    problem = make_problem("softmax_renorm", 5, 60, 8, budget=10)
    router = LayerRouter(problem.policy(text), problem.stats)
    assert router.budget is not None
    assert router.budget.dtype is torch.int64
    place, used = router.budget.data_ptr(), router.policy.budget
    for budget in (10, 3, 60, 1, 500):
        router.set_budget(budget)
        fresh = dataclasses.replace(problem, budget=budget)
        wanted = LayerRouter(fresh.policy(text), problem.stats)(problem.batch)
        found = router(problem.batch)
        assert torch.equal(found.ids, wanted.ids)
        assert torch.equal(found.weights, wanted.weights)
        assert router.budget.data_ptr() == place
    assert used is router.budget


def test_routers_have_separate_budgets() -> None:
    policy = parse("squared:budget=4")
    first, second = LayerRouter(policy), LayerRouter(policy)
    first.set_budget(1)
    assert (first.budget, second.budget, policy.budget) == (1, 4, 4)
    shared = policy.with_budget(torch.tensor(4))
    LayerRouter(shared).set_budget(1)
    assert shared.budget == 4


@pytest.mark.parametrize("budget", [0, -1, 1.5, "ten", True, None])
def test_impossible_budgets_are_refused(budget: Any) -> None:
    router = LayerRouter(parse("squared:budget=4"))
    with pytest.raises(ValueError, match=f"budget={budget!r}.*at least 1"):
        router.set_budget(budget)
    assert router.budget == 4


def test_policies_without_a_budget_refuse_one() -> None:
    router = LayerRouter(parse("oea:k0=1"))
    assert router.budget is None
    with pytest.raises(ValueError, match="'oea:k0=1' has no budget"):
        router.set_budget(4)


def test_state_is_on_the_routers_device() -> None:
    problem = make_problem("softmax_renorm", 2, 8, 2)
    router = LayerRouter(parse("base:budget=3"), problem.stats, device="meta")
    assert router.budget is not None
    assert router.budget.device.type == router.totals.device.type == "meta"
    assert {tensor.device.type for tensor in router.stats.values()} == {"meta"}
    assert set(router.stats) == {"predictor_weight", "predictor_bias"}


def test_counters_add_up_over_layers() -> None:
    routers = []
    for seed, text in enumerate(("squared:budget=2", "squared:budget=5")):
        problem = make_problem("softmax_renorm", 5, 60, 8, seed=seed)
        router = LayerRouter(parse(text))
        for _ in range(4):
            router(problem.batch)
        routers.append(router)
    counters = read_counters(routers)
    a, b = (totals_of(router) for router in routers)
    assert counters.totals == {name: a[name] + b[name] for name in COUNTERS}
    assert (counters.layers, counters.steps, counters.rows, counters.fetched) == (2, 4, 5, 3.5)
    assert counters.fetched_by_layer == [2, 5]
    assert counters.native_union == pytest.approx((a["native_union"] + b["native_union"]) / 8)
    assert counters.dropped_mass == pytest.approx((a["dropped_mass"] + b["dropped_mass"]) / 40)
    assert 0 < counters.dropped_mass < 1
    means = counters.as_dict()
    assert means.items() >= counters.totals.items()
    assert (means["layers"], means["fetched_mean"], means["rows_mean"]) == (2, 3.5, 5)
    assert means["native_union_mean"] == counters.native_union
    said = str(counters)
    assert said.startswith("4 decode steps x 2 layers, 5.0 rows per step: 3.50 experts fetched")
    assert f"{100 * counters.dropped_mass:.1f} % of the routing weight dropped" in said


def test_counters_of_nothing_are_nan() -> None:
    counters = read_counters([LayerRouter(parse("native"))])
    assert counters.steps == 0
    assert all(math.isnan(x) for x in (counters.fetched, counters.native_union, counters.rows, counters.dropped_mass))
    assert "0 decode steps" in str(counters)
    assert counters.fetched_by_layer == []
    assert Counters(0, dict.fromkeys(COUNTERS, 0.0)).steps == 0


def priced_layers(hold: float, start: float, layers: int = 3) -> tuple[list[LayerRouter], list[Any]]:
    """Layers of 16 experts whose price for 4 experts is `start`, and their inputs."""
    problems = [make_problem("softmax_renorm", 6, 16, 3, seed=seed) for seed in range(layers)]
    policy = parse(f"price:budget=4,fill=native,hold={hold}")
    table = torch.full((16,), start)
    routers = [LayerRouter(policy, LayerStats({**p.stats, "layer_price": table})) for p in problems]
    chain(routers)
    return routers, problems


@pytest.mark.parametrize("start", [1e-3, 1e3])
def test_held_price_ends_at_its_average(start: float) -> None:
    counts = {}
    for hold in (0.0, 0.2):
        routers, problems = priced_layers(hold, start)
        for turn in range(400):
            if turn == 300:
                for router in routers:
                    router.totals.zero_()
            for router, p in zip(routers, problems, strict=True):
                router(dataclasses.replace(p, hidden=p.hidden.roll(turn, 0)).batch)
        counts[hold] = read_counters(routers)
    assert abs(counts[0.0].fetched - 4) > 1.5
    assert counts[0.2].fetched == pytest.approx(4, abs=0.25)
    assert len({round(count) for count in counts[0.2].by_layer}) > 1  # the sum is held, not each layer's number


def test_steps_decided_at_once_move_the_price_by_the_excess() -> None:
    (router, *_), (problem, *_) = priced_layers(0.5, 1e-3, layers=1)
    one = problem.batch
    many = RouterBatch(**{
        f.name: value.expand(50, *value.shape) if isinstance(value := getattr(one, f.name), torch.Tensor) else value
        for f in dataclasses.fields(one)
    })  # fmt: skip
    union = int(count_step(one, router(one))[COUNTERS.index("fetched")])
    assert float(router.following) == pytest.approx(1 + 0.5 * (union - 4) / 4)
    router.scale.fill_(1)
    router(many)
    assert float(router.following) == pytest.approx(1 + (union - 4) / 4)
    silent = dataclasses.replace(one, kind=torch.zeros_like(one.decode))
    before = float(router.scale)
    router(silent)
    assert float(router.following) == before
