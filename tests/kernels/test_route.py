"""The fused kernels against the torch form: on a GPU, or on the CPU through Triton's interpreter."""

from __future__ import annotations

import dataclasses
import math
import sys

import pytest
import torch
from torch import Tensor

import moebudget.kernels
from moebudget.core.counters import Counter, count_step
from moebudget.core.layer_router import LayerRouter, chain
from moebudget.core.policy import Policy
from moebudget.core.types import LayerStats, MissingStatisticError, Routing, RowKind
from moebudget.kernels import FusedRouter, NotFusedError, fused, lower
from moebudget.methods.registry import METHODS, parse
from tests.conftest import KINDS, Problem, make_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter computes in numpy, which warns about the garbage in padding rows.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

MIXED = torch.tensor([RowKind.DECODE, RowKind.PAD, RowKind.DECODE, RowKind.NATIVE, RowKind.DECODE], dtype=torch.int8)
CASES = [
    *((kind, (4, 12, 3), "base:budget=5") for kind in KINDS),
    *((kind, (4, 12, 3), "squared:budget=4,fill=executed") for kind in KINDS),
    *((kind, (4, 12, 3), "base:budget=4,fill=geometric") for kind in KINDS),
    ("softmax_renorm", (5, 12, 3), "spread:budget=4"),
    ("sigmoid_bias", (5, 12, 3), "spread:budget=11,fill=native"),
    *((kind, (5, 12, 3), "price:budget=3") for kind in KINDS),
    ("softmax_renorm", (19, 16, 2), "price:budget=6,fill=native"),
    ("softmax", (4, 12, 3), "price:budget=12"),  # the price is below every sum
    ("softmax_renorm", (1, 8, 2), "base:budget=1"),
    ("softmax_renorm", (5, 60, 8), "base:budget=10,fill=drop"),
    ("softmax", (5, 60, 4), "static:budget=6"),
    ("sigmoid_bias", (4, 12, 1), "router_mass:budget=2"),
    *((kind, (4, 12, 2), "base:budget=100") for kind in KINDS),
    ("softmax_renorm", (35, 16, 2), "squared:budget=16"),
    ("groups_max", (4, 12, 4), "base:budget=2,fill=drop"),
    ("softmax_renorm", (5, 16, 4), "oea:k0=1"),
    ("sigmoid_bias", (5, 16, 4), "oea:k0=2,fill=native"),
    *((kind, (5, 16, 3), "xshare:k0=1,m=3") for kind in KINDS),
    ("softmax_renorm", (4, 12, 3), "xshare:k0=0,m=2"),
    ("groups_top2", (19, 16, 2), "xshare:k0=1,m=6,additive=no"),
    ("softmax", (5, 16, 4), "moe_spec:budget=5"),
    ("softmax_renorm", (19, 16, 2), "base:budget=4"),  # more rows than one program adds up
    ("softmax_renorm", (35, 16, 2), "squared:budget=3"),  # three chunks, the last one partial
]


def garbage(problem: Problem) -> Problem:
    """The problem with a PAD row and a NaN in a DECODE row, if there are enough rows."""
    if problem.rows < 4:
        return problem
    hidden, logits = problem.hidden.clone(), problem.logits.clone()
    decode = torch.ones(problem.rows, dtype=torch.bool)
    decode[1], hidden[2, 3] = False, math.nan
    hidden[1], logits[1] = math.nan, math.inf
    return dataclasses.replace(problem, hidden=hidden, logits=logits, kind=decode)


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
    kind, bias = (None if x is None else x.to(DEVICE) for x in (problem.kind, problem.bias))
    routing = router(problem.hidden.to(DEVICE), problem.logits.to(DEVICE), kind, bias, out)
    assert routing.ids is out.ids
    return Routing(out.ids.cpu(), out.weights.cpu())


def check(router: FusedRouter, problem: Problem, policy: Policy) -> None:
    expected, routing = policy(problem.batch, problem.stats), run(router, problem)
    assert torch.equal(routing.ids, expected.ids)
    # exp and sums round differently: a few units in the last place.
    torch.testing.assert_close(routing.weights, expected.weights, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("kind", "shape", "text"), CASES, ids=str)
def test_kernel_agrees_with_the_torch_form(
    kind: str, shape: tuple[int, int, int], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = garbage(make_problem(kind, *shape))
    policy = parse(text)
    expected = policy(problem.batch, problem.stats)
    counts = count_step(problem.batch, expected)
    monkeypatch.setattr(Policy, "__call__", None)  # only the kernels can compute the result
    router = router_of(problem, policy)
    routing = run(router, problem)
    assert torch.equal(routing.ids, expected.ids)
    torch.testing.assert_close(routing.weights, expected.weights, rtol=1e-5, atol=1e-6, equal_nan=True)
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
def test_largest_sizes_agree_with_the_torch_form(kind: str, shape: tuple[int, int, int], text: str) -> None:
    problem, policy = make_problem(kind, *shape), parse(text)
    check(router_of(problem, policy), problem, policy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["base:budget=4", "squared:budget=3,fill=executed", "base:budget=3,fill=drop", "base:budget=16"]
)
def test_native_rows_keep_their_routes_and_do_not_vote(kind: str, text: str) -> None:
    problem = garbage(make_problem(kind, 5, 16, 4))
    voting = dataclasses.replace(problem, kind=MIXED == RowKind.DECODE)
    policy = parse(text)
    expected = policy(voting.batch, problem.stats)
    native = dataclasses.replace(problem, kind=None).batch
    routing = run(router_of(problem, policy), dataclasses.replace(problem, kind=MIXED))
    kept = MIXED == RowKind.NATIVE
    assert torch.equal(routing.ids, torch.where(kept[:, None], native.ids, expected.ids))
    weights = torch.where(kept[:, None], native.weights, expected.weights)
    torch.testing.assert_close(routing.weights, weights, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["base:budget=8", "squared:budget=5,fill=executed", "base:budget=16", "oea:k0=1", "xshare:k0=1,m=3"]
)
def test_routes_of_the_model_are_used_as_they_are(kind: str, text: str) -> None:
    """Logits tie; the model's ids break ties to the higher index, have another type and are not in choice order. Its
    weights are scaled, so that recomputed ones would show. The NATIVE row holds NaN, as padding does in an engine
    whose plugin is switched off; it is not counted.
    """
    problem = garbage(make_problem(kind, 5, 16, 3))
    problem.hidden[3, 0] = problem.logits[3, 1] = math.nan
    problem = dataclasses.replace(problem, logits=(problem.logits * 2).round() / 2)
    policy, decode = parse(text), MIXED == RowKind.DECODE
    turned = problem.spec(
        problem.hidden.flip(-1), problem.logits.flip(-1), bias=None if problem.bias is None else problem.bias.flip(-1)
    )
    routes = (problem.spec.num_experts - 1 - turned.ids, turned.weights * 1.0001)
    batch = problem.spec(problem.hidden, problem.logits, bias=problem.bias, kind=decode, routes=routes)
    expected = policy(batch, problem.stats)
    native = Routing(routes[0].to(torch.int32).to(DEVICE), routes[1].to(DEVICE))
    native.ids[1], native.weights[3] = -1, 0.5  # vLLM marks padding with -1; the weight is not NaN
    out = Routing(torch.full_like(native.ids, -7), torch.full_like(native.weights, 1e30))
    inputs = [None if x is None else x.to(DEVICE) for x in (problem.hidden, problem.logits, MIXED, problem.bias)]
    router = router_of(problem, policy)
    router(*inputs, out=out, routes=native)
    assert router.totals[Counter.NONFINITE] == 1  # the DECODE row

    def spread(ids: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(5, 16).scatter_add(-1, ids.cpu().long(), weights.cpu())

    kept = MIXED == RowKind.NATIVE
    assert torch.equal(out.ids[kept], native.ids[kept])
    assert torch.equal(out.weights[kept], native.weights[kept])
    weights, expected_weights = spread(out.ids, out.weights), spread(expected.ids, expected.weights)
    torch.testing.assert_close(weights[~kept], expected_weights[~kept], rtol=3e-4, atol=1e-6, equal_nan=True)
    assert set(out.ids[1].tolist()) <= set(expected.ids[decode].flatten().tolist())
    complete = (batch.ids.sort(-1).values == expected.ids.sort(-1).values).all(-1) & decode
    for row in complete.nonzero()[:, 0].tolist():
        assert torch.equal(out.weights[row], native.weights[row])


def test_equal_sums_keep_the_lowest_experts() -> None:
    problem = make_problem("softmax_renorm", 3, 12, 4)
    equal, policy = dataclasses.replace(problem, logits=torch.ones(3, 12)), parse("squared:budget=2")
    routing = run(router_of(equal, policy), equal)
    assert routing.ids.unique().tolist() == [0, 1]
    check(router_of(equal, policy), equal, policy)


def test_hidden_size_of_several_blocks_is_read_to_its_end() -> None:
    """2,500 inputs are read as a full block of 2,048 and a partial one; here only the tail decides."""
    problem, d, g = make_problem("softmax_renorm", 4, 12, 3), 2500, torch.Generator().manual_seed(0)
    hidden, slope = torch.zeros(4, d), torch.zeros(12, d)
    hidden[:, 2300:], slope[:, 2300:] = torch.randn(4, 200, generator=g), 2 * torch.randn(12, 200, generator=g)
    stats = LayerStats({**problem.stats, "predictor_weight": slope})
    wide, policy = dataclasses.replace(problem, hidden=hidden, stats=stats), parse("base:budget=4")
    check(router_of(wide, policy), wide, policy)
    flat = dataclasses.replace(wide, stats=LayerStats({**stats, "predictor_weight": torch.zeros(12, d)}))
    assert not torch.equal(policy.active(flat.batch, flat.stats).mask, policy.active(wide.batch, stats).mask)


def test_steps_do_not_depend_on_the_steps_before() -> None:
    """One router keeps its buffers, arrival counts and budget; rows, padding and contents change."""
    first = garbage(make_problem("softmax_renorm", 17, 16, 4))
    policy = parse("base:budget=6")
    router = router_of(first, policy, rows=20)
    check(router, first, policy)
    second = make_problem("softmax_renorm", 3, 16, 4, seed=5)
    second = dataclasses.replace(second, stats=first.stats)
    check(router, second, policy)
    for budget in (2, 99, 2):  # 99 leaves nothing out, which takes the bypass
        router.set_budget(budget)
        check(router, second, parse(f"base:budget={budget}"))
    again = dataclasses.replace(first, kind=torch.zeros(17, dtype=torch.bool))
    assert (run(router, again).weights[torch.arange(17) != 2].nan_to_num() == 0).all()
    check(router, first, parse("base:budget=2"))


def test_average_budget_becomes_the_budget_of_the_layer() -> None:
    problem, table = make_problem("softmax_renorm", 4, 12, 3), torch.tensor([3, 1, *range(3, 13)])
    uneven = dataclasses.replace(problem, stats=LayerStats({**problem.stats, "layer_budget": table}))
    router = router_of(uneven, parse("spread:budget=2,fill=native"))
    assert run(router, uneven).ids.unique().numel() == 1
    router.set_budget(1)
    assert run(router, uneven).ids.unique().numel() == 3
    router.set_budget(99)
    check(router, uneven, parse("base:budget=12"))


def test_average_budget_becomes_the_price_of_the_layer() -> None:
    problem = make_problem("softmax_renorm", 4, 12, 3)
    sums = problem.policy("base:budget=M").score(problem.batch, problem.stats).sum(0).sort(descending=True).values
    table = torch.tensor([2 * sums[0], (sums[2] + sums[3]) / 2, *[0.0] * 9, -math.inf])
    priced = dataclasses.replace(problem, stats=LayerStats({**problem.stats, "layer_price": table}))
    router = router_of(priced, parse("price:budget=1,fill=native"))
    for average, fetched in ((1, 1), (2, 3), (12, 12)):  # a price above every sum leaves the largest
        router.set_budget(average)
        check(router, priced, parse(f"base:budget={fetched}"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("top_k", [3, 4])
def test_program_with_two_routes_predicts_both(kind: str, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "WIDE", 5 * top_k)
    problem, policy = garbage(make_problem(kind, 5, 12, top_k)), parse("base:budget=5")
    router = router_of(problem, policy)
    splits = []
    launch = router.score_rows.__class__.__getitem__
    monkeypatch.setattr(router.score_rows.__class__, "__getitem__", lambda k, g: (splits.append(g), launch(k, g))[1])
    check(router, problem, policy)
    assert splits[0] == (5, 2)


@pytest.mark.parametrize("layers", [1, 2])
def test_price_follows_the_traffic_as_the_torch_form_does(layers: int) -> None:
    policy = parse("price:budget=3,hold=0.4,fill=native")
    problems = [make_problem("softmax_renorm", 5, 12, 3, seed=seed) for seed in range(layers)]
    kernels = [router_of(p, policy) for p in problems]
    references = [LayerRouter(policy, p.stats) for p in problems]
    chain(kernels)
    chain(references)
    factors = set()
    for turn in range(12):
        decode = torch.tensor([True, turn != 3, turn != 3, turn % 5 != 3, False]) & (turn != 5)
        for router, reference, problem in zip(kernels, references, problems, strict=True):
            now = dataclasses.replace(problem, hidden=problem.hidden.roll(turn, 0), kind=decode)
            assert torch.equal(run(router, now).ids, reference(now.batch).ids)
            assert float(router.following) == pytest.approx(float(reference.following), rel=1e-12)
            factors.add(round(float(reference.following), 9))
        if turn == 8:
            for router in (*kernels, *references):
                router.set_budget(12)  # all experts: the bypass passes the price on
        if turn == 9:
            for router in (*kernels, *references):
                router.set_budget(3)
    assert len(factors) > 5


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
    expected, routing = policy(half.batch, half.stats), run(router_of(half, policy), wide)
    assert torch.equal(routing.ids, expected.ids)
    torch.testing.assert_close(routing.weights, expected.weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_policies_without_a_kernel_name_the_part_that_lacks_it(name: str) -> None:
    fused = {"router_mass", "squared", "static", "base", "oea", "xshare", "moe_spec", "spread", "price", "base_ep"}
    policy = parse(METHODS[name].example)
    if name in fused:
        assert lower(policy).has_budget == (name != "oea")
        return
    parts = [type(part).__name__ for part in (policy.score, policy.select, policy.fill)]
    with pytest.raises(NotFusedError, match=rf"^{name}.*no kernel for the .*({'|'.join(parts)})"):
        lower(policy)


@pytest.mark.parametrize(
    ("text", "part"),
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
def test_settings_without_a_kernel_are_refused(text: str, part: str) -> None:
    with pytest.raises(NotFusedError, match=f"no kernel for the .*{part}"):
        lower(parse(text))


def test_missing_triton_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(moebudget.kernels, "route", raising=False)
    monkeypatch.setitem(sys.modules, "moebudget.kernels.route", None)
    problem = make_problem("softmax_renorm", 4, 12, 3)
    with pytest.raises(ImportError, match=r"need Triton: pip install 'moebudget\[kernels\]'"):
        router_of(problem, parse("base:budget=4"))


def test_wrong_inputs_are_refused() -> None:
    problem = make_problem("softmax_renorm", 4, 12, 3)
    router = router_of(problem, parse("base:budget=4"))
    hidden, logits = problem.hidden.to(DEVICE), problem.logits.to(DEVICE)
    for arguments, message in (
        ((hidden[:, :3], logits), r"hidden has shape \(4, 3\), but this layer expects \(4, 6\)"),
        ((hidden, logits[:, :9]), r"logits has shape \(4, 9\)"),
        ((hidden, logits, torch.ones(3, dtype=torch.bool, device=DEVICE)), "kind has shape"),
        ((hidden.T.contiguous().T, logits), "contiguous in its last dimension"),
        ((hidden.repeat(2, 1), logits.repeat(2, 1)), "8 rows exceed max_rows=4"),
    ):
        with pytest.raises(ValueError, match=message):
            router(*arguments)
    with pytest.raises(MissingStatisticError, match="predictor_bias"):
        FusedRouter(parse("base:budget=4"), problem.spec, hidden=6, max_rows=4, device=DEVICE)
    for wrong in (0, True, 2.5):
        with pytest.raises(ValueError, match="whole number"):
            router.set_budget(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no budget"):
        router_of(problem, parse("oea:k0=1")).set_budget(3)
    assert router(hidden[:0], logits[:0]).ids.shape == (0, 3)
