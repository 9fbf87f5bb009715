"""The fused kernels against the torch form: on a GPU, or on the CPU through Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch
from torch import Tensor

import moebudget.kernels
from moebudget.kernels import FusedRouter, NotFusedError, fused, lower
from moebudget.policy import Policy
from moebudget.presets import EXAMPLES, parse
from moebudget.runtime import FIELDS, LayerRouter, chain, count_step
from moebudget.types import LayerStats, MissingStatisticError, Routing
from tests.conftest import KINDS, Problem, make_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes in numpy, which warns where padding rows hold what they like to hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

CASES = [
    *((kind, (4, 12, 3), "base:budget=5") for kind in KINDS),
    *((kind, (4, 12, 3), "squared:budget=4,fill=executed") for kind in KINDS),
    *((kind, (4, 12, 3), "base:budget=4,fill=half") for kind in KINDS),
    ("softmax_renorm", (5, 12, 3), "spread:budget=4"),
    ("sigmoid_bias", (5, 12, 3), "spread:budget=11,fill=original"),
    *((kind, (5, 12, 3), "price:budget=3") for kind in KINDS),
    ("softmax_renorm", (19, 16, 2), "price:budget=6,fill=original"),
    ("softmax", (4, 12, 3), "price:budget=12"),  # a price below every sum
    ("softmax_renorm", (1, 8, 2), "base:budget=1"),
    ("softmax_renorm", (5, 60, 8), "base:budget=10,fill=drop"),
    ("softmax", (5, 60, 4), "static:budget=6"),
    ("sigmoid_bias", (4, 12, 1), "router_mass:budget=2"),
    *((kind, (4, 12, 2), "base:budget=100") for kind in KINDS),
    ("softmax_renorm", (35, 16, 2), "squared:budget=16"),
    ("groups_max", (4, 12, 4), "base:budget=2,fill=drop"),
    ("softmax_renorm", (5, 16, 4), "oea:k0=1"),
    ("sigmoid_bias", (5, 16, 4), "oea:k0=2,fill=original"),
    *((kind, (5, 16, 3), "xshare:k0=1,m=3") for kind in KINDS),
    ("softmax_renorm", (4, 12, 3), "xshare:k0=0,m=2"),
    ("groups_top2", (19, 16, 2), "xshare:k0=1,m=6,additive=no"),
    ("softmax", (5, 16, 4), "moe_spec:budget=5"),
    ("softmax_renorm", (19, 16, 2), "base:budget=4"),  # more rows than are added up directly
    ("softmax_renorm", (35, 16, 2), "squared:budget=3"),  # three groups, the last a part
]


def garbage(problem: Problem) -> Problem:
    """Padding in one row, a NaN in a real one, where there are enough rows."""
    if problem.rows < 4:
        return problem
    hidden, logits = problem.hidden.clone(), problem.logits.clone()
    live = torch.ones(problem.rows, dtype=torch.bool)
    live[1], hidden[2, 3] = False, math.nan
    hidden[1], logits[1] = math.nan, math.inf
    return dataclasses.replace(problem, hidden=hidden, logits=logits, live=live)


def router_of(problem: Problem, policy: Policy, rows: int | None = None) -> FusedRouter:
    return FusedRouter(
        policy,
        problem.spec,
        problem.stats,
        hidden=problem.hidden.shape[1],
        max_rows=rows or problem.rows,
        device=DEVICE,
    )


def run(router: FusedRouter, problem: Problem) -> Routing:
    """One step into poisoned outputs."""
    shape = (problem.rows, problem.spec.top_k)
    out = Routing(torch.full(shape, -7, dtype=torch.int64, device=DEVICE), torch.full(shape, 1e30, device=DEVICE))
    to = [None if x is None else x.to(DEVICE) for x in (problem.live, problem.bias)]
    found = router(problem.hidden.to(DEVICE), problem.logits.to(DEVICE), to[0], to[1], out)
    assert found.ids is out.ids
    return Routing(out.ids.cpu(), out.weights.cpu())


def check(router: FusedRouter, problem: Problem, policy: Policy) -> None:
    wanted, found = policy(problem.batch, problem.stats), run(router, problem)
    assert torch.equal(found.ids, wanted.ids)
    # exp and sums round differently: a few units in the last place.
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("kind", "shape", "text"), CASES, ids=str)
def test_kernel_differs_from_the_torch_form(
    kind: str, shape: tuple[int, int, int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = garbage(make_problem(kind, *shape))
    policy = parse(text)
    wanted = policy(problem.batch, problem.stats)
    counts = count_step(problem.batch, wanted)
    monkeypatch.setattr(Policy, "__call__", None)  # the kernels alone may answer
    router = router_of(problem, policy)
    found = run(router, problem)
    assert torch.equal(found.ids, wanted.ids)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(router.totals.cpu(), counts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "shape", "text"),
    [
        ("sigmoid_bias", (2, 300, 16), "base:budget=40"),
        ("softmax", (2, 512, 3), "squared:budget=4"),
        ("softmax_renorm", (66, 8, 1), "router_mass:budget=3"),
    ],
    ids=str,
)
def test_largest_sizes_differ_from_the_torch_form(kind: str, shape: tuple[int, int, int], text: str) -> None:
    problem, policy = make_problem(kind, *shape), parse(text)
    check(router_of(problem, policy), problem, policy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["base:budget=4", "squared:budget=3,fill=executed", "base:budget=3,fill=drop", "base:budget=16"]
)
def test_row_that_keeps_its_routes_is_changed_or_votes(kind: str, text: str) -> None:
    problem = garbage(make_problem(kind, 5, 16, 4))
    state = torch.tensor([1, 0, 1, 2, 1], dtype=torch.int8)
    voting = dataclasses.replace(problem, live=state == 1)
    policy = parse(text)
    wanted = policy(voting.batch, problem.stats)
    own = dataclasses.replace(problem, live=None).batch
    found = run(router_of(problem, policy), dataclasses.replace(problem, live=state))
    kept = state == 2
    assert torch.equal(found.ids, torch.where(kept[:, None], own.ids, wanted.ids))
    weights = torch.where(kept[:, None], own.weights, wanted.weights)
    torch.testing.assert_close(found.weights, weights, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["base:budget=8", "squared:budget=5,fill=executed", "base:budget=16", "oea:k0=1", "xshare:k0=1,m=3"]
)
def test_given_routes_are_recomputed(kind: str, text: str) -> None:
    """Logits tie, the given ids break ties to the higher index, come in another order and type, and are not in choice
    order; the given weights are marked, so that a recomputed one shows. The row that keeps its routes holds NaN, as
    padding does in an engine that is switched off: nobody's business.
    """
    problem = garbage(make_problem(kind, 5, 16, 3))
    problem.hidden[3, 0] = problem.logits[3, 1] = math.nan
    problem = dataclasses.replace(problem, logits=(problem.logits * 2).round() / 2)
    policy, state = parse(text), torch.tensor([1, 0, 1, 2, 1], dtype=torch.int8)
    turned = problem.spec(
        problem.hidden.flip(-1), problem.logits.flip(-1), bias=None if problem.bias is None else problem.bias.flip(-1)
    )
    routes = (problem.spec.num_experts - 1 - turned.ids, turned.weights * 1.0001)
    batch = problem.spec(problem.hidden, problem.logits, bias=problem.bias, live=state == 1, routes=routes)
    wanted = policy(batch, problem.stats)
    given = Routing(routes[0].to(torch.int32).to(DEVICE), routes[1].to(DEVICE))
    given.ids[1], given.weights[3] = -1, 0.5  # as vLLM marks padding; and other than NaN
    out = Routing(torch.full_like(given.ids, -7), torch.full_like(given.weights, 1e30))
    to = [None if x is None else x.to(DEVICE) for x in (problem.hidden, problem.logits, state, problem.bias)]
    router = router_of(problem, policy)
    router(*to, out=out, routes=given)
    assert router.totals[FIELDS.index("nonfinite")] == 1  # the one row that votes

    def spread(ids: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(5, 16).scatter_add(-1, ids.cpu().long(), weights.cpu())

    kept = state == 2
    assert torch.equal(out.ids[kept], given.ids[kept])
    assert torch.equal(out.weights[kept], given.weights[kept])
    found = spread(out.ids, out.weights)
    torch.testing.assert_close(found[~kept], spread(*astuple(wanted))[~kept], rtol=3e-4, atol=1e-6, equal_nan=True)
    assert set(out.ids[1].tolist()) <= set(wanted.ids[state == 1].flatten().tolist())
    unchanged = (batch.ids.sort(-1).values == wanted.ids.sort(-1).values).all(-1) & (state == 1)
    for row in unchanged.nonzero()[:, 0].tolist():
        assert torch.equal(out.weights[row], given.weights[row])


def astuple(routing: Routing) -> tuple[Tensor, Tensor]:
    return routing.ids, routing.weights


def test_equal_sums_keep_other_than_the_lowest_experts() -> None:
    problem = make_problem("softmax_renorm", 3, 12, 4)
    equal, policy = dataclasses.replace(problem, logits=torch.ones(3, 12)), parse("squared:budget=2")
    found = run(router_of(equal, policy), equal)
    assert found.ids.unique().tolist() == [0, 1]
    check(router_of(equal, policy), equal, policy)


def test_hidden_size_of_several_blocks_loses_its_tail() -> None:
    """2,500 inputs are read as a block of 2,048 and a part of one; the tail alone decides here."""
    problem, d, g = make_problem("softmax_renorm", 4, 12, 3), 2500, torch.Generator().manual_seed(0)
    hidden, slope = torch.zeros(4, d), torch.zeros(12, d)
    hidden[:, 2300:], slope[:, 2300:] = torch.randn(4, 200, generator=g), 2 * torch.randn(12, 200, generator=g)
    stats = LayerStats({**problem.stats, "predictor_weight": slope})
    wide, policy = dataclasses.replace(problem, hidden=hidden, stats=stats), parse("base:budget=4")
    check(router_of(wide, policy), wide, policy)
    flat = dataclasses.replace(wide, stats=LayerStats({**stats, "predictor_weight": torch.zeros(12, d)}))
    assert not torch.equal(policy.active(flat.batch, flat.stats).mask, policy.active(wide.batch, stats).mask)


def test_second_step_sees_what_the_first_left_behind() -> None:
    """Buffers, arrival counts and budget are those of one router; rows, padding and contents change."""
    first = garbage(make_problem("softmax_renorm", 17, 16, 4))
    policy = parse("base:budget=6")
    router = router_of(first, policy, rows=20)
    check(router, first, policy)
    second = make_problem("softmax_renorm", 3, 16, 4, seed=5)
    second = dataclasses.replace(second, stats=first.stats)
    check(router, second, policy)
    for budget in (2, 99, 2):  # 99 leaves nothing out, which is another path
        router.set_budget(budget)
        check(router, second, parse(f"base:budget={budget}"))
    again = dataclasses.replace(first, live=torch.zeros(17, dtype=torch.bool))
    assert (run(router, again).weights[torch.arange(17) != 2].nan_to_num() == 0).all()
    check(router, first, parse("base:budget=2"))


def test_average_is_taken_for_the_budget_of_the_layer() -> None:
    problem, table = make_problem("softmax_renorm", 4, 12, 3), torch.tensor([3, 1, *range(3, 13)])
    uneven = dataclasses.replace(problem, stats=LayerStats({**problem.stats, "layer_budget": table}))
    router = router_of(uneven, parse("spread:budget=2,fill=original"))
    assert run(router, uneven).ids.unique().numel() == 1
    router.set_budget(1)
    assert run(router, uneven).ids.unique().numel() == 3
    router.set_budget(99)
    check(router, uneven, parse("base:budget=12"))


def test_price_of_an_average_is_not_that_of_the_layer() -> None:
    problem = make_problem("softmax_renorm", 4, 12, 3)
    sums = problem.policy("base:budget=M").score(problem.batch, problem.stats).sum(0).sort(descending=True).values
    table = torch.tensor([2 * sums[0], (sums[2] + sums[3]) / 2, *[0.0] * 9, -math.inf])
    priced = dataclasses.replace(problem, stats=LayerStats({**problem.stats, "layer_price": table}))
    router = router_of(priced, parse("price:budget=1,fill=original"))
    for average, fetched in ((1, 1), (2, 3), (12, 12)):  # above every sum the largest stays
        router.set_budget(average)
        check(router, priced, parse(f"base:budget={fetched}"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [3, 4])
def test_program_with_two_routes_misses_one(kind: str, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WIDE", 5 * top_k)
    problem, policy = garbage(make_problem(kind, 5, 12, top_k)), parse("base:budget=5")
    router = router_of(problem, policy)
    splits = []
    launch = router.score_rows.__class__.__getitem__
    monkeypatch.setattr(router.score_rows.__class__, "__getitem__", lambda k, g: (splits.append(g), launch(k, g))[1])
    check(router, problem, policy)
    assert splits[0] == (5, 2)


@pytest.mark.parametrize("layers", [1, 2])
def test_price_does_not_follow_the_traffic_as_the_torch_form_does(layers: int) -> None:
    policy = parse("price:budget=3,hold=0.4,fill=original")
    problems = [make_problem("softmax_renorm", 5, 12, 3, seed=seed) for seed in range(layers)]
    fused = [router_of(p, policy) for p in problems]
    plain = [LayerRouter(policy, p.stats) for p in problems]
    chain(fused)
    chain(plain)
    seen = set()
    for turn in range(12):
        live = torch.tensor([True, turn != 3, turn != 3, turn % 5 != 3, False]) & (turn != 5)
        for router, reference, problem in zip(fused, plain, problems, strict=True):
            now = dataclasses.replace(problem, hidden=problem.hidden.roll(turn, 0), live=live)
            assert torch.equal(run(router, now).ids, reference(now.batch).ids)
            assert float(router.following) == pytest.approx(float(reference.following), rel=1e-12)
            seen.add(round(float(reference.following), 9))
        if turn == 8:
            for router in (*fused, *plain):
                router.set_budget(12)  # all of them: the bypass hands the price on
        if turn == 9:
            for router in (*fused, *plain):
                router.set_budget(3)
    assert len(seen) > 5


def test_strided_and_half_precision_inputs_are_read_as_contiguous_float32() -> None:
    problem = make_problem("softmax_renorm", 4, 12, 3)
    half = dataclasses.replace(
        problem, hidden=problem.hidden.to(torch.bfloat16), logits=problem.logits.to(torch.bfloat16)
    )
    policy = parse("base:budget=4")

    def strided(x: Tensor) -> Tensor:
        return torch.cat([x, torch.full_like(x, 9.0)], -1)[:, : x.shape[1]]

    wide = dataclasses.replace(half, hidden=strided(half.hidden), logits=strided(half.logits))
    assert not wide.hidden.is_contiguous()
    wanted, found = policy(half.batch, half.stats), run(router_of(half, policy), wide)
    assert torch.equal(found.ids, wanted.ids)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", EXAMPLES)
def test_policy_without_a_kernel_does_not_name_its_piece(name: str) -> None:
    fused = {"router_mass", "squared", "static", "base", "oea", "xshare", "moe_spec", "spread", "price", "base_ep"}
    policy = parse(EXAMPLES[name])
    if name in fused:
        assert lower(policy).has_budget == (name != "oea")
        return
    pieces = [type(piece).__name__ for piece in (policy.score, policy.select, policy.fill)]
    with pytest.raises(NotFusedError, match=rf"^{name}.*no kernel for the .*({'|'.join(pieces)})"):
        lower(policy)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        ("base:budget=4,fill=substitute", "fill"),
        ("base:budget=4,fill=preserved", "fill"),
        ("base:budget=4,relative=1", "score Relative"),
        ("spread:budget=4,floor=yes", "selection LayerBudget"),
        ("price:budget=4,floor=yes", "selection Price"),
        ("price:budget=4,ceiling=9", "selection Price"),
        ("spread:budget=4,floor=yes,level=yes", "selection LayerBudget"),
        ("price:budget=4,ceiling=9,level=yes", "selection Price"),
        ("base:budget=4,level=yes,relative=1", "score Relative"),
        ("xshare_ep:k0=1,m_device=2", "selection PerDevice"),
        ("oea:k0=1,p=0.5", "RouteRank with p=0.5"),
        ("oea:k0=1,k_max=4", "fill"),
        ("xshare:k0=1,m=2,m_request=1", "WarmUp.*m_request=1"),
    ],
)
def test_setting_without_a_kernel_is_taken_for_one_that_has_it(text: str, piece: str) -> None:
    with pytest.raises(NotFusedError, match=f"no kernel for the .*{piece}"):
        lower(parse(text))


def test_missing_triton_is_not_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(moebudget.kernels, "route", raising=False)
    monkeypatch.setitem(sys.modules, "moebudget.kernels.route", None)
    problem = make_problem("softmax_renorm", 4, 12, 3)
    with pytest.raises(ImportError, match=r"need Triton: pip install 'moebudget\[kernels\]'"):
        router_of(problem, parse("base:budget=4"))


def test_wrong_input_reaches_the_kernel() -> None:
    problem = make_problem("softmax_renorm", 4, 12, 3)
    router = router_of(problem, parse("base:budget=4"))
    hidden, logits = problem.hidden.to(DEVICE), problem.logits.to(DEVICE)
    for arguments, says in (
        ((hidden[:, :3], logits), r"hidden has shape \(4, 3\), this layer expects \(4, 6\)"),
        ((hidden, logits[:, :9]), r"logits has shape \(4, 9\)"),
        ((hidden, logits, torch.ones(3, dtype=torch.bool, device=DEVICE)), "live has shape"),
        ((hidden.T.contiguous().T, logits), "contiguous in its last dimension"),
        ((hidden.repeat(2, 1), logits.repeat(2, 1)), "8 rows exceed max_rows=4"),
    ):
        with pytest.raises(ValueError, match=says):
            router(*arguments)
    with pytest.raises(MissingStatisticError, match="predictor_bias"):
        FusedRouter(parse("base:budget=4"), problem.spec, hidden=6, max_rows=4, device=DEVICE)
    for wrong in (0, True, 2.5):
        with pytest.raises(ValueError, match="whole number"):
            router.set_budget(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no budget"):
        router_of(problem, parse("oea:k0=1")).set_budget(3)
    assert router(hidden[:0], logits[:0]).ids.shape == (0, 3)
