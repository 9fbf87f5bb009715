"""CUDA graphs of decode steps. Without a GPU, a fake graph runs the step again on the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moebudget import attach
from moebudget.core.layer_router import LayerRouter
from moebudget.core.policy import Policy, Select
from moebudget.core.stats import Stats
from moebudget.core.types import Active, LayerStats, RouterBatch, Routing
from moebudget.engines.transformers import graphs
from moebudget.engines.transformers.families import MoeLayer, facts_of
from moebudget.engines.transformers.graphs import StepGraphs
from moebudget.engines.transformers.offload import offload
from moebudget.engines.transformers.steps import route_steps
from moebudget.methods.registry import parse
from tests.conftest import HIDDEN, POLICIES, make_problem, prices_of

from .tiny import CASES, build, generate, prompts

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CAPTURED = [text for text in POLICIES if not parse(text.replace("M", "3")).needs_energy]


class FakeGraph:
    """Behaves as a captured graph: reads the same memory at each replay, and writes to the same memory."""

    def __init__(self, layer: MoeLayer, router: LayerRouter, shared: Any) -> None:
        before = router.totals.clone(), router.following.clone()
        self.step = (layer, router, *shared.inputs)
        self.routing = route_steps(*self.step)
        router.totals.copy_(before[0])  # a capture runs nothing
        router.following.copy_(before[1])

    def replay(self) -> None:
        again = route_steps(*self.step)
        for name in ("ids", "weights", "shift"):
            if getattr(again, name) is not None:
                getattr(self.routing, name).copy_(getattr(again, name))


@pytest.fixture(autouse=True)
def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    if GPU:
        return

    def capture(layer: MoeLayer, router: LayerRouter, shared: Any) -> tuple[FakeGraph, Routing]:
        graph = FakeGraph(layer, router, shared)
        return graph, graph.routing

    def capturable(router: LayerRouter, hidden: Tensor, steps: Tensor) -> bool:
        return steps.shape == (1, len(hidden)) and not router.policy.needs_energy

    monkeypatch.setattr(graphs, "_capture", capture)
    monkeypatch.setattr(graphs, "capturable", capturable)


def layer_and_steps(text: str, seed: int, index: int = 0) -> tuple[MoeLayer, LayerRouter, list[tuple[Tensor, ...]]]:
    """A layer under a policy, and five steps of 6 rows in which different rows vote."""
    problem = make_problem("softmax_renorm", 6, 16, 4, seed=seed)
    g = torch.Generator().manual_seed(seed)
    gate = nn.Linear(HIDDEN, 16, bias=False)
    gate.weight.data = torch.randn(16, HIDDEN, generator=g)
    layer = MoeLayer("layer", index, gate.to(DEVICE), nn.Identity(), problem.spec, False)
    router = LayerRouter(problem.policy(text), LayerStats(dict(problem.stats)).to(DEVICE), DEVICE)
    steps = []
    for _ in range(5):
        hidden = torch.randn(6, HIDDEN, generator=g).to(DEVICE)
        batch = problem.spec(hidden, layer.logits(hidden))
        voting = (torch.rand(1, 6, generator=g) < 0.8).to(DEVICE)
        steps.append((hidden, batch.ids, batch.weights, torch.arange(6, device=DEVICE)[None], voting))
    return layer, router, steps


def assert_equal(routing: Routing, expected: Routing) -> None:
    assert torch.equal(routing.ids, expected.ids)
    assert torch.equal(routing.weights, expected.weights)
    assert (routing.shift is None) == (expected.shift is None)
    assert routing.shift is None or expected.shift is None or torch.equal(routing.shift, expected.shift)


@torch.no_grad()
@pytest.mark.parametrize("text", CAPTURED)
def test_a_replay_equals_the_step_without_a_graph(text: str) -> None:
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
def test_routes_of_a_layer_survive_the_graphs_of_later_layers() -> None:
    layers = [layer_and_steps("squared:budget=3", seed, index=seed) for seed in (1, 2)]
    plain = [layer_and_steps("squared:budget=3", seed, index=seed)[1] for seed in (1, 2)]
    run = StepGraphs()
    for number in range(5):
        routings = [run(layer, router, *steps[number]) for layer, router, steps in layers]
        for routing, (layer, _, steps), router in zip(routings, layers, plain, strict=True):
            assert_equal(routing, route_steps(layer, router, *steps[number]))


@torch.no_grad()
def test_each_number_of_rows_has_a_graph_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_steps_among_other_rows_run_without_a_graph() -> None:
    """Prefill rows beside a step differ in number from prompt to prompt, so a graph would rarely be reused."""
    layer, router, steps = layer_and_steps("squared:budget=3", seed=1)
    run = StepGraphs()
    hidden, ids, weights, _, _ = steps[0]
    for rows in ([[0, 1]], [[0, 1, 2], [3, 4, 5]]):
        for _ in range(3):
            run(layer, router, hidden, ids, weights, torch.tensor(rows, device=DEVICE))
    assert not run._graphs


@pytest.mark.parametrize("policy", ["squared:budget=3", "price:budget=3,hold=0.5", "oea:k0=1"])
def test_graphs_change_neither_tokens_nor_counters(policy: str) -> None:
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


def test_a_replay_reads_the_current_expert_cache() -> None:
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


class ReadsOnHost(Select):
    """A selection that reads its sums on the host."""

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:  # noqa: ARG002
        return Active(torch.full_like(batch.decode, bool(scores.sum().item())).any(-1, keepdim=True))


@torch.no_grad()
@pytest.mark.skipif(not GPU, reason="needs a GPU")
def test_a_policy_that_reads_on_the_host_is_refused_with_the_way_out() -> None:
    layer, _, steps = layer_and_steps("squared:budget=3", seed=1)
    usual = parse("squared:budget=3")
    router = LayerRouter(Policy(usual.score, ReadsOnHost(), usual.fill, "reads"), device=DEVICE)
    run = StepGraphs()
    run(layer, router, *steps[0])
    with pytest.raises(RuntimeError, match=r"'reads' cannot be captured .* attach\(..., graphs=False\) to run it"):
        run(layer, router, *steps[1])
    torch.cuda.synchronize()  # the device is still usable
