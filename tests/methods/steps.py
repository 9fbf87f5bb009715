"""Steps that the tests of several methods share: made-up problems, and what a policy does to them."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from moebudget.core.ops import fetched_experts, first_routes, native_union
from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.core.types import LayerStats, RouterBatch, Routing
from tests.conftest import Problem, make_problem
from tests.methods import reference, reference_published

SIZES = ((1, 8, 2), (5, 60, 8), (16, 64, 4))  # T, N, K


def sized(kind: str, budget: int = 6) -> list[Problem]:
    return [make_problem(kind, t, n, k, budget) for t, n, k in SIZES]


def run(policy: Policy | str, problem: Problem) -> Routing:
    policy = problem.policy(policy) if isinstance(policy, str) else policy
    return policy(problem.batch, problem.stats)


def members(policy: Policy | str, problem: Problem, batch: RouterBatch | None = None) -> set[int]:
    """The active set."""
    policy = problem.policy(policy) if isinstance(policy, str) else policy
    return set(policy.active(batch or problem.batch, problem.stats).mask.nonzero()[:, 0].tolist())


def fetched(policy: Policy | str, problem: Problem) -> set[int]:
    return set(fetched_experts(run(policy, problem), problem.batch).nonzero()[:, 0].tolist())


def union_of(problem: Problem, k0: int | None = None) -> set[int]:
    hits = native_union(problem.batch) if k0 is None else first_routes(problem.batch, k0)
    return set(hits.nonzero()[:, 0].tolist())


def is_native(policy: Policy | str, problem: Problem) -> bool:
    routing = run(policy, problem)
    return torch.equal(routing.ids, problem.batch.ids) and torch.equal(routing.weights, problem.batch.weights)


def loads(experts: set[int], problem: Problem) -> list[int]:
    """Experts of the set on each of the devices."""
    device = problem.plain_stats["placement_device"]
    return [sum(device[u] == d for u in experts) for d in range(max(device) + 1)]


def with_stats(problem: Problem, **changes: Tensor) -> Problem:
    return dataclasses.replace(problem, stats=LayerStats({**problem.stats, **changes}))


def hand_made(loss: dict[tuple[int, int], float], scale: dict[tuple[int, int], float], n: int) -> dict[str, Tensor]:
    tensors = {"fold_loss": torch.full((n, n), 1e30), "fold_scale": torch.zeros(n, n)}
    for name, values in (("fold_loss", loss), ("fold_scale", scale)):
        for (u, v), value in values.items():
            tensors[name][u, v] = value
    return tensors | {"output_norm": torch.ones(n)}


def one_row(weights: dict[int, float], n: int, **stats: Tensor) -> Problem:
    """A step of one row that weighs these experts so (they sum to 1) and no other."""
    logits = torch.full((1, n), -30.0)
    for u, w in weights.items():
        logits[0, u] = math.log(w)
    problem = make_problem("softmax_renorm", 1, n, len(weights))
    return dataclasses.replace(problem, logits=logits, spec=RouterSpec(n, len(weights)), stats=LayerStats(stats))


def step_of(problem: Problem) -> reference_published.Step:
    """The problem as the references of the other papers' methods read it."""
    rows = problem.reference
    logits = problem.logits.tolist() if problem.bias is None else [row.choice for row in rows]
    return reference_published.Step(problem.spec, rows, logits, problem.plain_stats)


def cost_of(name: str, problem: Problem) -> reference.Cost:
    stats = problem.plain_stats
    return {
        "router_mass": reference.mass_cost,
        "squared": reference.squared_cost,
        "static": reference.static_cost(stats["energy_mean"]),
        "base": reference.base_cost(problem.hidden.tolist(), stats["predictor_weight"], stats["predictor_bias"]),
        "nonlinear": reference.nonlinear_cost(problem.hidden.tolist(), stats),
        "oracle": reference.oracle_cost(problem.energies.tolist()),
    }[name]
