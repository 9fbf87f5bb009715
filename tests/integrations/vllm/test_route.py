"""Rows of one layer without vLLM: bit for bit what must stay, capped what must be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moebudget.integrations.vllm import hook, route
from moebudget.integrations.vllm.board import KEEPS, PADDING, VOTES, Board
from moebudget.integrations.vllm.route import KernelRouter, Router, Step, make_router
from moebudget.integrations.vllm.spec import router_spec
from moebudget.kernels import FusedRouter
from moebudget.presets import parse
from moebudget.types import LayerStats
from tests.conftest import HIDDEN, KINDS, make_problem, over_kinds

N, K, CPU = 64, 8, torch.device("cpu")


class Problem:
    """One layer's step as vLLM hands it over: int32 ids in an order of its own, -1 in padding."""

    def __init__(self, kind: str, rows: list[int], text: str = "squared:budget=M", budget: int = 10) -> None:
        problem = make_problem(kind, len(rows), N, K, budget)
        own = problem.batch
        order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
        self.ids, self.weights = own.ids[:, order].int(), own.weights[:, order]
        self.rows = torch.tensor(rows, dtype=torch.int8)
        self.ids[self.rows == PADDING], self.weights[self.rows == PADDING] = -1, 0.0
        self.problem = problem
        self.router: Router = make_router(
            problem.policy(text), problem.spec, problem.stats, hidden=HIDDEN, max_rows=32, device=CPU
        )

    def run(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        rows = self.rows if rows is None else rows
        return self.router(self.step(rows))

    def step(self, rows: Tensor, voting: Tensor | None = None) -> Step:
        request, problem = torch.arange(len(rows)), self.problem
        return Step(problem.hidden, problem.logits, self.ids, self.weights, rows, request, problem.bias, voting)


def assert_kept(step: Problem, found: tuple[Tensor, Tensor], which: Tensor) -> None:
    assert torch.equal(found[0][which], step.ids[which])
    assert torch.equal(found[1][which], step.weights[which])
    assert (found[0].dtype, found[1].dtype) == (step.ids.dtype, step.weights.dtype)
    assert found[0].data_ptr() != step.ids.data_ptr()


MIXED = [VOTES] * 5 + [KEEPS] * 4 + [VOTES] * 3 + [PADDING] * 4


@over_kinds
def test_prefill_row_of_a_mixed_step_changes(kind: str) -> None:
    step = Problem(kind, MIXED)
    assert_kept(step, step.run(), step.rows == KEEPS)


@over_kinds
@pytest.mark.parametrize("text", ["squared:budget=M", "base:budget=M", "base:budget=M,fill=drop"])
def test_budget_of_all_experts_changes_a_decode_row(kind: str, text: str) -> None:
    step = Problem(kind, MIXED, text, budget=N)
    assert_kept(step, step.run(), step.rows != PADDING)


@over_kinds
def test_decode_and_padding_rows_exceed_the_budget(kind: str) -> None:
    step = Problem(kind, MIXED)
    ids, weights = step.run()
    voting, padding = step.rows == VOTES, step.rows == PADDING
    active = set(ids[voting].unique().tolist())
    assert len(active) == 10
    assert set(ids[padding].unique().tolist()) <= active  # and none of them is -1
    assert not weights[padding].any()
    step.router.set_budget(3)
    assert len(step.run()[0][voting].unique()) == 3


@pytest.mark.parametrize("rows", [[KEEPS] * 8, [PADDING] * 8, [KEEPS] * 4 + [PADDING] * 4])
def test_step_without_a_vote_changes(rows: list[int]) -> None:
    step = Problem("softmax_renorm", rows)
    found = step.run()
    assert_kept(step, found, torch.ones(8, dtype=torch.bool))
    assert not step.router.totals.any()


def test_votes_of_prefill_and_padding_count() -> None:
    alone = Problem("softmax_renorm", [VOTES] * 5 + [KEEPS] * 11)
    with_padding = alone.run(torch.tensor([VOTES] * 5 + [PADDING] * 11, dtype=torch.int8))
    assert torch.equal(alone.run()[0][:5], with_padding[0][:5])


def test_poisoned_row_changes_others_or_hides() -> None:
    step = Problem("softmax_renorm", [VOTES] * 6)
    clean = step.run(torch.tensor([VOTES] * 5 + [KEEPS], dtype=torch.int8))
    step.problem.logits[5] = torch.nan
    ids, weights = step.run()
    assert torch.equal(ids[:5], clean[0][:5])
    assert weights[5].isnan().all()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter computes padding in numpy
@pytest.mark.parametrize("text", ["base:budget=M", "squared:budget=M,fill=executed"])
def test_kernel_router_differs_from_the_torch_router(text: str) -> None:
    step = Problem("softmax_renorm", MIXED, text)
    wanted = step.run()
    step.router = KernelRouter(fused(step, text, max_rows=16))
    found = step.run()
    assert_kept(step, found, step.rows == KEEPS)
    assert torch.equal(*(ids.sort(-1).values for ids in (found[0].int(), wanted[0])))
    torch.testing.assert_close(found[1].sort(-1).values, wanted[1].sort(-1).values, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_long_prompt_beside_decode_rows_reaches_the_kernel_or_uncaps_them() -> None:
    """Sixteen rows and a kernel for eight: only the eight that vote may be looked at."""
    step = Problem("softmax_renorm", MIXED)
    wanted = step.run()
    step.router = KernelRouter(fused(step, "squared:budget=M", max_rows=8))
    voting = (step.rows == VOTES).nonzero()[:, 0]
    found = step.router(step.step(step.rows, voting))
    assert_kept(step, found, step.rows != VOTES)
    assert torch.equal(*(x[0][voting].sort(-1).values for x in (found, wanted)))
    assert_kept(step, step.router(step.step(step.rows, voting[:0])), torch.ones(16, dtype=torch.bool))


def fused(step: Problem, text: str, max_rows: int) -> FusedRouter:
    problem = step.problem
    policy = problem.policy(text)
    return FusedRouter(policy, problem.spec, problem.stats, hidden=HIDDEN, max_rows=max_rows, device=CPU)


def test_router_on_the_cpu_claims_a_kernel() -> None:
    assert Problem("softmax", [VOTES]).router.path == "torch (cpu)"


@pytest.mark.parametrize(
    ("text", "devices", "why"),
    [
        ("base:budget=3,relative=1", 2, "no kernel for the score Relative"),
        ("base_ep:budget=3", N + 1, "over 65 devices"),
    ],
)
def test_router_on_a_gpu_hides_why_it_has_no_kernel(
    text: str, devices: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "TorchRouter", lambda *given: SimpleNamespace(path=given[-1]))
    problem = make_problem("softmax", 2, N + 1, K)
    stats = LayerStats({**problem.stats, "placement_device": torch.arange(N + 1) % devices})
    made = make_router(parse(text), problem.spec, stats, hidden=HIDDEN, max_rows=2, device=torch.device("cuda"))
    assert made.path.startswith(f"torch ({text}: ")
    assert why in made.path


class CPURouter:
    """Stands in for vLLM's of that name."""

    def __init__(self, bias: Tensor | None = None, grouped: bool = True) -> None:
        self.top_k, self.global_num_experts, self.renormalize = 4, 16, True
        self.use_grouped_topk, self.num_expert_group, self.topk_group = grouped, 1, 1
        self.scoring_func, self.routed_scaling_factor = "softmax", 1.0
        self.e_score_correction_bias, self.custom_routing_function, self._hash_indices_table = bias, None, None

    def _compute_routing(self, hidden: Tensor, logits: Tensor, indices_type: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        batch = router_spec(self, 16)(hidden, logits)
        return batch.weights, batch.ids.int()


def make_layer(board: Board, name: str = "model.layers.1.mlp.experts") -> hook.Layer:
    config = SimpleNamespace(hidden_dim=32, hidden_dim_unpadded=HIDDEN, num_logical_experts=16)
    layer = hook.Layer(SimpleNamespace(layer_name=name, layer_id=1, router=CPURouter(), moe_config=config))
    policy, stats = parse("base:budget=2"), make_problem("softmax", 1, 16, 4).stats  # reads the hidden state
    route = make_router(policy, layer.spec, stats, hidden=HIDDEN, max_rows=8, device=CPU)
    layer.activate(route, board)
    return layer


def test_hook_is_idle_padded_or_traced_through() -> None:
    board = Board(8, "cpu")
    layer = make_layer(board)
    hidden, logits = torch.randn(8, 32), torch.randn(8, 16)
    hidden[:, HIDDEN:] = 0
    router = layer.router
    assert type(router).__name__ == "CPURouter"
    board.rows.fill_(VOTES)
    eager = router._compute_routing(hidden, logits, None)
    assert layer.calls == 1
    assert len(eager[1].unique()) == 2

    compiled = torch.compile(lambda h, x: router._compute_routing(h, x, None), backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden, logits)[1], eager[1])
    assert layer.calls == 2
    layer.route.set_budget(1)  # type: ignore[union-attr]
    assert len(compiled(hidden, logits)[1].unique()) == 1


def test_step_of_prefill_alone_pays_for_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(8, "cpu")
    layer = make_layer(board)
    route = layer.route
    monkeypatch.setattr(layer, "route", lambda *_: pytest.fail("the policy ran"))
    hidden, logits = torch.randn(8, 32), torch.randn(8, 16)
    board.fill(["a"], np.array([8]), np.array([False]))
    weights, ids = layer.router._compute_routing(hidden, logits, None)
    plain = CPURouter()._compute_routing(hidden, logits, None)
    assert torch.equal(weights, plain[0])
    assert torch.equal(ids, plain[1])
    monkeypatch.setattr(layer, "route", route)
    monkeypatch.setattr(hook, "_capturing", lambda device: True)  # noqa: ARG005, a graph must hold the policy
    board.rows.fill_(VOTES)
    assert len(layer.router._compute_routing(hidden, logits, None)[1].unique()) == 2


def test_layer_of_a_draft_model_is_capped() -> None:
    config = SimpleNamespace(hidden_dim=32, hidden_dim_unpadded=None, num_logical_experts=16)
    runner = SimpleNamespace(layer_name="draft.0.experts", layer_id=0, router=CPURouter(), moe_config=config)
    layer = hook.Layer(runner)  # collected, never activated
    weights, ids = layer.router._compute_routing(torch.randn(8, 32), torch.randn(8, 16), None)
    assert layer.calls == 0
    assert (weights.shape, ids.shape) == ((8, 4), (8, 4))


def test_more_rows_than_row_classes_are_routed() -> None:
    layer = make_layer(Board(4, "cpu"))
    with pytest.raises(RuntimeError, match="got 5 rows, row classes exist for 4"):
        layer.router._compute_routing(torch.randn(5, 32), torch.randn(5, 16), None)


def test_layer_of_a_stopped_engine_is_routed() -> None:
    router = make_layer(Board(8, "cpu"), "gone").router
    with pytest.raises(RuntimeError, match="no engine of this process has a layer 'gone'"):
        router._compute_routing(torch.randn(2, 32), torch.randn(2, 16), None)


def test_kinds_of_routers_are_all_covered() -> None:
    assert len(KINDS) == 5
