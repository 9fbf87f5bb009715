"""Routers of one layer without vLLM: native rows stay bit for bit, decode rows are capped."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moebudget.core.types import LayerStats, RowKind
from moebudget.engines.vllm import route
from moebudget.engines.vllm.route import KernelRouter, Router, Step, make_router
from moebudget.kernels import FusedRouter
from moebudget.methods.registry import parse
from tests.conftest import HIDDEN, KINDS, make_problem, over_kinds
from tests.engines.vllm.fakes import CPU

N, K = 64, 8


class LayerStep:
    """One layer's step as vLLM passes it: int32 ids in an arbitrary order, -1 in padding."""

    def __init__(self, router: str, kinds: list[int], text: str = "squared:budget=M", budget: int = 10) -> None:
        problem = make_problem(router, len(kinds), N, K, budget)
        batch = problem.batch
        order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
        self.ids, self.weights = batch.ids[:, order].int(), batch.weights[:, order]
        self.kind = torch.tensor(kinds, dtype=torch.int8)
        self.ids[self.kind == RowKind.PAD], self.weights[self.kind == RowKind.PAD] = -1, 0.0
        self.problem = problem
        self.router: Router = make_router(
            problem.policy(text), problem.spec, problem.stats, hidden=HIDDEN, max_rows=32, device=CPU
        )

    def run(self, kind: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.router(self.step(self.kind if kind is None else kind))

    def step(self, kind: Tensor, voting: Tensor | None = None) -> Step:
        request, problem = torch.arange(len(kind)), self.problem
        return Step(problem.hidden, problem.logits, self.ids, self.weights, kind, request, problem.bias, voting)


def assert_kept(step: LayerStep, routes: tuple[Tensor, Tensor], rows: Tensor) -> None:
    ids, weights = routes
    assert torch.equal(ids[rows], step.ids[rows])
    assert torch.equal(weights[rows], step.weights[rows])
    assert (ids.dtype, weights.dtype) == (step.ids.dtype, step.weights.dtype)
    assert ids.data_ptr() != step.ids.data_ptr()


MIXED = [RowKind.DECODE] * 5 + [RowKind.NATIVE] * 4 + [RowKind.DECODE] * 3 + [RowKind.PAD] * 4


@over_kinds
def test_prefill_rows_keep_native_routes_in_mixed_steps(kind: str) -> None:
    step = LayerStep(kind, MIXED)
    assert_kept(step, step.run(), step.kind == RowKind.NATIVE)


@over_kinds
@pytest.mark.parametrize("text", ["squared:budget=M", "base:budget=M", "base:budget=M,fill=drop"])
def test_budget_of_all_experts_keeps_native_routes(kind: str, text: str) -> None:
    step = LayerStep(kind, MIXED, text, budget=N)
    assert_kept(step, step.run(), step.kind != RowKind.PAD)


@over_kinds
def test_decode_and_padding_rows_stay_within_the_budget(kind: str) -> None:
    step = LayerStep(kind, MIXED)
    ids, weights = step.run()
    voting, padding = step.kind == RowKind.DECODE, step.kind == RowKind.PAD
    active = set(ids[voting].unique().tolist())
    assert len(active) == 10
    assert set(ids[padding].unique().tolist()) <= active  # so no id is -1
    assert not weights[padding].any()
    step.router.set_budget(3)
    assert len(step.run()[0][voting].unique()) == 3


@pytest.mark.parametrize("kinds", [[RowKind.NATIVE] * 8, [RowKind.PAD] * 8, [RowKind.NATIVE] * 4 + [RowKind.PAD] * 4])
def test_steps_without_a_vote_keep_native_routes(kinds: list[int]) -> None:
    step = LayerStep("softmax_renorm", kinds)
    assert_kept(step, step.run(), torch.ones(8, dtype=torch.bool))
    assert not step.router.totals.any()


def test_prefill_and_padding_do_not_vote() -> None:
    alone = LayerStep("softmax_renorm", [RowKind.DECODE] * 5 + [RowKind.NATIVE] * 11)
    with_padding = alone.run(torch.tensor([RowKind.DECODE] * 5 + [RowKind.PAD] * 11, dtype=torch.int8))
    assert torch.equal(alone.run()[0][:5], with_padding[0][:5])


def test_nan_row_gets_nan_weights_and_changes_no_other() -> None:
    step = LayerStep("softmax_renorm", [RowKind.DECODE] * 6)
    clean = step.run(torch.tensor([RowKind.DECODE] * 5 + [RowKind.NATIVE], dtype=torch.int8))
    step.problem.logits[5] = torch.nan
    ids, weights = step.run()
    assert torch.equal(ids[:5], clean[0][:5])
    assert weights[5].isnan().all()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the interpreter computes padding in numpy
@pytest.mark.parametrize("text", ["base:budget=M", "squared:budget=M,fill=executed"])
def test_kernel_router_agrees_with_the_torch_router(text: str) -> None:
    step = LayerStep("softmax_renorm", MIXED, text)
    expected = step.run()
    step.router = KernelRouter(fused(step, text, max_rows=16))
    routes = step.run()
    assert_kept(step, routes, step.kind == RowKind.NATIVE)
    assert torch.equal(*(ids.sort(-1).values for ids in (routes[0].int(), expected[0])))
    torch.testing.assert_close(routes[1].sort(-1).values, expected[1].sort(-1).values, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_kernel_router_caps_decode_rows_beside_a_long_prompt() -> None:
    """Sixteen rows and a kernel for eight: it may see only the eight decode rows."""
    step = LayerStep("softmax_renorm", MIXED)
    expected = step.run()
    step.router = KernelRouter(fused(step, "squared:budget=M", max_rows=8))
    voting = (step.kind == RowKind.DECODE).nonzero()[:, 0]
    routes = step.router(step.step(step.kind, voting))
    assert_kept(step, routes, step.kind != RowKind.DECODE)
    assert torch.equal(*(ids[voting].sort(-1).values for ids, _ in (routes, expected)))
    assert_kept(step, step.router(step.step(step.kind, voting[:0])), torch.ones(16, dtype=torch.bool))


def fused(step: LayerStep, text: str, max_rows: int) -> FusedRouter:
    problem = step.problem
    policy = problem.policy(text)
    return FusedRouter(policy, problem.spec, problem.stats, hidden=HIDDEN, max_rows=max_rows, device=CPU)


def test_router_on_the_cpu_names_the_torch_path() -> None:
    assert LayerStep("softmax", [RowKind.DECODE]).router.path == "torch (cpu)"


@pytest.mark.parametrize(
    ("text", "devices", "reason"),
    [
        ("base:budget=3,relative=1", 2, "no kernel for the score Relative"),
        ("base_ep:budget=3", N + 1, "over 65 devices"),
    ],
)
def test_router_on_a_gpu_gives_the_reason_for_the_torch_path(
    text: str, devices: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route, "TorchRouter", lambda *args: SimpleNamespace(path=args[-1]))
    problem = make_problem("softmax", 2, N + 1, K)
    stats = LayerStats({**problem.stats, "placement_device": torch.arange(N + 1) % devices})
    router = make_router(parse(text), problem.spec, stats, hidden=HIDDEN, max_rows=2, device=torch.device("cuda"))
    assert router.path.startswith(f"torch ({text}: ")
    assert reason in router.path


def test_every_router_kind_is_covered() -> None:
    assert len(KINDS) == 5
