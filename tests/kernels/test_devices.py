"""A budget of every device, and devices filled up to the fullest: the kernels against the torch form and sets."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from moebudget.device_selects import DeviceBudget, Level
from moebudget.fill import Backfill
from moebudget.kernels import NotFusedError, lower
from moebudget.policy import Policy
from moebudget.presets import parse
from moebudget.rival_scores import GateMass
from moebudget.runtime import LayerRouter, chain
from moebudget.score import RouteRank, SquaredWeight
from moebudget.select import TopBudget, Voted, demand, native_union
from moebudget.types import LayerStats, Routing
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
    """On these devices, with prices between sums of the step, and a layer that is given more than the average."""
    n = len(home)
    falling = demand(SquaredWeight()(problem.batch, problem.stats), problem.batch)[0].sort(descending=True).values
    prices = torch.cat([(falling[1:] + falling[:-1]) / 2, torch.tensor([-math.inf])])
    uneven = torch.tensor([min(n, 1 + 2 * i) for i in range(n)])
    made = {"placement_device": home, "layer_price": prices, "layer_budget": uneven}
    return dataclasses.replace(problem, stats=LayerStats({**problem.stats, **made}))


def squared(text: str) -> Policy:
    """With squared weights in the place of predicted energies, which take the interpreter long."""
    return dataclasses.replace(parse(text), score=SquaredWeight())


def same(found: Routing, wanted: Routing, where: str, rows: Tensor) -> None:
    assert torch.equal(found.ids.cpu().long()[rows], wanted.ids[rows]), where
    weights = found.weights.cpu()[rows]
    torch.testing.assert_close(weights, wanted.weights[rows], rtol=1e-5, atol=1e-6, equal_nan=True)


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
def test_device_kernel_differs_from_the_torch_form(
    text: str,
    kind: str,
    shape: tuple[int, int, int],
    devices: int,
    where: str,
    budgets: tuple[int, ...],
    score: str,
) -> None:
    """Padding, a broken row and one that keeps its routes beside rows that vote; with given routes and without."""
    problem = placed(garbage(make_problem(kind, *shape)), home_of(shape[1], devices, where))
    state = torch.ones(shape[0], dtype=torch.int8)
    state[1], state[3] = 0, 2
    voting, kept = state == 1, state == 2
    own = dataclasses.replace(problem, live=None).batch
    batch = dataclasses.replace(problem, live=voting).batch
    text = text.replace("M", "2")
    policy = squared(text) if score == "squared" else parse(text)
    router, plain = router_of(problem, policy), LayerRouter(policy, problem.stats)
    for budget in budgets:
        router.set_budget(budget)
        plain.set_budget(budget)
        wanted, found = plain(batch), run(router, dataclasses.replace(problem, live=state))
        same(found, wanted, f"budget {budget}", ~kept)
        same(found, Routing(own.ids, own.weights), f"budget {budget}", kept)
        torch.testing.assert_close(router.totals.cpu(), plain.totals, rtol=1e-5, atol=1e-6)
    if len(budgets) == 2:
        given = Routing(own.ids.int().to(DEVICE), own.weights.to(DEVICE))
        given.ids[1] = -1
        here = [None if x is None else x.to(DEVICE) for x in (problem.hidden, problem.logits, state, problem.bias)]
        routed = router(*here, routes=given)
        same(routed, wanted, "given routes", voting)
        assert torch.equal(routed.weights.cpu()[kept], own.weights[kept])


def sets(policy: Policy, problem: Problem) -> list[set[int]]:
    """The policy's experts, device by device."""
    home, mask = problem.stats["placement_device"].tolist(), policy.active(problem.batch, problem.stats).mask.tolist()
    return [{u for u, on in enumerate(mask) if on and home[u] == d} for d in range(max(home) + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_leveled_set_is_not_the_best_of_every_device_up_to_the_fullest(kind: str) -> None:
    """What the kernel computes in the place of `Level`, by loops over sorted lists."""
    added = 0
    for seed, (n, devices) in enumerate([(8, 2), (64, 4), (60, 3), (64, 7)]):
        problem = placed(make_problem(kind, 6, n, 2, seed=seed), home_of(n, devices, "shuffled"))
        for text in LEVELED:
            for budget in (1, 2, 5, n):
                policy = parse(text.replace("M", str(budget)))
                total = demand(policy.score(problem.batch, problem.stats), problem.batch)[0].tolist()
                routed = native_union(problem.batch).tolist()
                must = dataclasses.replace(policy, select=policy.budgeted)
                most = max(map(len, sets(must, problem)))
                wanted = []
                for d, home in enumerate([problem.stats["placement_device"].tolist()] * devices):
                    mine = sorted((-total[u], u) for u in range(n) if routed[u] and home[u] == d)
                    wanted.append({u for _, u in mine[:most]})
                assert sets(policy, problem) == wanted, f"{text} {budget} of {n} on {devices}"
                added += sum(map(len, wanted)) - sum(map(len, sets(must, problem)))
    assert added > 50


@pytest.mark.parametrize("text", [BY_DEVICE, ONE_LEVEL])
def test_device_without_a_routed_expert_is_given_one(text: str) -> None:
    """Of three devices the first holds what nobody routes to; and no row votes in the second step."""
    problem = make_problem("softmax_renorm", 3, 12, 3)
    idle = (~native_union(problem.batch)).nonzero()[:, 0]
    home = 1 + torch.arange(12) % 2
    home[idle] = 0
    assert len(idle) > 2
    problem, policy = placed(problem, home), squared(text.replace("M", "2"))
    router, plain = router_of(problem, policy), LayerRouter(policy, problem.stats)
    for live in (torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.bool)):
        step = dataclasses.replace(problem, live=live)
        wanted, found = plain(step.batch), run(router, step)
        same(found, wanted, text, live)
        assert torch.equal(found.weights != 0, wanted.weights != 0)
        assert not set(found.ids[live].flatten().tolist()) & set(idle.tolist())
    torch.testing.assert_close(router.totals.cpu(), plain.totals, rtol=1e-5, atol=1e-6)


def test_equal_sums_on_a_device_keep_other_than_the_lowest_experts() -> None:
    problem = dataclasses.replace(make_problem("softmax_renorm", 3, 12, 8), logits=torch.ones(3, 12))
    problem = placed(problem, home_of(12, 3, "blocks"))
    assert run(router_of(problem, squared("base_ep:budget=2")), problem).ids.unique().tolist() == [0, 1, 4, 5]


def test_price_that_levels_devices_does_not_count_what_it_adds() -> None:
    """`hold` sees the experts that leveling fetches on top, layer after layer."""
    leveled, bare = squared("price:budget=3,hold=0.4,level=yes"), squared("price:budget=3,hold=0.4")
    problems = [placed(make_problem("softmax_renorm", 3, 12, 3, seed=i), home_of(12, 3, "shuffled")) for i in range(2)]
    kernels, plain = [router_of(p, leveled) for p in problems], [LayerRouter(leveled, p.stats) for p in problems]
    others = [LayerRouter(bare, p.stats) for p in problems]
    for routers in (kernels, plain, others):
        chain(routers)
    apart = []
    for turn in range(3):
        for router, reference, other, problem in zip(kernels, plain, others, problems, strict=True):
            now = dataclasses.replace(problem, logits=problem.logits.roll(turn, 1))
            assert torch.equal(run(router, now).ids, reference(now.batch).ids)
            other(now.batch)
            assert float(router.following) == pytest.approx(float(reference.following), rel=1e-12)
            apart.append(float(router.following) != float(other.following))
    assert sum(apart) > 3


def test_one_device_is_not_the_whole_layer() -> None:
    problem = placed(make_problem("softmax_renorm", 4, 12, 3), torch.zeros(12, dtype=torch.int64))
    wanted = run(router_of(problem, parse("squared:budget=4")), problem)
    for text in ("base_ep:budget=4", "base:budget=4,level=yes"):
        router = router_of(problem, squared(text))
        assert router.choosing["RANKS"] == 1
        assert torch.equal(run(router, problem).ids, wanted.ids)


def test_selection_of_devices_without_a_kernel_is_fused() -> None:
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
