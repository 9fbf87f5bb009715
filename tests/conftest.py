"""Problems that the core tests share: every router kind in every shape, with ties, negative scores and statistics."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.core.types import LayerStats, RouterBatch, Routing
from moebudget.methods.registry import METHODS, parse
from tests.methods import reference

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported: kernels run on CPU tensors

KINDS: dict[str, dict[str, Any]] = {
    "softmax_renorm": {"scoring": "softmax"},
    "softmax": {"scoring": "softmax", "renormalize": False, "scale": 1.5},
    "sigmoid_bias": {"scoring": "sigmoid", "scale": 2.5},
    "groups_max": {"scoring": "softmax", "renormalize": False, "scale": 16.0, "groups": 4, "group_score": "max"},
    "groups_top2": {"scoring": "sigmoid", "scale": 2.5, "groups": 4, "group_score": "top2"},
}
SHAPES = list(itertools.product((0, 1, 2, 5, 16), (8, 60, 64), (1, 2, 8)))  # T, N, K
BUDGETED = (
    "router_mass:budget=M",
    "squared:budget=M",
    "static:budget=M",
    "base:budget=M",
    "base:budget=M,fill=executed",
    "base:budget=M,fill=drop",
    "oracle:budget=M",
)
PUBLISHED = (
    "oea:k0=2,p=0.6,max_rank=12",
    "oea:k0=1,k_max=1",
    "sere:s=1",
    "sere:s=2,rho=0.5,metric=cosine",
    "lynx:alpha=1.5,beta=2",
    "lynx_lat:drop=3",
    "exfold:budget=M",
    "exfold_static:budget=M",
    "exfold_prefill:p=1",
    "xshare:k0=1,m=2",
    "xshare:k0=0,m=M,additive=no",
    "xshare:k0=1,m=0,m_request=2",
    "xshare_balanced:m=M",
    "xshare_ep:k0=1,m_device=1",
    "xshare_ep:k0=0,m_device=2,score=base",
    "caee:theta=0.4",
    "caee_offload:theta=0.7",
    "skip",
    "reap:budget=M",
    "reap_static:budget=M",
    "moe_spec:budget=M",
    "des_vote:beta=0.1",
    "dmoe",
    "acceptmoe:scale=0.5",
    "base:budget=M,fill=substitute",
    "base:budget=M,fill=preserved",
    "nonlinear:budget=M",
)
OURS = (
    "base:budget=M,fill=geometric",
    "base:budget=M,fill=mean_direction",
    "base:budget=M,fill=energy",
    "base:budget=M,fill=by_layer",
    "base:budget=M,fill=sketch",
    "base:budget=M,relative=0.5",
    "spread:budget=M",
    "spread:budget=M,relative=1,floor=yes,fill=native",
    "price:budget=M",
    "price:budget=M,floor=yes,ceiling=7",
    "worth:least=0.7",
    "worth:least=1.5,cost=squared,fill=native",
    "base_ep:budget=M",
    "base:budget=M,level=yes",
    "price:budget=M,level=yes",
)
LISTED = ("native", "topk:k=1", "topk:k=3", "oea:k0=1", "oea:k0=2,fill=native", *BUDGETED, *PUBLISHED, *OURS)
# Methods that are registered and not listed above: their examples are held to every promise, but to no reference.
UNLISTED = tuple(m.example for name, m in METHODS.items() if name not in {text.partition(":")[0] for text in LISTED})
POLICIES = (*LISTED, *UNLISTED)
HIDDEN = 6
# The policies of FEWER share these and walk fewer shapes, in which every two of T, N and K still meet.
FEWER_KINDS = ("softmax_renorm", "sigmoid_bias", "groups_top2")
FEWER_SHAPES = [
    (t, n, (1, 2, 8)[(i + j) % 3]) for i, t in enumerate((0, 1, 2, 5, 16)) for j, n in enumerate((8, 60, 64))
]

FEWER = (*PUBLISHED, *OURS, *UNLISTED)

over_kinds = pytest.mark.parametrize("kind", KINDS)


def over_policies(policies: tuple[str, ...] = POLICIES, every_kind: bool = False) -> Callable[[Any], Any]:
    """Run a test for every policy and its router kinds; the test walks the shapes."""
    kinds = {text: KINDS if every_kind or text not in FEWER else FEWER_KINDS for text in policies}
    return pytest.mark.parametrize(("text", "kind"), [(text, kind) for text in policies for kind in kinds[text]])


def make_spec(kind: str, n: int, k: int) -> RouterSpec:
    """A router of the kind; of four groups two are open, or all where two cannot hold K routes."""
    facts = KINDS[kind]
    groups = facts.get("groups", 1)
    open_groups = 1 if groups == 1 else 2 if n // groups * 2 >= k else groups
    return RouterSpec(n, k, **facts, open_groups=open_groups)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """One step of one layer, before the router: T rows, N experts."""

    spec: RouterSpec
    hidden: Tensor  # [T, d]
    logits: Tensor  # [T, N]
    energies: Tensor  # [T, N]
    bias: Tensor | None  # [N]
    stats: LayerStats
    budget: int
    kind: Tensor | None = None  # [T]
    routes: tuple[Tensor, Tensor] | None = None  # [T, K]

    @cached_property
    def batch(self) -> RouterBatch:
        batch = self.spec(self.hidden, self.logits, bias=self.bias, kind=self.kind, routes=self.routes)
        return dataclasses.replace(batch, energy=self.energies.gather(-1, batch.ids))

    @property
    def rows(self) -> int:
        return self.logits.shape[0]

    @property
    def shape(self) -> str:
        return f"T={self.rows} N={self.spec.num_experts} K={self.spec.top_k} M={self.budget}"

    def take(self, rows: Tensor) -> Problem:
        """The problem with these rows, in this order."""
        return self.with_rows(self.hidden[rows], self.logits[rows], self.energies[rows])

    def with_rows(self, hidden: Tensor, logits: Tensor, energies: Tensor, **changes: Any) -> Problem:
        return dataclasses.replace(self, hidden=hidden, logits=logits, energies=energies, **changes)

    @cached_property
    def reference(self) -> list[reference.Row]:
        bias = None if self.bias is None else self.bias.tolist()
        return [reference.native(self.spec, row, bias) for row in self.logits.tolist()]

    @cached_property
    def plain_stats(self) -> dict[str, Any]:
        """The statistics as nested lists."""
        return {name: tensor.tolist() for name, tensor in self.stats.items()}

    def policy(self, text: str) -> Policy:
        """The policy of one of POLICIES at this problem's budget."""
        return parse(text.replace("M", str(self.budget)))


def make_problem(kind: str, t: int, n: int, k: int, budget: int = 3, seed: int = 0) -> Problem:
    """A random step. Logits and bias are on a grid, so that ties occur; biased sigmoid scores are mostly negative."""
    g = torch.Generator().manual_seed(seed + 1000 * t + 10 * n + k)
    logits = (torch.randn(t, n, generator=g) * 24).round() / 16
    bias = (torch.randn(n, generator=g) * 2).round() / 8 - 1 if "sigmoid" in KINDS[kind]["scoring"] else None
    stats = {
        "predictor_weight": torch.randn(n, HIDDEN, generator=g),
        "predictor_bias": torch.randn(n, generator=g),
        "energy_mean": torch.rand(n, generator=g) + 0.1,
    }
    hidden, energies = torch.randn(t, HIDDEN, generator=g), torch.rand(t, n, generator=g) + 0.1
    stats |= more_stats(n, k, g)
    return Problem(make_spec(kind, n, k), hidden, logits, energies, bias, LayerStats(stats), budget)


def more_stats(n: int, k: int, g: torch.Generator) -> dict[str, Tensor]:
    """Statistics of the published methods. Similarities and losses are on a grid, so that ties occur."""
    stats = {
        "output_norm": torch.rand(n, generator=g) + 0.1,
        "output_norm_weighted": (torch.rand(n, generator=g) * 16).round() / 16 + 0.1,
        "super_expert": (torch.rand(n, generator=g) < 0.05).float(),
        "route_ratio": torch.rand(k, generator=g).sort(descending=True).values,
        "fold_scale": torch.randn(n, n, generator=g),
        "fold_loss": (torch.rand(n, n, generator=g) * 32).round() / 32,
        "nonlinear_features": torch.randn(5, HIDDEN, generator=g),
        "nonlinear_weight": torch.randn(n, HIDDEN + 5, generator=g),
        "nonlinear_bias": torch.randn(n, generator=g),
        "layer_budget": budgets_of(n, g),
        "layer_price": prices_of(n, g),
        "placement_device": torch.randint(0, 4, (n,), generator=g),
        "placement_cost": torch.randint(0, 3, (n,), generator=g).float(),
    }
    unseen = torch.rand(n, n, generator=g) < 0.3
    stats["fold_loss"] = torch.where(unseen | torch.eye(n, dtype=torch.bool), 1e30, stats["fold_loss"])
    stats["fold_scale"] = torch.where(unseen, 0.0, stats["fold_scale"])
    for metric in ("frobenius", "cosine", "cka"):
        half = (torch.rand(n, n, generator=g) * 32).round() / 32
        stats[f"similarity_{metric}"] = torch.minimum(half, half.T).fill_diagonal_(1.0)
    stats["output_direction"] = torch.randn(n, HIDDEN, generator=g)
    stats["layer_fill"] = torch.randint(0, 3, (n,), generator=g) / 2
    stats["sketch_in"] = torch.randn(n, 2, HIDDEN + 1, generator=g)
    stats["sketch_out"] = torch.randn(n, 2, HIDDEN, generator=g)
    return stats


def budgets_of(n: int, g: torch.Generator) -> Tensor:
    """A layer's budgets for every average [N]: rising unsteadily, N at the end."""
    return torch.cat([torch.randint(1, n + 1, (n - 1,), generator=g).sort().values, torch.tensor([n])])


def prices_of(n: int, g: torch.Generator) -> Tensor:
    """A layer's thresholds for every average [N], falling to -inf; some experts cost more and some less."""
    return torch.cat([torch.randn(n - 1, generator=g).sort(descending=True).values.exp(), torch.tensor([-torch.inf])])


@cache
def problems(kind: str, text: str = "") -> tuple[Problem, ...]:
    """One problem per shape, with budgets that take turns; fewer shapes if `text` is one of FEWER."""
    shapes, budgets = FEWER_SHAPES if text in FEWER else SHAPES, itertools.cycle((1, 3, 6, 10))
    return tuple(make_problem(kind, t, n, k, m) for (t, n, k), m in zip(shapes, budgets, strict=False))


@cache
def solved(text: str, kind: str) -> tuple[tuple[Problem, Policy, Routing], ...]:
    """The policy's result on every problem of the kind."""
    policies = ((problem, problem.policy(text)) for problem in problems(kind, text))
    return tuple((problem, policy, policy(problem.batch, problem.stats)) for problem, policy in policies)


def used_slots(routing: Routing) -> list[reference.Routes]:
    """A row's executed routes in slot order, without unused slots."""
    rows = zip(routing.ids.tolist(), routing.weights.tolist(), strict=True)
    return [[(u, w) for u, w in zip(ids, weights, strict=True) if w != 0] for ids, weights in rows]


def assert_routes(routing: Routing, expected: list[reference.Routes], where: str = "") -> None:
    """Ids and slot order exactly, weights to 1e-5."""
    for t, (found, wanted) in enumerate(zip(used_slots(routing), expected, strict=True)):
        assert [u for u, _ in found] == [u for u, _ in wanted], f"{where} row {t}"
        assert [w for _, w in found] == pytest.approx([w for _, w in wanted], rel=1e-5, abs=1e-6), f"{where} row {t}"


def assert_same(found: Routing, wanted: Routing, where: str = "") -> None:
    """Ids exactly, weights and, where both have one, shifts to float32 rounding."""
    assert torch.equal(found.ids, wanted.ids), where
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-6, atol=1e-7, equal_nan=True)
    if found.shift is not None and wanted.shift is not None:
        torch.testing.assert_close(found.shift, wanted.shift, rtol=1e-5, atol=1e-5)
