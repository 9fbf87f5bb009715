from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from moebudget.core.ops import kept_routes
from moebudget.core.policy import Fill
from moebudget.core.router import RouterSpec
from moebudget.core.types import NO_STATS, Active, LayerStats, Routing
from moebudget.methods.common import RouteRank
from moebudget.methods.fills import Backfill, ByLayer, Drop, EnergyGain, LowRankSketch, MeanDirection, NativeRoutes
from tests.conftest import (
    Problem,
    assert_routes,
    make_problem,
    make_spec,
    over_kinds,
    problems,
    used_slots,
)
from tests.methods import reference, steps


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
@pytest.mark.parametrize("denominator", ["native", "executed", "geometric"])
def test_backfill_agrees_with_the_specification(kind: str, size: int, denominator: str) -> None:
    for problem in problems(kind):
        active = random_set(problem, size)
        routing = Backfill(denominator)(active, problem.batch.probs, problem.batch, NO_STATS)  # type: ignore[arg-type]
        wanted = [reference.backfill(problem.spec, row, members(active), denominator) for row in problem.reference]
        assert_routes(routing, wanted, problem.shape)


@over_kinds
@pytest.mark.parametrize("size", [1, 3, 7])
def test_drop_agrees_with_the_specification(kind: str, size: int) -> None:
    for problem in problems(kind):
        active = random_set(problem, size)
        routing = Drop()(active, problem.batch.probs, problem.batch, NO_STATS)
        assert_routes(routing, [reference.drop(row, members(active)) for row in problem.reference], problem.shape)


@over_kinds
@pytest.mark.parametrize("fill", [Backfill("geometric"), Drop()])
def test_shift_is_the_sum_of_the_lost_routes_directions(kind: str, fill: Fill) -> None:
    for problem in problems(kind):
        batch = problem.batch
        active = random_set(problem, 3)
        routing, plain = (
            MeanDirection(fill)(active, batch.probs, batch, problem.stats),
            fill(active, batch.probs, batch, problem.stats),
        )
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


def test_rows_that_do_not_vote_are_not_shifted() -> None:
    problem = make_problem("softmax_renorm", 3, 16, 8)
    decode = torch.tensor([True, False, True])
    hidden = problem.hidden.index_fill(0, torch.tensor([2]), torch.nan)
    shift = MeanDirection()(
        random_set(problem, 3), problem.logits, problem.spec(hidden, problem.logits, kind=decode), problem.stats
    ).shift
    assert shift is not None
    assert shift[1:].tolist() == [[0.0] * shift.shape[1]] * 2
    assert float(shift[0].norm()) > 0


@over_kinds
@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_first_routes_are_plain_top_k_reduction(kind: str, k: int) -> None:
    for problem in problems(kind):
        everything = Active(torch.ones(problem.spec.num_experts, dtype=torch.bool))
        routing = NativeRoutes()(everything, RouteRank(k)(problem.batch, NO_STATS), problem.batch, NO_STATS)
        wanted = [reference.first_routes(problem.spec, row, k) for row in problem.reference]
        assert_routes(routing, wanted, problem.shape)


def test_dropped_slots_name_an_expert_that_the_row_runs() -> None:
    """A token keeps 3 of 8 routes; the other five slots repeat an expert that it runs anyway."""
    problem = make_problem("softmax_renorm", 1, 16, 8)
    own = problem.batch.ids[0].tolist()
    kept = [own[1], own[4], own[6]]
    assert 0 not in kept
    for fill in (Drop(), Backfill()):
        routing = fill(active_of(kept, 16), problem.batch.probs, problem.batch, NO_STATS)
        assert [u for u, _ in used_slots(routing)[0]] == kept
        unused = routing.ids[0][routing.weights[0] == 0]
        assert unused.tolist() == [kept[0]] * 5


def test_dropped_routes_leave_the_others_in_their_slots() -> None:
    problem = make_problem("softmax", 1, 16, 8)
    own, weights = problem.batch.ids[0], problem.batch.weights[0]
    slots = torch.tensor([1, 4, 6])
    routing = Drop()(active_of(own[slots].tolist(), 16), problem.batch.probs, problem.batch, NO_STATS)
    assert torch.equal(routing.ids[0, slots], own[slots])
    assert torch.equal(routing.weights[0, slots], weights[slots])


def test_norm_topk_prob_false_is_never_renormalised() -> None:
    problem = softmax_problem([[0.0, 1.0, 2.0, 3.0]], 2, renormalize=False)
    probs = problem.batch.probs[0]
    scores = RouteRank(1)(problem.batch, NO_STATS)
    for fill in (Backfill("native"), Backfill("executed"), NativeRoutes()):
        routing = fill(active_of([0, 3], 4), scores, problem.batch, NO_STATS)
        for u, w in used_slots(routing)[0]:
            assert w == probs[u].item(), fill
    assert used_slots(Drop()(active_of([0, 3], 4), problem.batch.probs, problem.batch, NO_STATS)) == [
        [(3, probs[3].item())]
    ]


def test_native_denominator_is_taken_over_the_native_routes() -> None:
    """BASE divides by the routes the model chose, so the weights sum to less than 1; OEA divides by what runs."""
    problem = softmax_problem([[0.0, 1.0, 2.0, 3.0]], 2)
    p = problem.batch.probs[0].tolist()
    active = active_of([1, 3], 4)
    original = used_slots(Backfill("native")(active, problem.batch.probs, problem.batch, NO_STATS))[0]
    executed = used_slots(Backfill("executed")(active, problem.batch.probs, problem.batch, NO_STATS))[0]
    assert dict(original) == pytest.approx({3: p[3] / (p[3] + p[2]), 1: p[1] / (p[3] + p[2])})
    assert dict(executed) == pytest.approx({3: p[3] / (p[3] + p[1]), 1: p[1] / (p[3] + p[1])})


def test_bias_does_not_weigh_in_a_backfilled_route() -> None:
    spec, logits, bias = (
        RouterSpec(4, 1, "sigmoid"),
        torch.tensor([[2.0, 1.0, 0.0, -1.0]]),
        torch.tensor([9.0, 0, 1, 0]),
    )
    batch = spec(torch.ones(1, 2), logits, bias=bias)
    (expert, weight), *_ = used_slots(Backfill()(active_of([1, 2, 3], 4), batch.probs, batch, NO_STATS))[0]
    assert expert == 2
    assert weight == pytest.approx((0.5 / torch.tensor(2.0).sigmoid()).item())


@pytest.mark.parametrize("fill", [Backfill("native"), Backfill("executed"), Drop()], ids=str)
def test_rows_that_keep_every_route_keep_their_bits(fill: Backfill | Drop) -> None:
    """Weights that the model made, in whatever precision, come back bit for bit."""
    problem = make_problem("softmax_renorm", 2, 8, 2)
    odd = problem.batch.weights + 0.125
    batch = dataclasses.replace(problem.batch, weights=odd)
    routing = fill(active_of(batch.ids[0].tolist(), 8), batch.probs, batch, NO_STATS)
    assert torch.equal(routing.ids[0], batch.ids[0])
    assert torch.equal(routing.weights[0], odd[0])


GROUPED = ("groups_max", "groups_top2")


@pytest.mark.parametrize("kind", GROUPED)
def test_backfill_stays_inside_open_groups(kind: str) -> None:
    """The group rule holds after selection: a row is only filled from its open groups."""
    problem = make_problem(kind, 16, 64, 2)
    active = random_set(problem, 20)
    partly = 0
    for row, routes in zip(
        problem.reference, used_slots(Backfill()(active, problem.batch.probs, problem.batch, NO_STATS)), strict=True
    ):
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
@pytest.mark.parametrize("fill", [Backfill("native"), Drop()], ids=str)
def test_rows_without_any_open_expert_are_rescued(kind: str, fill: Backfill | Drop) -> None:
    problem, active, best = closed_row(kind)
    row = problem.reference[0]
    routing = fill(active, problem.batch.probs, problem.batch, NO_STATS)
    assert_routes(routing, [[(best, row.probs[best] * row.factor)]])
    assert routing.ids[0].tolist() == [best, best]


@pytest.mark.parametrize("kind", GROUPED)
def test_rescued_rows_are_renormalised_over_what_they_execute(kind: str) -> None:
    """executed: w = p / sum of p over the executed experts, which here is the rescuing one alone."""
    problem, active, best = closed_row(kind)
    routing = Backfill("executed")(active, problem.batch.probs, problem.batch, NO_STATS)
    row, spec = problem.reference[0], problem.spec
    assert_routes(routing, [[(best, spec.scale if spec.renormalize else row.probs[best] * spec.scale)]])


@over_kinds
def test_kept_routes_agree_with_a_loop(kind: str) -> None:
    for problem in problems(kind):
        active = random_set(problem, 3)
        wanted = [[u in members(active) for u in row.ids] for row in problem.reference]
        assert kept_routes(active, problem.batch).tolist() == wanted, problem.shape


def padded(routing: Routing, rows: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    return routing.ids[rows].tolist(), routing.weights[rows].tolist()


@pytest.mark.parametrize("fill", [Backfill("native"), Backfill("executed"), Drop(), NativeRoutes()], ids=str)
def test_padding_rows_fetch_nothing_further(fill: Backfill | Drop | NativeRoutes) -> None:
    problem = make_problem("softmax_renorm", 3, 8, 2)
    decode = torch.tensor([True, False, True])
    batch = make_spec("softmax_renorm", 8, 2)(problem.hidden, problem.logits, kind=decode)
    ids, weights = padded(fill(active_of([5], 8), RouteRank(1)(batch, NO_STATS), batch, NO_STATS), torch.tensor([1]))
    assert ids == [[5, 5]]
    assert weights == [[0.0, 0.0]]


@over_kinds
@pytest.mark.parametrize("text", ["lynx:alpha=0.7,beta=1", "base:budget=2,fill=preserved"])
def test_preserved_weights_add_up_to_the_native_sum(text: str, kind: str) -> None:
    for problem in steps.sized(kind):
        routing = steps.run(text, problem)
        torch.testing.assert_close(routing.weights.sum(-1), problem.batch.weights.sum(-1))


@pytest.mark.parametrize("text", ["moe_spec:budget=20", "xshare:k0=1,m=12", "reap_static:budget=20"])
def test_padding_rows_name_no_spare_expert_of_the_set(text: str) -> None:
    """The set may hold experts that no row runs; a padding row repeats one that is fetched anyway."""
    problem = make_problem("softmax_renorm", 9, 64, 2)
    decode = torch.arange(9) < 3
    step = dataclasses.replace(problem, kind=decode)
    routing = steps.run(text, step)
    runs = set(routing.ids[:3].flatten().tolist())
    assert runs < steps.members(text, step)
    assert set(routing.ids[3:].flatten().tolist()) <= runs


few_kinds = pytest.mark.parametrize("kind", ["softmax_renorm", "groups_top2"])


@few_kinds
@pytest.mark.parametrize("cap", [1.1, 100.0])
def test_executed_energy_is_the_native_one_up_to_its_cap(kind: str, cap: float) -> None:
    capped = 0
    for problem in problems(kind):
        active = random_set(problem, 3)
        plain, scaled = (
            f(active, problem.batch.probs, problem.batch, problem.stats) for f in (Backfill(), EnergyGain(cap=cap))
        )
        assert torch.equal(plain.ids, scaled.ids)
        for t, (row, before, after) in enumerate(
            zip(problem.reference, used_slots(plain), used_slots(scaled), strict=True)
        ):
            energy = energies(problem.batch.hidden[t], problem.stats)
            native = sum(w * w * energy[u] for u, w in row.routes)
            ran = sum(w * w * energy[u] for u, w in before)
            factor = 1.0 if {u for u, _ in before} == set(row.ids) else min(cap, math.sqrt(native / ran))
            capped += factor == cap
            assert [w for _, w in after] == pytest.approx([w * factor for _, w in before], rel=1e-4)
    assert capped > 0 or cap == 100.0


def energies(z: torch.Tensor, stats: LayerStats) -> list[float]:
    a, b = stats["predictor_weight"].double(), stats["predictor_bias"].double()
    return [math.exp(float(a[u] @ z.double() / z.double().norm() + b[u])) for u in range(len(b))]


@few_kinds
@pytest.mark.parametrize(("exponent", "name"), [(0.0, "native"), (0.5, "geometric"), (1.0, "executed")])
def test_denominator_exponent_is_that_of_the_sets_size(kind: str, exponent: float, name: str) -> None:
    for problem in problems(kind):
        n = problem.spec.num_experts
        table = torch.full((n,), 7.0)
        table[2] = exponent  # of a set of three
        active = random_set(problem, 3)
        found = ByLayer()(active, problem.batch.probs, problem.batch, LayerStats({"layer_fill": table}))
        wanted = Backfill(name)(active, problem.batch.probs, problem.batch, NO_STATS)  # type: ignore[arg-type]
        assert torch.equal(found.ids, wanted.ids)
        torch.testing.assert_close(found.weights, wanted.weights)


@few_kinds
@pytest.mark.parametrize("fill", [Backfill(), Drop()])
def test_shift_is_the_sum_of_the_lost_routes_sketches(kind: str, fill: Fill) -> None:
    for problem in problems(kind):
        batch, active = problem.batch, random_set(problem, 3)
        routing, plain = (
            LowRankSketch(fill)(active, batch.probs, batch, problem.stats),
            fill(active, batch.probs, batch, problem.stats),
        )
        assert torch.equal(routing.ids, plain.ids)
        assert torch.equal(routing.weights, plain.weights)
        assert routing.shift is not None
        read, written = problem.stats["sketch_in"].double(), problem.stats["sketch_out"].double()
        wanted = torch.zeros_like(routing.shift, dtype=torch.float64)
        for t, (row, runs) in enumerate(zip(problem.reference, used_slots(plain), strict=True)):
            x = torch.cat([batch.hidden[t].double(), torch.ones(1, dtype=torch.float64)])
            for u, w in row.routes:
                if u not in {v for v, _ in runs}:
                    wanted[t] += w * written[u].T @ (read[u] @ x)
        torch.testing.assert_close(routing.shift.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fill", [EnergyGain(), ByLayer(), LowRankSketch()])
def test_rows_that_keep_their_routes_are_left_alone(fill: Fill) -> None:
    problem = make_problem("softmax_renorm", 5, 12, 3)
    kept = problem.reference[2].ids
    routing = fill(active_of(kept, 12), problem.batch.probs, problem.batch, problem.stats)
    assert torch.equal(routing.ids[2], problem.batch.ids[2])
    assert torch.equal(routing.weights[2], problem.batch.weights[2])
    everyone = fill(Active(torch.ones(12, dtype=torch.bool)), problem.batch.probs, problem.batch, problem.stats)
    assert torch.equal(everyone.weights, problem.batch.weights)
    if isinstance(fill, LowRankSketch):
        assert routing.shift is not None
        assert float(routing.shift[2].abs().max()) == 0 < float(routing.shift.abs().max())


def test_rows_that_do_not_vote_are_not_sketched() -> None:
    problem = make_problem("softmax_renorm", 4, 12, 3)
    hidden = problem.hidden.clone()
    hidden[1], hidden[2, 0] = torch.nan, torch.nan
    decode = torch.tensor([True, False, True, True])
    batch = problem.spec(hidden, problem.logits, kind=decode)
    shift = LowRankSketch()(random_set(problem, 3), batch.probs, batch, problem.stats).shift
    assert shift is not None
    assert float(shift[1:3].abs().max()) == 0 < float(shift[[0, 3]].abs().max())


def test_by_layer_agrees_with_plain_loops() -> None:
    """The geometric denominator from plain loops, so that the code is not compared with itself alone."""
    problem = make_problem("softmax_renorm", 6, 12, 3)
    active = random_set(problem, 4)
    stats = LayerStats({"layer_fill": torch.full((12,), 0.5)})
    found = used_slots(ByLayer()(active, problem.batch.probs, problem.batch, stats))
    members = set(active.mask.nonzero()[:, 0].tolist())
    for row, routes in zip(problem.reference, found, strict=True):
        wanted = dict(reference.backfill(problem.spec, row, members, "geometric"))
        assert dict(routes) == pytest.approx(wanted, rel=1e-5)
