"""Graphs of decode steps: on a GPU the real ones, elsewhere a stand-in that runs the step again on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moebudget import attach
from moebudget.integrations import graphs
from moebudget.integrations.families import MoeLayer, facts_of
from moebudget.integrations.graphs import StepGraphs
from moebudget.integrations.offload import offload
from moebudget.integrations.steps import route_steps
from moebudget.policy import Policy
from moebudget.presets import parse
from moebudget.runtime import LayerRouter
from moebudget.stats import Stats
from moebudget.types import Active, LayerStats, RouterBatch, Routing
from tests.conftest import HIDDEN, POLICIES, make_problem, prices_of

from .tiny import CASES, build, generate, prompts

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CAPTURED = [text for text in POLICIES if not parse(text.replace("M", "3")).needs_energy]


class Replayed:
    """What a captured graph does: the same step on the same memory, into the same memory."""

    def __init__(self, layer: MoeLayer, router: LayerRouter, room: Any) -> None:
        before = router.totals.clone(), router.following.clone()
        self.step = (layer, router, *room.inputs)
        self.routing = route_steps(*self.step)
        router.totals.copy_(before[0])  # a capture runs nothing
        router.following.copy_(before[1])

    def replay(self) -> None:
        again = route_steps(*self.step)
        for name in ("ids", "weights", "shift"):
            if getattr(again, name) is not None:
                getattr(self.routing, name).copy_(getattr(again, name))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU:
        return

    def capture(layer: MoeLayer, router: LayerRouter, room: Any) -> tuple[Replayed, Routing]:
        graph = Replayed(layer, router, room)
        return graph, graph.routing

    def capturable(router: LayerRouter, hidden: Tensor, steps: Tensor) -> bool:
        return steps.shape == (1, len(hidden)) and not router.policy.needs_energy

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "capturable", capturable)


def layer_and_steps(text: str, seed: int, index: int = 0) -> tuple[MoeLayer, LayerRouter, list[tuple[Tensor, ...]]]:
    """A layer under a policy and five steps of 6 rows, of which other ones vote each time."""
    problem = make_problem("softmax_renorm", 6, 16, 4, seed=seed)
    g = torch.Generator().manual_seed(seed)
    gate = nn.Linear(HIDDEN, 16, bias=False)
    gate.weight.data = torch.randn(16, HIDDEN, generator=g)
    layer = MoeLayer("layer", index, gate.to(DEVICE), nn.Identity(), problem.spec, False)
    router = LayerRouter(problem.policy(text), LayerStats(dict(problem.stats)).to(DEVICE), DEVICE)
    found = []
    for _ in range(5):
        hidden = torch.randn(6, HIDDEN, generator=g).to(DEVICE)
        batch = problem.spec(hidden, layer.logits(hidden))
        voting = (torch.rand(1, 6, generator=g) < 0.8).to(DEVICE)
        found.append((hidden, batch.ids, batch.weights, torch.arange(6, device=DEVICE)[None], voting))
    return layer, router, found


def assert_equal(found: Routing, wanted: Routing) -> None:
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.weights, wanted.weights)
    assert (found.shift is None) == (wanted.shift is None)
    assert found.shift is None or wanted.shift is None or torch.equal(found.shift, wanted.shift)


@torch.no_grad()
@pytest.mark.parametrize("text", CAPTURED)
def test_a_replay_differs_from_the_step_run_as_it_is(text: str) -> None:
    layer, plain, steps = layer_and_steps(text, seed=1)
    _, router, _ = layer_and_steps(text, seed=1)
    run = StepGraphs()
    for number, step in enumerate(steps):
        if number == 3 and router.budget is not None:
            router.set_budget(5)
            plain.set_budget(5)
        assert_equal(run(layer, router, *step), route_steps(layer, plain, *step))
    assert torch.equal(router.totals, plain.totals)
    assert torch.equal(router.scale, plain.scale)
    assert len(run._graphs) == 1
    assert all(run._graphs.values())


@torch.no_grad()
def test_a_later_layer_overwrites_routes_that_are_still_read() -> None:
    many = [layer_and_steps("squared:budget=3", seed, index=seed) for seed in (1, 2)]
    plain = [layer_and_steps("squared:budget=3", seed, index=seed)[1] for seed in (1, 2)]
    run = StepGraphs()
    for number in range(5):
        found = [run(layer, router, *steps[number]) for layer, router, steps in many]
        for got, (layer, _, steps), router in zip(found, many, plain, strict=True):
            assert_equal(got, route_steps(layer, router, *steps[number]))


@torch.no_grad()
def test_numbers_of_rows_share_a_graph_or_make_any_number_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "SHAPES", 2)
    layer, router, steps = layer_and_steps("squared:budget=3", seed=1)
    _, plain, _ = layer_and_steps("squared:budget=3", seed=1)
    run = StepGraphs()
    for rows in (6, 4, 3, 6, 4, 3, 6, 3):
        for whole in steps:
            step = (*(x[:rows] for x in whole[:3]), *(x[:, :rows] for x in whole[3:]))
            assert_equal(run(layer, router, *step), route_steps(layer, plain, *step))
    assert {shape[0][0][0] for shape, _ in run._graphs} == {6, 4}


@torch.no_grad()
def test_steps_beside_other_rows_are_captured() -> None:
    """Prefill beside them has as many lengths as there are prompts."""
    layer, router, steps = layer_and_steps("squared:budget=3", seed=1)
    run = StepGraphs()
    hidden, ids, weights, _, _ = steps[0]
    for rows in ([[0, 1]], [[0, 1, 2], [3, 4, 5]]):
        for _ in range(3):
            run(layer, router, hidden, ids, weights, torch.tensor(rows, device=DEVICE))
    assert not run._graphs


@pytest.mark.parametrize("policy", ["squared:budget=3", "price:budget=3,hold=0.5", "oea:k0=1"])
def test_generated_tokens_or_counters_change_with_graphs(policy: str) -> None:
    model = build(CASES["qwen3_moe"]).to(DEVICE)
    ids = prompts(3, 5).to(DEVICE)
    seen = {}
    for on in (True, False):
        with attach(model, policy, allocated(model), graphs=on) as run:
            tokens = generate(model, ids, 12)[0]
            if run.routers[0].budget is not None:
                run.set_budget(4)
            seen[on] = tokens, generate(model, ids, 12)[0], run.counters
        assert bool(run.graphs._graphs) == on
    assert torch.equal(seen[True][0], seen[False][0])
    assert torch.equal(seen[True][1], seen[False][1])
    assert seen[True][2] == seen[False][2]


def allocated(model: Any) -> Stats:
    """Statistics with a price."""
    facts = facts_of(model)
    n, layers, g = facts.experts, len(facts.layers), torch.Generator().manual_seed(0)
    tensors = {
        "predictor_weight": torch.randn(layers, n, facts.hidden, generator=g),
        "predictor_bias": torch.randn(layers, n, generator=g),
        "layer_price": torch.stack([prices_of(n, g) for _ in range(layers)]),
    }
    return Stats(facts, tensors)


def test_a_graph_reads_the_cache_of_the_step_it_was_captured_in() -> None:
    model, ids = build(CASES["qwen3_moe"]), prompts(2, 5)
    seen = {}
    for on in (True, False):
        with (
            offload(model, 5, DEVICE) as cached,
            attach(model, "caee_offload:theta=0.5", cached.stats(), graphs=on) as run,
        ):
            seen[on] = generate(model, ids.to(DEVICE), 20)[0].cpu(), run.counters, cached.counters
    assert torch.equal(seen[True][0], seen[False][0])
    assert seen[True][1:] == seen[False][1:]


class Reads:
    """A selection that needs its sums on the host."""

    needs: frozenset[str] = frozenset()

    def __call__(self, scores: Tensor, batch: RouterBatch, _stats: LayerStats) -> Active:
        return Active(torch.full_like(batch.live, bool(scores.sum().item())).any(-1, keepdim=True))


@torch.no_grad()
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_policy_that_reads_on_the_host_fails_without_the_way_out() -> None:
    layer, _, steps = layer_and_steps("squared:budget=3", seed=1)
    usual = parse("squared:budget=3")
    router = LayerRouter(Policy(usual.score, Reads(), usual.fill, "reads"), device=DEVICE)  # type: ignore[arg-type]
    run = StepGraphs()
    run(layer, router, *steps[0])
    with pytest.raises(RuntimeError, match=r"'reads' cannot be captured .* attach\(..., graphs=False\) runs it"):
        run(layer, router, *steps[1])
    torch.cuda.synchronize()  # the device is as usable as before
