from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from moebudget.fill import Backfill, Drop, Fill, OwnRoutes, StandIn, kept_routes
from moebudget.router import RouterSpec
from moebudget.score import RouteRank
from moebudget.types import NO_STATS, Active, Routing
from tests import reference
from tests.conftest import Problem, assert_routes, make_problem, make_spec, over_kinds, problems, used_slots


def random_set(problem: Problem, size: int) -> Active:
    """Some experts, chosen without regard to the rows."""
    n = problem.spec.num_experts
    order = torch.randperm(n, generator=torch.Generator().manual_seed(problem.rows + size))
    return Active(torch.zeros(n, dtype=torch.bool).index_fill(0, order[:size], True))


def active_of(experts: list[int], n: int) -> Active:
    return Active(torch.zeros(n, dtype=torch.bool).index_fill(0, torch.tensor(experts), True))


def members(active: Active) -> set[int]:
    return set(active.mask.nonzero()[:, 0].tolist())


def softmax_problem(logits: list[list[float]], k: int, renormalize: bool = True) -> Problem:
    """A step with these logits, without bias or groups."""
    problem = make_problem("softmax_renorm", len(logits), len(logits[0]), k)
    spec = RouterSpec(len(logits[0]), k, renormalize=renormalize)
    return dataclasses.replace(problem, spec=spec, logits=torch.tensor(logits))


@over_kinds
@pytest.mark.parametrize("size", [1, 3, 7])
@pytest.mark.parametrize("denominator", ["original", "executed", "half"])
def test_backfill_differs_from_the_specification(kind: str, size: int, denominator: str) -> None:
    for problem in problems(kind):
        active = random_set(problem, size)
        routing = Backfill(denominator)(active, problem.batch, NO_STATS)  # type: ignore[arg-type]
        wanted = [reference.backfill(problem.spec, row, members(active), denominator) for row in problem.reference]
        assert_routes(routing, wanted, problem.shape)


@over_kinds
@pytest.mark.parametrize("size", [1, 3, 7])
def test_drop_differs_from_the_specification(kind: str, size: int) -> None:
    for problem in problems(kind):
        active = random_set(problem, size)
        routing = Drop()(active, problem.batch, NO_STATS)
        assert_routes(routing, [reference.drop(row, members(active)) for row in problem.reference], problem.shape)


@over_kinds
@pytest.mark.parametrize("fill", [Backfill("half"), Drop()])
def test_shift_differs_from_the_directions_of_lost_routes(kind: str, fill: Fill) -> None:
    for problem in problems(kind):
        batch = problem.batch
        active = random_set(problem, 3)
        routing, plain = StandIn(fill)(active, batch, problem.stats), fill(active, batch, problem.stats)
        assert torch.equal(routing.ids, plain.ids)
        assert torch.equal(routing.weights, plain.weights)
        assert routing.shift is not None
        a, b, d = (problem.stats[n] for n in ("predictor_weight", "predictor_bias", "output_direction"))
        wanted = torch.zeros_like(routing.shift)
        for t, (row, runs) in enumerate(zip(problem.reference, used_slots(plain), strict=True)):
            z = batch.hidden[t] / batch.hidden[t].norm()
            for u, w in row.routes:
                if u not in {v for v, _ in runs}:
                    wanted[t] += w * math.exp(float(a[u] @ z + b[u]) / 2) * d[u]
        torch.testing.assert_close(routing.shift, wanted, rtol=1e-4, atol=1e-5)


def test_a_row_that_does_not_vote_is_shifted() -> None:
    problem = make_problem("softmax_renorm", 3, 16, 8)
    live = torch.tensor([True, False, True])
    hidden = problem.hidden.index_fill(0, torch.tensor([2]), torch.nan)
    shift = StandIn()(random_set(problem, 3), problem.spec(hidden, problem.logits, live=live), problem.stats).shift
    assert shift is not None
    assert shift[1:].tolist() == [[0.0] * shift.shape[1]] * 2
    assert float(shift[0].norm()) > 0


@over_kinds
@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_first_routes_differ_from_plain_top_k_reduction(kind: str, k: int) -> None:
    for problem in problems(kind):
        everything = Active(torch.ones(problem.spec.num_experts, dtype=torch.bool))
        routing = OwnRoutes(RouteRank(k))(everything, problem.batch, NO_STATS)
        wanted = [reference.first_routes(problem.spec, row, k) for row in problem.reference]
        assert_routes(routing, wanted, problem.shape)


def test_dropped_slot_points_at_minus_one_or_at_expert_zero() -> None:
    """A token keeps 3 of 8 routes; the other five slots repeat an expert that it runs anyway."""
    problem = make_problem("softmax_renorm", 1, 16, 8)
    own = problem.batch.ids[0].tolist()
    kept = [own[1], own[4], own[6]]
    assert 0 not in kept
    for fill in (Drop(), Backfill()):
        routing = fill(active_of(kept, 16), problem.batch, NO_STATS)
        assert [u for u, _ in used_slots(routing)[0]] == kept
        unused = routing.ids[0][routing.weights[0] == 0]
        assert unused.tolist() == [kept[0]] * 5


def test_dropped_routes_keep_their_slots() -> None:
    problem = make_problem("softmax", 1, 16, 8)
    own, weights = problem.batch.ids[0], problem.batch.weights[0]
    slots = torch.tensor([1, 4, 6])
    routing = Drop()(active_of(own[slots].tolist(), 16), problem.batch, NO_STATS)
    assert torch.equal(routing.ids[0, slots], own[slots])
    assert torch.equal(routing.weights[0, slots], weights[slots])


def test_norm_topk_prob_false_is_renormalised_when_routes_are_lost() -> None:
    problem = softmax_problem([[0.0, 1.0, 2.0, 3.0]], 2, renormalize=False)
    probs = problem.batch.probs[0]
    for fill in (Backfill("original"), Backfill("executed"), OwnRoutes(RouteRank(1))):
        routing = fill(active_of([0, 3], 4), problem.batch, NO_STATS)
        for u, w in used_slots(routing)[0]:
            assert w == probs[u].item(), fill
    assert used_slots(Drop()(active_of([0, 3], 4), problem.batch, NO_STATS)) == [[(3, probs[3].item())]]


def test_original_denominator_is_taken_over_the_executed_experts() -> None:
    """BASE divides by the routes the model chose, so the weights sum to less than 1; OEA divides by what runs."""
    problem = softmax_problem([[0.0, 1.0, 2.0, 3.0]], 2)
    p = problem.batch.probs[0].tolist()
    active = active_of([1, 3], 4)
    original = used_slots(Backfill("original")(active, problem.batch, NO_STATS))[0]
    executed = used_slots(Backfill("executed")(active, problem.batch, NO_STATS))[0]
    assert dict(original) == pytest.approx({3: p[3] / (p[3] + p[2]), 1: p[1] / (p[3] + p[2])})
    assert dict(executed) == pytest.approx({3: p[3] / (p[3] + p[1]), 1: p[1] / (p[3] + p[1])})


def test_bias_weighs_in_a_backfilled_route() -> None:
    spec, logits, bias = (
        RouterSpec(4, 1, "sigmoid"),
        torch.tensor([[2.0, 1.0, 0.0, -1.0]]),
        torch.tensor([9.0, 0, 1, 0]),
    )
    batch = spec(torch.ones(1, 2), logits, bias=bias)
    (expert, weight), *_ = used_slots(Backfill()(active_of([1, 2, 3], 4), batch, NO_STATS))[0]
    assert expert == 2
    assert weight == pytest.approx((0.5 / torch.tensor(2.0).sigmoid()).item())


@pytest.mark.parametrize("fill", [Backfill("original"), Backfill("executed"), Drop()], ids=str)
def test_row_that_keeps_every_route_is_recomputed(fill: Backfill | Drop) -> None:
    """Weights that the model made, in whatever precision, come back bit for bit."""
    problem = make_problem("softmax_renorm", 2, 8, 2)
    odd = problem.batch.weights + 0.125
    batch = dataclasses.replace(problem.batch, weights=odd)
    routing = fill(active_of(batch.ids[0].tolist(), 8), batch, NO_STATS)
    assert torch.equal(routing.ids[0], batch.ids[0])
    assert torch.equal(routing.weights[0], odd[0])


GROUPED = ("groups_max", "groups_top2")


@pytest.mark.parametrize("kind", GROUPED)
def test_backfill_opens_a_group_that_the_model_closed(kind: str) -> None:
    """The group rule holds after selection: a row is only filled from its open groups."""
    problem = make_problem(kind, 16, 64, 2)
    active = random_set(problem, 20)
    partly = 0
    for row, routes in zip(problem.reference, used_slots(Backfill()(active, problem.batch, NO_STATS)), strict=True):
        reachable = [u for u in members(active) if row.choice[u] > -torch.inf]
        assert {u for u, _ in routes} <= set(reachable)
        partly += len(reachable) < len(members(active))
    assert partly


def closed_row(kind: str) -> tuple[Problem, Active, int]:
    """One row, a set that lies in a closed group of it, and the expert of the set that it weighs highest."""
    problem = make_problem(kind, 1, 64, 2)
    row = problem.reference[0]
    closed = [u for u in range(64) if row.choice[u] == -torch.inf][:3]
    return problem, active_of(closed, 64), reference.best_first(row.probs, 1, closed)[0]


@pytest.mark.parametrize("kind", GROUPED)
@pytest.mark.parametrize("fill", [Backfill("original"), Drop()], ids=str)
def test_row_without_any_open_expert_runs_nothing(kind: str, fill: Backfill | Drop) -> None:
    problem, active, best = closed_row(kind)
    row = problem.reference[0]
    routing = fill(active, problem.batch, NO_STATS)
    assert_routes(routing, [[(best, row.probs[best] * row.factor)]])
    assert routing.ids[0].tolist() == [best, best]


@pytest.mark.parametrize("kind", GROUPED)
def test_rescued_row_is_not_renormalised_over_what_it_executes(kind: str) -> None:
    """executed: w = p / sum of p over the executed experts, which here is the rescuing one alone."""
    problem, active, best = closed_row(kind)
    routing = Backfill("executed")(active, problem.batch, NO_STATS)
    row, spec = problem.reference[0], problem.spec
    assert_routes(routing, [[(best, spec.scale if spec.renormalize else row.probs[best] * spec.scale)]])


@over_kinds
def test_kept_routes_differ_from_a_loop(kind: str) -> None:
    for problem in problems(kind):
        active = random_set(problem, 3)
        wanted = [[u in members(active) for u in row.ids] for row in problem.reference]
        assert kept_routes(active, problem.batch).tolist() == wanted, problem.shape


def padded(routing: Routing, rows: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    return routing.ids[rows].tolist(), routing.weights[rows].tolist()


@pytest.mark.parametrize(
    "fill", [Backfill("original"), Backfill("executed"), Drop(), OwnRoutes(RouteRank(1))], ids=str
)
def test_padding_row_fetches_an_expert_of_its_own(fill: Backfill | Drop | OwnRoutes) -> None:
    problem = make_problem("softmax_renorm", 3, 8, 2)
    live = torch.tensor([True, False, True])
    batch = make_spec("softmax_renorm", 8, 2)(problem.hidden, problem.logits, live=live)
    ids, weights = padded(fill(active_of([5], 8), batch, NO_STATS), torch.tensor([1]))
    assert ids == [[5, 5]]
    assert weights == [[0.0, 0.0]]
