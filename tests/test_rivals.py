"""What the papers, or a derivation from them, promise of the other methods; each test is one such fact."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from moebudget import presets
from moebudget.device_selects import CostInvariant
from moebudget.fill import Backfill
from moebudget.policy import Policy
from moebudget.presets import parse
from moebudget.rival_selects import UnionSize
from moebudget.router import RouterSpec
from moebudget.runtime import LayerRouter, fetched_experts
from moebudget.score import RouterMass
from moebudget.select import first_routes, native_union
from moebudget.types import LayerStats, RouterBatch, Routing
from tests import reference_rivals
from tests.conftest import Problem, assert_routes, assert_same, make_problem, over_kinds, used_slots
from tests.test_policy import step_of

SIZES = ((1, 8, 2), (5, 60, 8), (16, 64, 4))  # T, N, K


def sized(kind: str, budget: int = 6) -> list[Problem]:
    return [make_problem(kind, t, n, k, budget) for t, n, k in SIZES]


def run(policy: Policy | str, problem: Problem) -> Routing:
    policy = problem.policy(policy) if isinstance(policy, str) else policy
    return policy(problem.batch, problem.stats)


def members(policy: Policy | str, problem: Problem, batch: RouterBatch | None = None) -> set[int]:
    """The active set."""
    policy = problem.policy(policy) if isinstance(policy, str) else policy
    return set(policy.active(batch or problem.batch, problem.stats).mask.nonzero()[:, 0].tolist())


def fetched(policy: Policy | str, problem: Problem) -> set[int]:
    return set(fetched_experts(run(policy, problem), problem.batch).nonzero()[:, 0].tolist())


def union_of(problem: Problem, k0: int | None = None) -> set[int]:
    hits = native_union(problem.batch) if k0 is None else first_routes(problem.batch, k0)
    return set(hits.nonzero()[:, 0].tolist())


def is_native(policy: Policy | str, problem: Problem) -> bool:
    routing = run(policy, problem)
    return torch.equal(routing.ids, problem.batch.ids) and torch.equal(routing.weights, problem.batch.weights)


def loads(experts: set[int], problem: Problem) -> list[int]:
    """Experts of the set on each of the devices."""
    device = problem.plain_stats["placement_device"]
    return [sum(device[u] == d for u in experts) for d in range(max(device) + 1)]


def with_stats(problem: Problem, **changes: Tensor) -> Problem:
    return dataclasses.replace(problem, stats=LayerStats({**problem.stats, **changes}))


# OEA


@over_kinds
@pytest.mark.parametrize("k0", [1, 2, 3])
def test_oea_differs_from_xshare_without_further_experts(kind: str, k0: int) -> None:
    for problem in sized(kind):
        oea, xshare = run(f"oea:k0={k0}", problem), run(f"xshare:k0={k0},m=0", problem)
        assert torch.equal(oea.ids, xshare.ids)
        assert torch.equal(oea.weights, xshare.weights)


@over_kinds
@pytest.mark.parametrize("k0", [1, 3, 8])
def test_oea_with_a_share_enlarges_the_base_set(kind: str, k0: int) -> None:
    for problem in sized(kind):
        sets = [members(f"oea:k0={k0},p={p}", problem) for p in (0.01, 0.2, 0.5, 0.9, 1.0)]
        assert all(less <= more for less, more in itertools.pairwise(sets)), problem.shape
        assert sets[0] == union_of(problem, 1)  # every share is reached by the first route, or never below it
        assert sets[-1] == union_of(problem, k0)


@over_kinds
@pytest.mark.parametrize("k_max", [2, 4, 10, 100])
def test_oea_gives_a_row_more_or_fewer_experts_than_k_max(kind: str, k_max: int) -> None:
    """More than K slots where k_max is above K: the rows are wider than the model's own."""
    for problem in sized(kind):
        text = f"oea:k0=2,k_max={k_max}"
        routing, base = run(text, problem), union_of(problem, 2)
        n, k = problem.spec.num_experts, problem.spec.top_k
        assert routing.ids.shape == routing.weights.shape == (problem.rows, max(k, min(k_max, n)))
        opened = [sum(row.choice[u] > -math.inf for u in base) for row in problem.reference]
        assert [len(routes) for routes in used_slots(routing)] == [min(k_max, open_) for open_ in opened]
        assert_routes(routing, reference_rivals.oea(step_of(problem), 2, k_max=k_max), problem.shape)
        assert fetched(text, problem) == base
        LayerRouter(problem.policy(text), problem.stats)(problem.batch)


def test_oea_with_more_slots_changes_padding_or_a_row_without_a_number() -> None:
    problem = make_problem("softmax_renorm", 4, 64, 4)
    logits = problem.logits.clone()
    logits[2] = math.nan
    step = dataclasses.replace(problem, logits=logits, live=torch.tensor([True, False, True, True]))
    routing, alone = run("oea:k0=2,k_max=6", step), run("oea:k0=2,k_max=6", problem.take(torch.tensor([0, 3])))
    assert torch.equal(routing.ids[[0, 3]], alone.ids)
    torch.testing.assert_close(routing.weights[[0, 3]], alone.weights)
    assert routing.weights[1].tolist() == [0.0] * 6
    assert routing.weights[2].isnan().all()
    assert step.policy("oea:k0=2,k_max=6").active(step.batch, step.stats).mask[routing.ids].all()


@over_kinds
@pytest.mark.parametrize("max_rank", [2, 3, 9])
def test_oea_fills_below_max_rank(kind: str, max_rank: int) -> None:
    for problem in sized(kind):
        routing = run(f"oea:k0=2,max_rank={max_rank}", problem)
        for row, routes in zip(problem.reference, used_slots(routing), strict=True):
            order = sorted(range(problem.spec.num_experts), key=lambda u, row=row: (-row.choice[u], u))
            assert {u for u, _ in routes} <= set(order[:max_rank])
            assert {u for u, _ in routes} >= set(row.ids[:2])


# SERE


@over_kinds
@pytest.mark.parametrize("s", [1, 2])
def test_sere_fetches_other_than_the_first_routes_or_changes_a_weight(kind: str, s: int) -> None:
    for problem in sized(kind):
        assert fetched(f"sere:s={s}", problem) == union_of(problem, s), problem.shape
        for rho in (0.0, 0.4, 2.0):
            routing = run(presets.parse(f"sere:s={s},rho={rho}"), problem)
            assert torch.equal(routing.weights, problem.batch.weights)


@over_kinds
@pytest.mark.parametrize("metric", ["frobenius", "cosine", "cka"])
def test_sere_keeps_fewer_experts_at_a_higher_threshold(kind: str, metric: str) -> None:
    for problem in sized(kind):
        sets = [fetched(f"sere:s=1,rho={rho},metric={metric}", problem) for rho in (0, 0.3, 0.6, 0.9, 1.01)]
        assert all(less <= more for less, more in itertools.pairwise(sets)), problem.shape
        assert sets[-1] == union_of(problem)
        assert is_native(f"sere:s=1,rho=1.01,metric={metric}", problem)


def test_sere_reroutes_to_a_critical_expert_that_it_keeps() -> None:
    """Only the first routes stand in for others; an expert kept because nothing resembles it does not."""
    problem = make_problem("softmax_renorm", 1, 8, 4)
    first, second, third, fourth = problem.reference[0].ids
    similar = torch.full((8, 8), 0.1)
    similar[third, first], similar[third, second], similar[fourth, first] = 0.5, 0.9, 0.6
    routing = run("sere:s=1,rho=0.3", with_stats(problem, similarity_frobenius=similar))
    assert routing.ids.tolist() == [[first, second, first, first]]


# Lynx


@over_kinds
def test_lynx_at_the_finest_bins_is_not_the_model(kind: str) -> None:
    for problem in sized(kind):
        assert is_native("lynx:alpha=1e9", problem), problem.shape


@over_kinds
@pytest.mark.parametrize("text", ["lynx:alpha=0.5,beta=1", "lynx:alpha=3,beta=2"])
def test_lynx_picks_by_index_in_a_batch_of_one(text: str, kind: str) -> None:
    problem = make_problem(kind, 1, 64, 8)
    assert is_native(text, problem)
    pads = make_problem(kind, 5, 64, 8)
    alone = dataclasses.replace(pads, live=torch.arange(5) == 3)
    assert torch.equal(run(text, alone).ids[3], alone.batch.ids[3])


def test_lynx_at_the_coarsest_bins_lets_every_row_choose_for_itself() -> None:
    """One bin for all: every row's K are those that the batch as a whole prefers, so the set has K experts."""
    problem = make_problem("softmax_renorm", 16, 64, 8)
    assert members("lynx:alpha=1e-9,beta=1", problem) == set(range(8))


def test_lynx_follows_the_model_instead_of_the_rest_of_the_batch() -> None:
    """Bins of 1 nat: experts 1 and 2 share one in row 0; rows 1 and 2 prefer 2, so row 0 takes 2 for its own 1."""
    logits = torch.tensor([[3.0, 1.9, 1.8, -9.0], [-9.0, -9.0, 3.0, 2.9], [-9.0, -9.0, 3.0, 2.9]])
    problem = make_problem("softmax_renorm", 3, 4, 2)
    problem = dataclasses.replace(problem, logits=logits, bias=None, spec=RouterSpec(4, 2))
    assert problem.batch.ids[0].tolist() == [0, 1]
    assert members("lynx:alpha=1,beta=3", problem) == {0, 2, 3}
    routing = run("lynx:alpha=1,beta=3", problem)
    assert routing.ids[0].tolist() == [0, 2]
    assert torch.equal(routing.ids[1:], problem.batch.ids[1:])


@over_kinds
@pytest.mark.parametrize("text", ["lynx:alpha=0.7,beta=1", "base:budget=2,fill=preserved"])
def test_preserved_weights_of_a_row_add_up_to_another_sum(text: str, kind: str) -> None:
    for problem in sized(kind):
        routing = run(text, problem)
        torch.testing.assert_close(routing.weights.sum(-1), problem.batch.weights.sum(-1))


@over_kinds
@pytest.mark.parametrize("drop", [0, 1, 7, 500])
def test_lynx_lat_keeps_another_number_of_routed_experts(kind: str, drop: int) -> None:
    for problem in sized(kind):
        kept, union = members(f"lynx_lat:drop={drop}", problem), union_of(problem)
        assert len(kept) == max(1, len(union) - drop)
        votes = {u: sum(u in row.ids for row in problem.reference) for u in union}
        assert all(votes[u] >= votes[v] for u in kept for v in union - kept)


# ExFold


@over_kinds
@pytest.mark.parametrize("name", ["exfold", "exfold_static"])
def test_exfold_with_a_pool_of_all_experts_folds(name: str, kind: str) -> None:
    for problem in sized(kind):
        assert is_native(f"{name}:budget={problem.spec.num_experts}", problem)


def hand_made(loss: dict[tuple[int, int], float], scale: dict[tuple[int, int], float], n: int) -> dict[str, Tensor]:
    tensors = {"fold_loss": torch.full((n, n), 1e30), "fold_scale": torch.zeros(n, n)}
    for name, values in (("fold_loss", loss), ("fold_scale", scale)):
        for (u, v), value in values.items():
            tensors[name][u, v] = value
    return tensors | {"output_norm": torch.ones(n)}


def one_row(weights: dict[int, float], n: int, **stats: Tensor) -> Problem:
    """A step of one row that weighs these experts so (they sum to 1) and no other."""
    logits = torch.full((1, n), -30.0)
    for u, w in weights.items():
        logits[0, u] = math.log(w)
    problem = make_problem("softmax_renorm", 1, n, len(weights))
    return dataclasses.replace(problem, logits=logits, spec=RouterSpec(n, len(weights)), stats=LayerStats(stats))


def test_exfold_folds_in_the_wrong_direction_or_forgets_the_scale() -> None:
    """Rows of the tables are the expert that is missing. 3 folds into 1 (loss .2 < .4), 2 into nothing."""
    loss = {(3, 0): 0.4, (3, 1): 0.2, (0, 3): 0.0, (1, 3): 0.0}
    problem = one_row({0: 0.4, 1: 0.3, 2: 0.1, 3: 0.2}, 5, **hand_made(loss, {(3, 1): -0.5, (3, 0): 9.0}, 5))
    (routes,) = used_slots(run("exfold:budget=2", problem))
    assert [u for u, _ in routes] == [0, 1, 1]
    assert [w for _, w in routes] == pytest.approx([0.4, 0.3, -0.1])


def test_exfold_breaks_equal_losses_by_slot() -> None:
    """The lowest expert of the pool, not the heaviest route; both rules."""
    loss = {(1, 4): 0.5, (1, 2): 0.5}
    problem = one_row({4: 0.5, 2: 0.3, 1: 0.2}, 5, **hand_made(loss, {(1, 4): 1.0, (1, 2): 1.0}, 5))
    for text in ("exfold:budget=2", "exfold_prefill:p=2"):
        (routes,) = used_slots(run(text, problem))
        assert [u for u, _ in routes] == [4, 2, 2], text


def test_exfold_prefill_folds_into_the_experts_of_other_rows() -> None:
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


def test_exfold_of_a_row_without_any_known_pair_runs_nothing() -> None:
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


def test_exfold_pool_is_squared_or_forgets_the_norm() -> None:
    problem = one_row({0: 0.5, 1: 0.3, 2: 0.2}, 4, **hand_made({}, {}, 4))
    louder = with_stats(problem, output_norm=torch.tensor([1.0, 1.0, 3.0, 99.0]))
    assert members("exfold:budget=2", louder) == {0, 2}  # .5, .3, .6; squared weights would give .25, .09, .12
    assert members("exfold:budget=1", louder) == {2}
    assert members("exfold_static:budget=1", louder) == {3}


# XShare


@over_kinds
def test_xshare_set_has_another_size(kind: str) -> None:
    for problem in sized(kind):
        opened = {u for row in problem.reference for u, c in enumerate(row.choice) if c > -math.inf}
        for k0, m in ((0, 1), (1, 5), (2, 12), (1, 100)):
            warm = union_of(problem, k0) if k0 else set()
            on_top, capped = (members(f"xshare:k0={k0},m={m},additive={word}", problem) for word in ("yes", "no"))
            assert len(on_top) == min(len(warm) + m, len(opened)), problem.shape
            assert len(capped) == max(len(warm), min(m, len(opened)))
            assert warm <= capped <= on_top


def verification(kind: str) -> tuple[Problem, RouterBatch]:
    """Two requests of three and four rows, mixed, a request of one row, and a padding row of the first request."""
    problem = make_problem(kind, 9, 64, 4)
    request = torch.tensor([0, 1, 0, 1, 0, 1, 1, 7, 0])
    spec, live = problem.spec, torch.arange(9) < 8
    return problem, spec(problem.hidden, problem.logits, bias=problem.bias, live=live, request=request)


@over_kinds
@pytest.mark.parametrize("fields", [(1, 0, 3), (0, 0, 2), (2, 5, 1), (0, 16, 4)])
def test_xshare_of_several_requests_differs_from_the_specification(kind: str, fields: tuple[int, int, int]) -> None:
    problem, batch = verification(kind)
    k0, m, m_request = fields
    step = step_of(problem)
    step = dataclasses.replace(step, rows=step.rows[:8], request=batch.request.tolist()[:8])  # type: ignore[union-attr]
    for additive in (True, False):
        word = "yes" if additive else "no"
        found = members(f"xshare:k0={k0},m={m},m_request={m_request},additive={word}", problem, batch)
        assert found == reference_rivals.xshare_set(step, k0, m, m_request, additive)


def test_xshare_takes_every_row_for_the_same_request() -> None:
    """Three experts a request, three requests: more than one request would get, less than a row each."""
    problem, batch = verification("softmax_renorm")
    assert len(members("xshare:k0=0,m=0,m_request=3", problem, batch)) <= 9
    rows = dataclasses.replace(batch, request=None)
    assert len(members("xshare:k0=0,m=0,m_request=3", problem, rows)) > 9
    one = dataclasses.replace(batch, request=torch.zeros(9, dtype=torch.int64))
    found = members("xshare:k0=0,m=0,m_request=3", problem, one)
    assert found == members("xshare:k0=0,m=3", problem, one)


@over_kinds
def test_xshare_balanced_load_is_above_its_bound(kind: str) -> None:
    """ceil(m / devices) while no device runs out."""
    problem = make_problem(kind, 16, 64, 4)
    problem = with_stats(problem, placement_device=torch.arange(64) % 4)
    for m in (1, 3, 4, 7, 16, 30):
        load = loads(members(f"xshare_balanced:m={m}", problem), problem)
        assert sum(load) == m
        assert max(load) == math.ceil(m / 4)
        assert load == sorted(load, reverse=True)  # the first devices take the rest


def test_xshare_balanced_stops_at_a_device_that_has_run_out() -> None:
    problem = make_problem("softmax_renorm", 16, 8, 2)
    problem = with_stats(problem, placement_device=torch.tensor([0, 1, 1, 1, 1, 1, 1, 1]))
    assert loads(members("xshare_balanced:m=6", problem), problem) == [1, 5]


def test_xshare_balanced_orders_turns_by_experts_instead_of_devices() -> None:
    """More devices than experts: device 9 takes its first turn before device 0 its second."""
    problem = make_problem("softmax_renorm", 4, 4, 2)
    problem = with_stats(problem, placement_device=torch.tensor([0, 0, 0, 9]))
    assert 3 in members("xshare_balanced:m=2", problem)


@over_kinds
def test_xshare_ep_peak_is_above_the_warm_up_and_its_share(kind: str) -> None:
    for problem in sized(kind):
        warm = loads(union_of(problem, 1), problem)
        everything = loads(members(f"xshare:k0=0,m={problem.spec.num_experts}", problem), problem)
        for m in (1, 3):
            load = loads(members(f"xshare_ep:k0=1,m_device={m}", problem), problem)
            room = [everything[d] if d < len(everything) else 0 for d in range(len(load))]
            assert load == [min(w + m, r) for w, r in zip(warm, room, strict=True)]
            if all(w + m <= r for w, r in zip(warm, room, strict=True)):
                assert max(load) == max(warm) + m
            capped = loads(members(f"xshare_ep:k0=1,m_device={m},additive=no", problem), problem)
            assert capped == [max(w, min(m, r)) for w, r in zip(warm, room, strict=True)]


# CAEE


@over_kinds
@pytest.mark.parametrize("text", ["caee:theta=0.5", "caee:theta=0.5,guard=no", "caee_offload:theta=0.6"])
def test_caee_expansion_slows_the_slowest_device_or_leaves_the_union(text: str, kind: str) -> None:
    for problem in sized(kind):
        policy, step = problem.policy(text), step_of(problem)
        scores = policy.score(problem.batch, problem.stats)
        mask = policy.select.must(scores, problem.batch, problem.stats).mask  # type: ignore[attr-defined]
        must, whole = set(mask.nonzero()[:, 0].tolist()), members(policy, problem)
        assert must <= whole <= union_of(problem)
        assert reference_rivals.slowest(step, whole) == reference_rivals.slowest(step, must)
        assert whole == reference_rivals.expand(step, must)


@over_kinds
def test_caee_at_equal_costs_depends_on_how_they_are_written(kind: str) -> None:
    """Bool costs skip the loop over experts; one set of costs for several steps at once is the same as one by one."""
    for text in ("caee:theta=0.5", "caee_offload:theta=0.6", "worth:least=0.5,cost=squared"):
        several = []
        for seed in range(3):
            problem = make_problem(kind, 16, 64, 8, seed=seed)
            missing = problem.stats["placement_cost"] > 0
            masks = []
            for cost in (missing, missing.float() * 0.3):
                stats = LayerStats({**problem.stats.tensors, "placement_cost": cost})
                masks.append(problem.policy(text).active(problem.batch, stats).mask)
            assert torch.equal(*masks)
            several.append((problem, missing, masks[0]))
        first = several[0][0]
        logits = torch.stack([problem.logits for problem, _, _ in several])
        hidden = torch.stack([problem.hidden for problem, _, _ in several])
        batch = first.spec(hidden, logits, bias=first.bias)
        device = first.stats["placement_device"]
        stats = LayerStats({"placement_device": device, "placement_cost": torch.stack([m for _, m, _ in several])})
        found = first.policy(text).active(batch, stats).mask
        for i, (problem, missing, _) in enumerate(several):
            own = LayerStats({"placement_device": device, "placement_cost": missing})
            alone = first.spec(problem.hidden, problem.logits, bias=first.bias)
            assert torch.equal(found[i], first.policy(text).active(alone, own).mask)


def test_caee_at_uniform_cost_leaves_a_device_below_the_slowest() -> None:
    problem = make_problem("sigmoid_bias", 16, 64, 8)
    problem = with_stats(problem, placement_cost=torch.ones(64))
    most = loads(union_of(problem), problem)
    for theta in (1.0, 3.0, 6.0):
        guarded = problem.policy(f"caee:theta={theta}")
        must = reference_rivals.caee_must(step_of(problem), theta)
        peak = max(loads(must, problem))
        assert loads(members(guarded, problem), problem) == [min(peak, room) for room in most]


def test_caee_tries_the_experts_in_another_order_than_by_importance() -> None:
    """One slot is free on the second device: expert 2 (.25) takes it, not expert 1 (.2) or 3 (.1)."""
    problem = one_row({0: 0.45, 1: 0.2, 2: 0.25, 3: 0.1}, 4)
    problem = with_stats(problem, placement_device=torch.tensor([0, 1, 1, 1]), placement_cost=torch.ones(4))
    assert members("caee:theta=0.4", problem) == {0, 2}


@over_kinds
def test_caee_offload_leaves_out_a_cached_expert(kind: str) -> None:
    for problem in sized(kind):
        cached = {u for u, cost in enumerate(problem.plain_stats["placement_cost"]) if cost == 0}
        assert cached & union_of(problem) or problem.rows == 1
        for theta in (0.01, 0.5, 0.9):
            assert cached & union_of(problem) <= members(f"caee_offload:theta={theta}", problem)


def test_caee_offload_follows_the_bias_instead_of_the_score() -> None:
    """The bias ranks expert 0 first, but expert 1 holds three quarters of the score."""
    logits, bias = torch.tensor([[-1.0, 3.0, -9.0]]), torch.tensor([5.0, 0.0, 0.0])
    spec, cost = RouterSpec(3, 2, "sigmoid"), torch.ones(3)
    batch = spec(torch.ones(1, 2), logits, bias=bias)
    stats = LayerStats({"placement_device": torch.zeros(3, dtype=torch.int64), "placement_cost": cost})
    assert batch.ids.tolist() == [[0, 1]]
    assert parse("caee_offload:theta=0.7").active(batch, stats).mask.tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ["sigmoid_bias", "softmax"])
def test_caee_without_a_guard_runs_nothing_or_expert_zero_in_a_small_batch(kind: str) -> None:
    """No sum reaches theta, so one expert is sure, and one more on every other device costs nothing."""
    problem = with_stats(make_problem(kind, 2, 64, 8), placement_cost=torch.ones(64))
    kept, total = members("caee:theta=50,guard=no", problem), reference_rivals.importance(step_of(problem))
    assert kept == reference_rivals.expand(step_of(problem), {total.index(max(total))})
    assert max(loads(kept, problem)) == 1
    routing = run("caee:theta=50,guard=no", problem)
    assert all(used_slots(routing))
    assert set(routing.ids.flatten().tolist()) <= kept
    assert union_of(problem, 1) <= members("caee:theta=50", problem)


@pytest.mark.parametrize("kind", ["groups_max", "groups_top2", "sigmoid_bias"])
def test_caee_compensates_by_the_bias_or_inside_open_groups_only(kind: str) -> None:
    """On purpose: a row that loses a route takes the set's best by score, though the model closed its group."""
    problem = make_problem(kind, 16, 64, 4)
    step, otherwise = step_of(problem), 0
    kept = members("caee:theta=1", problem)
    routing = run("caee:theta=1", problem)
    for row, routes in zip(step.rows, used_slots(routing), strict=True):
        if not set(row.ids) <= kept:
            assert [u for u, _ in routes] == sorted(kept, key=lambda u, row=row: (-row.probs[u], u))[:4]
            otherwise += {u for u, _ in routes} != set(sorted(kept, key=lambda u, row=row: (-row.choice[u], u))[:4])
    assert otherwise


@pytest.mark.parametrize("text", ["moe_spec:budget=20", "xshare:k0=1,m=12", "reap_static:budget=20"])
def test_padding_row_fetches_a_spare_expert_of_the_set(text: str) -> None:
    """The set may hold experts that no row runs; a padding row repeats one that is fetched anyway."""
    problem = make_problem("softmax_renorm", 9, 64, 2)
    live = torch.arange(9) < 3
    step = dataclasses.replace(problem, live=live)
    routing = run(text, step)
    runs = set(routing.ids[:3].flatten().tolist())
    assert runs < members(text, step)
    assert set(routing.ids[3:].flatten().tolist()) <= runs


# Dynamic skipping


def test_skip_of_two_routes_differs_from_the_paper() -> None:
    """beta = 0.5: a second weight of a third of the first goes, one of two thirds stays."""
    stats = {"route_ratio": torch.tensor([1.0, 0.5])}
    (routes,) = used_slots(run("skip", one_row({2: 0.75, 1: 0.25}, 3, **stats)))
    assert routes == [(2, pytest.approx(1.0))]
    assert is_native("skip", one_row({2: 0.6, 1: 0.4}, 3, **stats))
    assert is_native("skip:scale=0.6", one_row({2: 0.75, 1: 0.25}, 3, **stats))


def test_rules_by_weight_read_a_row_in_the_order_of_its_bias() -> None:
    """The bias ranks the light expert 0 first; the ratio of rank 2 and `p = 1` are about the heavy expert 1."""
    logits, bias = torch.tensor([[-1.0, 3.0, -9.0]]), torch.tensor([5.0, 0.0, 0.0])
    batch = RouterSpec(3, 2, "sigmoid")(torch.ones(1, 2), logits, bias=bias)
    stats = LayerStats({"route_ratio": torch.tensor([0.0, 0.9]), **hand_made({(0, 1): 0.5}, {(0, 1): 0.5}, 3)})
    assert batch.ids.tolist() == [[0, 1]]
    assert [[u for u, _ in row] for row in used_slots(parse("skip")(batch, stats))] == [[1]]
    assert parse("exfold_prefill:p=1")(batch, stats).ids.tolist() == [[1, 1]]


# REAP, MoE-Spec, DES, dMoE, AcceptMoE


def test_reap_static_prunes_a_super_expert() -> None:
    problem = make_problem("softmax_renorm", 4, 8, 2)
    value = torch.tensor([8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    problem = with_stats(problem, output_norm_weighted=value, super_expert=torch.eye(8)[7] + torch.eye(8)[5])
    assert members("reap_static:budget=3", problem) == {0, 5, 7}
    assert members("reap_static:budget=1", problem) == {5}
    assert members("reap_static:budget=3,protect=no", problem) == {0, 1, 2}
    assert "super_expert" not in parse("reap_static:budget=3,protect=no").needs


@over_kinds
def test_reap_static_pool_depends_on_the_batch(kind: str) -> None:
    first, other = (make_problem(kind, 5, 64, 4, seed=seed) for seed in (0, 1))
    for text in ("reap_static:budget=9", "exfold_static:budget=9"):
        assert members(text, first) == members(text, dataclasses.replace(other, stats=first.stats))


@over_kinds
def test_moe_spec_differs_from_xshare_without_a_warm_up(kind: str) -> None:
    for problem in sized(kind):
        assert_same(run("moe_spec:budget=6", problem), run("xshare:k0=0,m=6", problem))
        truncated = used_slots(run("moe_spec:budget=6,fill=drop", problem))
        kept = members("moe_spec:budget=6", problem)
        for row, routes in zip(problem.reference, truncated, strict=True):
            own = [u for u in row.ids if u in kept]
            assert [u for u, _ in routes] == own or (not own and len(routes) == 1)


@over_kinds
@pytest.mark.parametrize("beta", [0.01, 0.15, 0.3, 1.0])
def test_des_vote_core_has_another_size(kind: str, beta: float) -> None:
    for problem in sized(kind):
        size = max(problem.spec.top_k, round(beta * problem.spec.num_experts))
        assert len(members(f"des_vote:beta={beta}", problem)) == min(size, len(union_of(problem)))


def uniform(rows: int, n: int, k: int = 2) -> Problem:
    problem = make_problem("softmax_renorm", rows, n, k)
    return dataclasses.replace(problem, logits=torch.zeros(rows, n))


@pytest.mark.parametrize("n", [8, 60, 64, 100])
def test_acceptmoe_on_even_demand_wants_other_than_all_experts(n: int) -> None:
    """exp(log n) = n: rounding must not make it n + 1 or, halved, one more than half."""
    assert len(members("acceptmoe", uniform(3, n))) == n
    assert len(members("acceptmoe:scale=0.5", uniform(3, n))) == n // 2
    assert len(members("acceptmoe:scale=0.001", uniform(3, n))) == 1


def test_acceptmoe_ignores_that_a_draft_is_rejected() -> None:
    problem = make_problem("softmax_renorm", 4, 64, 4)
    accept = torch.tensor([1.0, 0.0, 0.25, 0.0])
    batch = problem.spec(problem.hidden, problem.logits, accept=accept)
    step = dataclasses.replace(step_of(problem), accept=accept.tolist())
    assert members("acceptmoe", problem, batch) == reference_rivals.acceptmoe_set(step, 1.0)
    first = problem.take(torch.tensor([0]))
    only = dataclasses.replace(batch, accept=torch.tensor([1.0, 0.0, 0.0, 0.0]))
    assert members("acceptmoe", problem, only) == members("acceptmoe", first)
    assert members("acceptmoe", problem, batch) != members("acceptmoe", problem)


@over_kinds
def test_dmoe_set_is_not_the_smallest_with_its_share(kind: str) -> None:
    for problem in sized(kind):
        total = problem.policy("dmoe").score(problem.batch, problem.stats).double().sum(0)
        sizes = []
        for share in (0.01, 0.3, 0.6, 0.95, 1.0):
            kept = sorted(members(f"dmoe:share={share}", problem))
            held = total[kept].sum() / total.sum()
            assert held >= share - 1e-9
            assert held - total[kept].min() / total.sum() < share or len(kept) == len(union_of(problem))
            sizes.append(len(kept))
        assert sizes == sorted(sizes)
        assert sizes[0] == 1
        assert sizes[-1] == len(union_of(problem))


@over_kinds
def test_ablation_of_equal_size_has_another_size_than_the_first_routes(kind: str) -> None:
    """BASE's table 2: every score gets as many experts as the top-1 union has."""
    for problem in sized(kind):
        policy = Policy(RouterMass(), UnionSize(), Backfill())
        kept = members(policy, problem)
        total = reference_rivals.weight_sums(step_of(problem))
        assert kept == reference_rivals.best_of_union(step_of(problem), total, len(union_of(problem, 1)))


@over_kinds
def test_device_fetches_more_than_its_budget_or_leaves_room(kind: str) -> None:
    for seed in range(6):
        problem = make_problem(kind, 8, 64, 8, seed=seed)
        for budget in (1, 3, 64):
            policy = parse(f"base_ep:budget={budget}")
            native = loads(union_of(problem), problem)
            wanted = [min(budget, load) for load in native]
            assert loads(members(policy, problem), problem) == wanted
            at_run_time = parse("base_ep:budget=9").with_budget(torch.tensor(budget))
            assert members(at_run_time, problem) == members(policy, problem)


@pytest.mark.parametrize("text", ["base:budget=6", "price:budget=6", "spread:budget=6", "base:budget=9,relative=1"])
@over_kinds
def test_leveling_is_not_caees_with_the_scores_of_the_policy(text: str, kind: str) -> None:
    """Against `CostInvariant`, whose loop goes from expert to expert, at a cost of 1 each."""
    for seed in range(4):
        problem = make_problem(kind, 8, 64, 8, seed=seed)
        problem = with_stats(problem, placement_cost=torch.ones(64))
        policy, leveled = parse(text), parse(f"{text},level=yes")
        must = members(policy, problem)
        looped = dataclasses.replace(policy, select=CostInvariant(policy.select))
        found = members(leveled, problem)
        assert found == members(looped, problem)
        assert max(loads(found, problem)) == max(loads(must, problem))
        assert must < found
        assert leveled.with_budget(6).name == f"{text},level=yes".replace("9", "6")
        assert members(leveled.with_budget(2), problem) == members(parse(leveled.with_budget(2).name), problem)
