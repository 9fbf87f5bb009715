"""Budgets per device and leveled devices: the kernels against the torch form and sets."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from moebudget.core.layer_router import LayerRouter, chain
from moebudget.core.ops import demand, native_union
from moebudget.core.policy import Policy
from moebudget.core.types import LayerStats, Routing, RowKind
from moebudget.kernels import NotFusedError, lower
from moebudget.methods.base import DeviceBudget, SquaredWeight
from moebudget.methods.common import GateMass, RouteRank, TopBudget, Voted
from moebudget.methods.devices import Level
from moebudget.methods.fills import Backfill
from moebudget.methods.registry import parse
from tests.conftest import KINDS, Problem, make_problem
from tests.kernels.test_route import DEVICE, garbage, router_of, run

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

BY_DEVICE, ONE_LEVEL = "base_ep:budget=M", "base:budget=M,level=yes"
LEVELED = (ONE_LEVEL, "spread:budget=M,level=yes", "price:budget=M,level=yes,fill=executed")


def home_of(n: int, devices: int, where: str) -> Tensor:
    """[N]: equal blocks of neighbours, or the same shuffled."""
    home = torch.arange(n) * devices // n
    return home if where == "blocks" else home[torch.randperm(n, generator=torch.Generator().manual_seed(n))]


def placed(problem: Problem, home: Tensor) -> Problem:
    """The problem on these devices, with prices between the sums of the step, and a budget above the average."""
    n = len(home)
    falling = demand(SquaredWeight()(problem.batch, problem.stats), problem.batch)[0].sort(descending=True).values
    prices = torch.cat([(falling[1:] + falling[:-1]) / 2, torch.tensor([-math.inf])])
    uneven = torch.tensor([min(n, 1 + 2 * i) for i in range(n)])
    extra = {"placement_device": home, "layer_price": prices, "layer_budget": uneven}
    return dataclasses.replace(problem, stats=LayerStats({**problem.stats, **extra}))


def squared(text: str) -> Policy:
    """The policy with squared weights instead of predicted energies, which are slow in the interpreter."""
    return dataclasses.replace(parse(text), score=SquaredWeight())


def assert_rows_agree(routing: Routing, expected: Routing, where: str, rows: Tensor) -> None:
    assert torch.equal(routing.ids.cpu().long()[rows], expected.ids[rows]), where
    weights = routing.weights.cpu()[rows]
    torch.testing.assert_close(weights, expected.weights[rows], rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("text", "kind", "shape", "devices", "where", "budgets", "score"),
    [
        (BY_DEVICE, "softmax_renorm", (5, 8, 3), 2, "blocks", (1, 3, 8), "squared"),
        (BY_DEVICE, "sigmoid_bias", (5, 64, 4), 4, "shuffled", (1,), "predicted"),
        (BY_DEVICE, "groups_top2", (5, 64, 8), 3, "blocks", (1, 3), "squared"),
        (BY_DEVICE, "softmax", (17, 24, 3), 3, "shuffled", (3,), "squared"),  # added up in chunks
        (ONE_LEVEL, "groups_max", (5, 8, 3), 3, "shuffled", (1, 3, 8), "squared"),
        (ONE_LEVEL, "softmax_renorm", (5, 60, 8), 4, "shuffled", (1, 3), "squared"),
        (LEVELED[1], "sigmoid_bias", (5, 60, 6), 2, "blocks", (2,), "squared"),
        (LEVELED[2], "softmax", (5, 64, 8), 4, "shuffled", (3,), "squared"),
        (LEVELED[2], "groups_top2", (5, 8, 3), 2, "blocks", (1, 8), "squared"),
    ],
    ids=str,
)
def test_device_kernel_agrees_with_the_torch_form(
    text: str,
    kind: str,
    shape: tuple[int, int, int],
    devices: int,
    where: str,
    budgets: tuple[int, ...],
    score: str,
) -> None:
    """PAD, BROKEN and NATIVE rows beside DECODE rows; with the native routes as an argument and without."""
    problem = placed(garbage(make_problem(kind, *shape)), home_of(shape[1], devices, where))
    kinds = torch.full((shape[0],), RowKind.DECODE, dtype=torch.int8)
    kinds[1], kinds[3] = RowKind.PAD, RowKind.NATIVE
    voting, kept = kinds == RowKind.DECODE, kinds == RowKind.NATIVE
    native = dataclasses.replace(problem, kind=None).batch
    batch = dataclasses.replace(problem, kind=voting).batch
    text = text.replace("M", "2")
    policy = squared(text) if score == "squared" else parse(text)
    router, torch_router = router_of(problem, policy), LayerRouter(policy, problem.stats)
    for budget in budgets:
        router.set_budget(budget)
        torch_router.set_budget(budget)
        expected, routing = torch_router(batch), run(router, dataclasses.replace(problem, kind=kinds))
        assert_rows_agree(routing, expected, f"budget {budget}", ~kept)
        assert_rows_agree(routing, Routing(native.ids, native.weights), f"budget {budget}", kept)
        torch.testing.assert_close(router.totals.cpu(), torch_router.totals, rtol=1e-5, atol=1e-6)
    if len(budgets) == 2:
        routes = Routing(native.ids.int().to(DEVICE), native.weights.to(DEVICE))
        routes.ids[1] = -1
        inputs = [None if x is None else x.to(DEVICE) for x in (problem.hidden, problem.logits, kinds, problem.bias)]
        routing = router(*inputs, routes=routes)
        assert_rows_agree(routing, expected, "routes as an argument", voting)
        assert torch.equal(routing.weights.cpu()[kept], native.weights[kept])


def active_by_device(policy: Policy, problem: Problem) -> list[set[int]]:
    """The active set of the policy, per device."""
    home, mask = problem.stats["placement_device"].tolist(), policy.active(problem.batch, problem.stats).mask.tolist()
    return [{u for u, on in enumerate(mask) if on and home[u] == d} for d in range(max(home) + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_leveled_set_is_the_best_of_every_device_up_to_the_fullest(kind: str) -> None:
    """The set that the kernel computes for `Level`, by loops over sorted lists."""
    added = 0
    for seed, (n, devices) in enumerate([(8, 2), (64, 4), (60, 3), (64, 7)]):
        problem = placed(make_problem(kind, 6, n, 2, seed=seed), home_of(n, devices, "shuffled"))
        for text in LEVELED:
            for budget in (1, 2, 5, n):
                policy = parse(text.replace("M", str(budget)))
                total = demand(policy.score(problem.batch, problem.stats), problem.batch)[0].tolist()
                routed = native_union(problem.batch).tolist()
                assert isinstance(policy.select, Level)
                must = dataclasses.replace(policy, select=policy.select.must)
                most = max(map(len, active_by_device(must, problem)))
                expected = []
                for d, home in enumerate([problem.stats["placement_device"].tolist()] * devices):
                    falling = sorted((-total[u], u) for u in range(n) if routed[u] and home[u] == d)
                    expected.append({u for _, u in falling[:most]})
                assert active_by_device(policy, problem) == expected, f"{text} {budget} of {n} on {devices}"
                added += sum(map(len, expected)) - sum(map(len, active_by_device(must, problem)))
    assert added > 50


@pytest.mark.parametrize("text", [BY_DEVICE, ONE_LEVEL])
def test_device_without_a_routed_expert_fetches_none(text: str) -> None:
    """The first of three devices holds the experts that no row routes to; in the second step no row votes."""
    problem = make_problem("softmax_renorm", 3, 12, 3)
    idle = (~native_union(problem.batch)).nonzero()[:, 0]
    home = 1 + torch.arange(12) % 2
    home[idle] = 0
    assert len(idle) > 2
    problem, policy = placed(problem, home), squared(text.replace("M", "2"))
    router, torch_router = router_of(problem, policy), LayerRouter(policy, problem.stats)
    for decode in (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)):
        step = dataclasses.replace(problem, kind=decode)
        expected, routing = torch_router(step.batch), run(router, step)
        assert_rows_agree(routing, expected, text, decode)
        assert torch.equal(routing.weights != 0, expected.weights != 0)
        assert not set(routing.ids[decode].flatten().tolist()) & set(idle.tolist())
    torch.testing.assert_close(router.totals.cpu(), torch_router.totals, rtol=1e-5, atol=1e-6)


def test_equal_sums_on_a_device_keep_the_lowest_experts() -> None:
    problem = dataclasses.replace(make_problem("softmax_renorm", 3, 12, 8), logits=torch.ones(3, 12))
    problem = placed(problem, home_of(12, 3, "blocks"))
    assert run(router_of(problem, squared("base_ep:budget=2")), problem).ids.unique().tolist() == [0, 1, 4, 5]


def test_leveled_price_counts_the_experts_that_leveling_adds() -> None:
    """`hold` includes the experts that leveling adds, layer after layer."""
    leveled, bare = squared("price:budget=3,hold=0.4,level=yes"), squared("price:budget=3,hold=0.4")
    problems = [placed(make_problem("softmax_renorm", 3, 12, 3, seed=i), home_of(12, 3, "shuffled")) for i in range(2)]
    kernels = [router_of(p, leveled) for p in problems]
    references = [LayerRouter(leveled, p.stats) for p in problems]
    bare_routers = [LayerRouter(bare, p.stats) for p in problems]
    for routers in (kernels, references, bare_routers):
        chain(routers)
    differs = []
    for turn in range(3):
        for router, reference, bare_router, problem in zip(kernels, references, bare_routers, problems, strict=True):
            now = dataclasses.replace(problem, logits=problem.logits.roll(turn, 1))
            assert torch.equal(run(router, now).ids, reference(now.batch).ids)
            bare_router(now.batch)
            assert float(router.following) == pytest.approx(float(reference.following), rel=1e-12)
            differs.append(float(router.following) != float(bare_router.following))
    assert sum(differs) > 3


def test_one_device_holds_the_whole_layer() -> None:
    problem = placed(make_problem("softmax_renorm", 4, 12, 3), torch.zeros(12, dtype=torch.int64))
    expected = run(router_of(problem, parse("squared:budget=4")), problem)
    for text in ("base_ep:budget=4", "base:budget=4,level=yes"):
        router = router_of(problem, squared(text))
        assert router.selection.RANKS == 1
        assert torch.equal(run(router, problem).ids, expected.ids)


def test_device_selections_without_a_kernel_are_refused() -> None:
    for score, select in (
        (GateMass(), DeviceBudget(2)),
        (GateMass(), Level(TopBudget(2))),
        (RouteRank(1), Level(Voted())),
        (RouteRank(1), Level(DeviceBudget(2))),
    ):
        with pytest.raises(NotFusedError, match=rf"no kernel for the selection {type(select).__name__}\("):
            lower(Policy(score, select, Backfill()))
    problem = make_problem("softmax_renorm", 2, 80, 2)
    router_of(placed(problem, torch.arange(80).clamp(max=63)), parse("base_ep:budget=1"))
    with pytest.raises(NotFusedError, match=r"selection DeviceBudget\(budget=1\) over 65 devices"):
        router_of(placed(problem, torch.arange(80).clamp(max=64)), parse("base_ep:budget=1"))
