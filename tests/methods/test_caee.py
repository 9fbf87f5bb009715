"""CAEE: facts that the paper, or a derivation from it, promises."""

from __future__ import annotations

import pytest
import torch

from moebudget.core.router import RouterSpec
from moebudget.core.types import LayerStats
from moebudget.methods.registry import parse
from tests.conftest import make_problem, over_kinds, used_slots
from tests.methods import reference_published
from tests.methods.steps import (
    loads,
    members,
    one_row,
    run,
    sized,
    step_of,
    union_of,
    with_stats,
)


@over_kinds
@pytest.mark.parametrize("text", ["caee:theta=0.5", "caee:theta=0.5,guard=no", "caee_offload:theta=0.6"])
def test_caee_expansion_keeps_the_slowest_devices_time(text: str, kind: str) -> None:
    for problem in sized(kind):
        policy, step = problem.policy(text), step_of(problem)
        scores = policy.score(problem.batch, problem.stats)
        mask = policy.select.must(scores, problem.batch, problem.stats).mask  # type: ignore[attr-defined]
        must, whole = set(mask.nonzero()[:, 0].tolist()), members(policy, problem)
        assert must <= whole <= union_of(problem)
        assert reference_published.slowest(step, whole) == reference_published.slowest(step, must)
        assert whole == reference_published.expand(step, must)


@over_kinds
def test_caee_at_equal_costs_is_the_same_for_bool_costs(kind: str) -> None:
    """Bool costs skip the loop over experts; one set of costs for several steps at once is the same as one by one."""
    for text in ("caee:theta=0.5", "caee_offload:theta=0.6", "worth:least=0.5,cost=squared"):
        several = []
        for seed in range(3):
            problem = make_problem(kind, 16, 64, 8, seed=seed)
            missing = problem.stats["placement_cost"] > 0
            masks = []
            for cost in (missing, missing.float() * 0.3):
                stats = LayerStats({**problem.stats.tensors, "placement_cost": cost})
                masks.append(problem.policy(text).active(problem.batch, stats).mask)
            assert torch.equal(*masks)
            several.append((problem, missing, masks[0]))
        first = several[0][0]
        logits = torch.stack([problem.logits for problem, _, _ in several])
        hidden = torch.stack([problem.hidden for problem, _, _ in several])
        batch = first.spec(hidden, logits, bias=first.bias)
        device = first.stats["placement_device"]
        stats = LayerStats({"placement_device": device, "placement_cost": torch.stack([m for _, m, _ in several])})
        found = first.policy(text).active(batch, stats).mask
        for i, (problem, missing, _) in enumerate(several):
            own = LayerStats({"placement_device": device, "placement_cost": missing})
            alone = first.spec(problem.hidden, problem.logits, bias=first.bias)
            assert torch.equal(found[i], first.policy(text).active(alone, own).mask)


def test_caee_at_uniform_cost_fills_every_device_up() -> None:
    problem = make_problem("sigmoid_bias", 16, 64, 8)
    problem = with_stats(problem, placement_cost=torch.ones(64))
    most = loads(union_of(problem), problem)
    for theta in (1.0, 3.0, 6.0):
        guarded = problem.policy(f"caee:theta={theta}")
        must = reference_published.caee_must(step_of(problem), theta)
        peak = max(loads(must, problem))
        assert loads(members(guarded, problem), problem) == [min(peak, room) for room in most]


def test_caee_tries_experts_by_importance() -> None:
    """One slot is free on the second device: expert 2 (.25) takes it, not expert 1 (.2) or 3 (.1)."""
    problem = one_row({0: 0.45, 1: 0.2, 2: 0.25, 3: 0.1}, 4)
    problem = with_stats(problem, placement_device=torch.tensor([0, 1, 1, 1]), placement_cost=torch.ones(4))
    assert members("caee:theta=0.4", problem) == {0, 2}


@over_kinds
def test_caee_offload_keeps_cached_experts(kind: str) -> None:
    for problem in sized(kind):
        cached = {u for u, cost in enumerate(problem.plain_stats["placement_cost"]) if cost == 0}
        assert cached & union_of(problem) or problem.rows == 1
        for theta in (0.01, 0.5, 0.9):
            assert cached & union_of(problem) <= members(f"caee_offload:theta={theta}", problem)


def test_caee_offload_follows_the_score_without_the_bias() -> None:
    """The bias ranks expert 0 first, but expert 1 holds three quarters of the score."""
    logits, bias = torch.tensor([[-1.0, 3.0, -9.0]]), torch.tensor([5.0, 0.0, 0.0])
    spec, cost = RouterSpec(3, 2, "sigmoid"), torch.ones(3)
    batch = spec(torch.ones(1, 2), logits, bias=bias)
    stats = LayerStats({"placement_device": torch.zeros(3, dtype=torch.int64), "placement_cost": cost})
    assert batch.ids.tolist() == [[0, 1]]
    assert parse("caee_offload:theta=0.7").active(batch, stats).mask.tolist() == [False, True, False]


@pytest.mark.parametrize("kind", ["sigmoid_bias", "softmax"])
def test_caee_without_a_guard_runs_the_largest_in_a_small_batch(kind: str) -> None:
    """No sum reaches theta, so one expert is sure, and one more on every other device costs nothing."""
    problem = with_stats(make_problem(kind, 2, 64, 8), placement_cost=torch.ones(64))
    kept, total = members("caee:theta=50,guard=no", problem), reference_published.importance(step_of(problem))
    assert kept == reference_published.expand(step_of(problem), {total.index(max(total))})
    assert max(loads(kept, problem)) == 1
    routing = run("caee:theta=50,guard=no", problem)
    assert all(used_slots(routing))
    assert set(routing.ids.flatten().tolist()) <= kept
    assert union_of(problem, 1) <= members("caee:theta=50", problem)


@pytest.mark.parametrize("kind", ["groups_max", "groups_top2", "sigmoid_bias"])
def test_caee_compensates_by_the_score_across_groups(kind: str) -> None:
    """On purpose: a row that loses a route takes the set's best by score, though the model closed its group."""
    problem = make_problem(kind, 16, 64, 4)
    step, otherwise = step_of(problem), 0
    kept = members("caee:theta=1", problem)
    routing = run("caee:theta=1", problem)
    for row, routes in zip(step.rows, used_slots(routing), strict=True):
        if not set(row.ids) <= kept:
            assert [u for u, _ in routes] == sorted(kept, key=lambda u, row=row: (-row.probs[u], u))[:4]
            otherwise += {u for u, _ in routes} != set(sorted(kept, key=lambda u, row=row: (-row.choice[u], u))[:4])
    assert otherwise
