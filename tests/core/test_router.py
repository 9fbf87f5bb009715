from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget.core.router import RouterSpec
from tests.conftest import HIDDEN, KINDS, make_problem, make_spec, over_kinds, problems
from tests.methods import reference

INF = math.inf


def hidden_for(logits: Tensor) -> Tensor:
    return torch.ones(*logits.shape[:-1], HIDDEN)


def model_routes(spec: RouterSpec, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Routes as models of transformers compute them: torch.topk, which breaks ties as it likes."""
    choice, probs = spec.scores(logits, bias)
    ids = choice.topk(spec.top_k, -1).indices
    weights = probs.gather(-1, ids)
    return ids, weights / (weights.sum(-1, keepdim=True) if spec.renormalize else 1) * spec.scale


@over_kinds
def test_native_routing_agrees_with_the_specification(kind: str) -> None:
    for problem in problems(kind):
        batch, rows = problem.batch, problem.reference
        assert batch.ids.tolist() == [row.ids for row in rows], problem.shape
        for name in ("weights", "factor", "probs", "choice"):
            wanted = torch.tensor([getattr(row, name) for row in rows]).reshape(getattr(batch, name).shape)
            torch.testing.assert_close(getattr(batch, name), wanted, rtol=1e-5, atol=1e-6)
        assert batch.decode.tolist() == [True] * problem.rows
        assert batch.renormalize == problem.spec.renormalize


@over_kinds
def test_weight_of_any_expert_is_probs_times_factor(kind: str) -> None:
    for problem in problems(kind):
        batch = problem.batch
        own = batch.probs.gather(-1, batch.ids) * batch.factor[:, None]
        torch.testing.assert_close(batch.weights, own, rtol=1e-6, atol=0)


@over_kinds
@pytest.mark.parametrize("k", [1, 2, 8])
def test_native_weights_are_rounded_as_the_models(kind: str, k: int) -> None:
    """Models divide by the sum and then scale; with one route that gives the scale itself, so that rows tie."""
    problem = make_problem(kind, 64, 60, k)
    batch = problem.batch
    own = batch.probs.gather(-1, batch.ids)
    own = own / (own.sum(-1, keepdim=True) if problem.spec.renormalize else 1) * problem.spec.scale
    assert torch.equal(batch.weights, own)


def test_norm_topk_prob_false_is_not_renormalised() -> None:
    spec, logits = RouterSpec(4, 2, renormalize=False), torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    batch = spec(hidden_for(logits), logits)
    assert batch.ids.tolist() == [[3, 2]]
    assert batch.weights[0].tolist() == pytest.approx([0.6439142599, 0.2368828181])


def test_norm_topk_prob_true_is_a_softmax_over_the_selected_logits() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    batch = RouterSpec(4, 2)(hidden_for(logits), logits)
    assert batch.weights[0].tolist() == pytest.approx(torch.tensor([3.0, 2.0]).softmax(-1).tolist())


@pytest.mark.parametrize("renormalize", [True, False])
def test_routed_scaling_factor_is_applied_once(renormalize: bool) -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    once = RouterSpec(8, 2, "sigmoid", renormalize)(hidden_for(logits), logits)
    scaled = RouterSpec(8, 2, "sigmoid", renormalize, 2.5)(hidden_for(logits), logits)
    torch.testing.assert_close(scaled.weights, 2.5 * once.weights)
    torch.testing.assert_close(scaled.factor, 2.5 * once.factor)
    if renormalize:
        torch.testing.assert_close(scaled.weights.sum(-1), torch.full((5,), 2.5))


def test_bias_ranks_but_does_not_weigh() -> None:
    spec, logits, bias = (
        RouterSpec(4, 2, "sigmoid"),
        torch.tensor([[3.0, 2.0, 1.0, 0.0]]),
        torch.tensor([-9.0, 0, 0, 9]),
    )
    batch = spec(hidden_for(logits), logits, bias=bias)
    a, b = 1 / (1 + math.exp(-0.0)), 1 / (1 + math.exp(-2.0))
    assert batch.ids.tolist() == [[3, 1]]
    assert batch.weights[0].tolist() == pytest.approx([a / (a + b), b / (a + b)])


@pytest.mark.parametrize(("group_score", "expected"), [("max", [[0, 1]]), ("top2", [[2, 3]])])
def test_closed_groups_are_not_chosen_from(group_score: Any, expected: list[list[int]]) -> None:
    """Group 0 has the best expert, group 1 the best two; experts 4 and 5 are second best but in a closed group."""
    spec = RouterSpec(6, 2, "sigmoid", groups=3, open_groups=1, group_score=group_score)
    logits = torch.tensor([[3.0, -3.0, 2.5, 2.4, 2.9, -2.9]])
    batch = spec(hidden_for(logits), logits)
    assert batch.ids.tolist() == expected
    closed = [u for u in range(6) if u not in expected[0]]
    assert batch.choice[0, closed].tolist() == [-INF] * 4
    assert torch.isfinite(batch.probs).all()


@over_kinds
def test_equal_logits_take_the_lowest_experts(kind: str) -> None:
    for n, k in ((8, 2), (60, 4), (64, 8)):
        spec, logits = make_spec(kind, n, k), torch.full((3, n), 0.7)
        batch = spec(hidden_for(logits), logits, bias=None)
        assert batch.ids.tolist() == [list(range(k))] * 3


@over_kinds
@pytest.mark.parametrize("n", [8, 60, 64])
def test_ties_of_bfloat16_logits_keep_the_models_routes(kind: str, n: int) -> None:
    """torch.topk breaks ties another way than we do; its ids and weights must survive bit for bit."""
    spec = make_spec(kind, n, 4)
    logits = torch.randn(64, n, generator=torch.Generator().manual_seed(n)).mul(4).round().div(4).bfloat16()
    ids, weights = model_routes(spec, logits)
    if n > 16:
        assert not torch.equal(ids, spec(hidden_for(logits), logits).ids), "no tie was broken another way"
    batch = spec(hidden_for(logits), logits, routes=(ids, weights))
    assert torch.equal(batch.ids, ids)
    assert torch.equal(batch.weights, weights)


def best_inside(batch: Any, row: int, k: int) -> set[int]:
    return set(reference.best_first(batch.choice[row].tolist(), k))


@over_kinds
def test_choice_agrees_with_the_models_routes_on_ties(kind: str) -> None:
    spec = make_spec(kind, 60, 4)
    logits = torch.randn(64, 60, generator=torch.Generator().manual_seed(1)).mul(2).round().div(2).bfloat16()
    batch = spec(hidden_for(logits), logits, routes=model_routes(spec, logits))
    for t in range(64):
        assert best_inside(batch, t, 4) == set(batch.ids[t].tolist())


def test_choice_agrees_with_routes_ranked_in_lower_precision() -> None:
    logits = torch.tensor([[1.0, 1.001, 1.002, 0.0]])  # bfloat16 holds all three as 1.0
    batch = RouterSpec(4, 1)(hidden_for(logits), logits, routes=(torch.tensor([[0]]), torch.tensor([[1.0]])))
    assert best_inside(batch, 0, 1) == {0}


def test_choice_agrees_with_routes_after_a_tie_between_groups() -> None:
    """All groups tie: we would open groups 0 and 1, this model opened 0 and 3, or 2 and 3."""
    spec, logits = RouterSpec(8, 2, "sigmoid", groups=4, open_groups=2, group_score="top2"), torch.zeros(2, 8)
    ids = torch.tensor([[0, 6], [4, 6]])
    batch = spec(hidden_for(logits), logits, routes=(ids, torch.full((2, 2), 0.5)))
    assert batch.ids.tolist() == ids.tolist()
    assert [best_inside(batch, t, 2) for t in range(2)] == [{0, 6}, {4, 6}]


def test_energy_is_reordered_with_its_routes() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    routes = (torch.tensor([[1, 3, 2]]), torch.tensor([[0.1, 0.7, 0.2]]))
    batch = RouterSpec(4, 3)(hidden_for(logits), logits, routes=routes, energy=torch.tensor([[10.0, 30.0, 20.0]]))
    assert batch.energy is not None
    assert batch.ids.tolist() == [[3, 2, 1]]
    assert batch.energy.tolist() == [[30.0, 20.0, 10.0]]
    assert batch.weights[0].tolist() == pytest.approx([0.7, 0.2, 0.1])


@over_kinds
@pytest.mark.parametrize("given", [False, True])
def test_padding_and_nonfinite_rows_have_ids_in_range_and_no_vote(kind: str, given: bool) -> None:
    """Rows: real, padding, padding of NaN, real with a NaN logit, real with an infinite hidden state."""
    problem = make_problem(kind, 5, 8, 2)
    hidden, logits = problem.hidden.clone(), problem.logits.clone()
    logits[2], hidden[2], logits[3, 5], hidden[4, 0] = math.nan, math.nan, math.nan, INF
    ids, weights = problem.batch.ids.clone(), problem.batch.weights.clone()
    ids[1:3], ids[3:], weights[1:] = -1, 2**40, 1e30
    batch = problem.spec(
        hidden,
        logits,
        bias=problem.bias,
        kind=torch.tensor([True, False, False, True, True]),
        routes=(ids, weights) if given else None,
    )
    assert ((batch.ids >= 0) & (batch.ids < 8)).all()
    assert batch.decode.tolist() == [True, False, False, False, False]
    assert torch.equal(batch.ids[0], problem.batch.ids[0])
    assert torch.equal(batch.weights[0], problem.batch.weights[0])
    assert batch.weights[1:3].tolist() == [[0.0, 0.0]] * 2
    assert batch.weights[3:].isnan().all()


@pytest.mark.parametrize("kind", ["sigmoid_bias", "groups_top2"])
def test_scores_that_underflow_keep_a_row_finite(kind: str) -> None:
    """sigmoid(-200) is 0 in float32; models divide by the sum plus 1e-20, so such a row weighs 0, not NaN."""
    spec, logits = make_spec(kind, 8, 2), torch.full((1, 8), -200.0)
    batch = spec(hidden_for(logits), logits)
    assert batch.decode.tolist() == [True]
    assert batch.weights.tolist() == [[0.0, 0.0]]
    assert torch.isfinite(batch.probs * batch.factor[:, None]).all()


@over_kinds
def test_low_precision_logits_are_scored_in_float32(kind: str) -> None:
    problem = make_problem(kind, 3, 8, 2)
    batch = problem.spec(problem.hidden.bfloat16(), problem.logits.bfloat16(), bias=problem.bias)
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and value.is_floating_point() and field.name != "hidden":
            assert value.dtype is torch.float32, field.name


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 9}, "top_k=9 .*8"),
        ({"scoring": "tanh"}, "'tanh'.*'softmax' and 'sigmoid'"),
        ({"groups": 3}, "groups=3"),
        ({"groups": 0}, "groups=0"),
        ({"groups": 4, "open_groups": 5}, "open_groups=5"),
        ({"groups": 4, "open_groups": 0}, "open_groups=0"),
        ({"groups": 8, "open_groups": 1}, "1 open groups hold 1 experts, fewer than top_k=2"),
        ({"groups": 4, "open_groups": 2, "group_score": "sum"}, "'sum'"),
        ({"groups": 8, "open_groups": 4, "group_score": "top2"}, "groups=8"),
    ],
)
def test_impossible_routers_are_refused(facts: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RouterSpec(**{"num_experts": 8, "top_k": 2, **facts})


def test_kinds_cover_every_setting_of_a_router() -> None:
    specs = [make_spec(kind, 64, 8) for kind in KINDS]
    assert {(s.scoring, s.renormalize) for s in specs} >= {("softmax", True), ("softmax", False), ("sigmoid", True)}
    assert {s.group_score for s in specs if s.groups > s.open_groups} == {"max", "top2"}


@pytest.mark.parametrize("name", ["kind", "request", "accept"])
@pytest.mark.parametrize("shape", [(4,), (6,), (), (5, 1), (5, 8)])
def test_values_of_another_number_of_rows_are_refused(name: str, shape: tuple[int, ...]) -> None:
    """A shape that broadcasts would be read as something else without a word."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    values = torch.ones(shape, dtype=torch.bool if name == "kind" else torch.int64)
    with pytest.raises(
        ValueError, match=f"^{name} has shape .*the logits have .5,. rows: give one {name} value per row"
    ):
        RouterSpec(8, 2)(hidden_for(logits), logits, **{name: values})  # type: ignore[arg-type]


def test_requests_acceptance_and_logits_are_kept() -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    request, accept = torch.tensor([0, 0, 1, 1, 1]), torch.rand(5)
    batch = RouterSpec(8, 2)(hidden_for(logits), logits.bfloat16(), request=request, accept=accept)
    assert batch.request is request
    assert batch.accept is accept
    assert torch.equal(batch.logits, logits.bfloat16().float())
    grouped = RouterSpec(8, 2, groups=4, open_groups=1)(hidden_for(logits), logits)
    assert torch.equal(grouped.logits, torch.where(grouped.choice > -INF, logits, -INF))
    bias = torch.linspace(0, 1, 8)
    biased = RouterSpec(8, 2, "sigmoid")(hidden_for(logits), logits, bias=bias)
    assert torch.equal(biased.logits, biased.choice)
