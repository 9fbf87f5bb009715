from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from moebudget import attach, parse
from moebudget.core.counters import COUNTERS, Counters
from moebudget.engines.transformers.teacher_forcing import aligned_steps
from moebudget.evaluate import InactivePolicyError, TextResult, evaluate_text
from moebudget.evaluate.text import require_active, sum_counters
from tests.calibrate import reference
from tests.calibrate.fitted import CASES, built, usual_stats
from tests.engines.transformers import tiny

WINDOWS = tiny.prompts(5, 12, seed=3)  # [n, S + 1]
BATCH = 3  # the last batch has two rows
POLICIES = ("native", "topk:k=1", "base:budget=3", "oracle:budget=2")

over_models = pytest.mark.parametrize("name", CASES)


def evaluate(name: str, *policies: str, windows: Tensor = WINDOWS, **settings: Any) -> list[TextResult]:
    policies_ = [parse(p) for p in policies]
    return evaluate_text(
        built(name), policies_, usual_stats(name), windows, **{"batch": BATCH, "quiet": True, **settings}
    )


@functools.cache
def usual(name: str) -> dict[str, TextResult]:
    return {r.policy.name: r for r in evaluate(name, *POLICIES)}


@torch.no_grad()
def plain_loss(name: str, prefill: int) -> Tensor:
    """Mean loss of each window by definition, -log p(next token)."""
    logits = built(name)(input_ids=WINDOWS[:, :-1], use_cache=False).logits.double().log_softmax(-1)
    losses = [
        [-float(logits[n, s, WINDOWS[n, s + 1]]) for s in range(prefill, WINDOWS.shape[1] - 1)]
        for n in range(len(WINDOWS))
    ]
    return torch.tensor(losses, dtype=torch.float64).mean(-1)


def decode(name: str, policy: str, windows: Tensor, prefill: int = 1) -> tuple[Tensor, Tensor, Counters]:
    """Loss [n] and most likely tokens [n, S - prefill], decoded token by token with a key-value cache."""
    model = built(name)
    losses, tokens = [], []
    with attach(model, policy, usual_stats(name), finished_ids=frozenset()) as run:
        for start in range(0, len(windows), BATCH):
            part = windows[start : start + BATCH]
            _, cache = tiny.forward(model, part[:, :prefill])
            loss, best = torch.zeros(len(part), dtype=torch.float64), []
            for s in range(prefill, part.shape[1] - 1):
                logits, cache = tiny.forward(model, part[:, s : s + 1], cache)
                probs = logits[:, 0].double().log_softmax(-1)
                loss -= probs.gather(-1, part[:, s + 1 : s + 2])[:, 0]
                best.append(logits[:, 0].argmax(-1))
            losses.append(loss / len(best))
            tokens.append(torch.stack(best, 1))
        return torch.cat(losses), torch.cat(tokens), run.counters


@over_models
@pytest.mark.parametrize("prefill", [1, 4])
def test_native_loss_is_cross_entropy(name: str, prefill: int) -> None:
    (result,) = evaluate(name, "native", prefill=prefill)
    torch.testing.assert_close(result.nll, plain_loss(name, prefill), rtol=1e-6, atol=1e-6)
    assert result.agreement.eq(1).all()
    assert result.tokens == len(WINDOWS) * (WINDOWS.shape[1] - 1 - prefill)


@over_models
@pytest.mark.parametrize("policy", ["base:budget=3", "base:budget=2,fill=drop", "topk:k=1", "oea:k0=1"])
def test_all_positions_at_once_equal_decoding_step_by_step(name: str, policy: str) -> None:
    (result,) = evaluate(name, policy)
    loss, tokens, counters = decode(name, policy, WINDOWS)
    _, native_tokens, _ = decode(name, "native", WINDOWS)
    torch.testing.assert_close(result.nll, loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.agreement, (tokens == native_tokens).double().mean(-1))
    assert (result.nll - plain_loss(name, 1)).abs().min() > 1e-4  # the policy has an effect
    for field in COUNTERS:
        assert result.counters.totals[field] == pytest.approx(counters.totals[field], abs=1e-3), field


@over_models
def test_prefill_of_several_tokens_equals_decoding_step_by_step(name: str) -> None:
    (result,) = evaluate(name, "base:budget=3", prefill=5)
    loss, _, counters = decode(name, "base:budget=3", WINDOWS, prefill=5)
    torch.testing.assert_close(result.nll, loss, rtol=0, atol=1e-5)
    assert result.counters.steps == counters.steps


@over_models
def test_smaller_last_batch_is_evaluated_correctly(name: str) -> None:
    alone = evaluate(name, *POLICIES, windows=WINDOWS[BATCH:])
    for single, together in zip(alone, usual(name).values(), strict=True):
        torch.testing.assert_close(together.nll[BATCH:], single.nll, rtol=0, atol=1e-6)
        torch.testing.assert_close(together.agreement[BATCH:], single.agreement)
        assert len(together.nll) == len(WINDOWS)


@over_models
def test_counters_cover_every_position_of_every_batch(name: str) -> None:
    positions = range(1, WINDOWS.shape[1] - 1)
    unions = []
    for layer in reference.layers_of(built(name), WINDOWS[:, :-1]):
        for rows in (range(BATCH), range(BATCH, len(WINDOWS))):
            unions += [len({u for b in rows for u in layer.ids[b, s].tolist()}) for s in positions]
    native = usual(name)["native"].counters
    assert native.steps == 2 * len(positions)
    assert native.totals["steps"] == len(unions)
    assert native.totals["rows"] == 2 * len(WINDOWS) * len(positions)
    assert native.native_union == native.fetched == pytest.approx(sum(unions) / len(unions))
    assert usual(name)["base:budget=3"].counters.fetched == 3
    assert usual(name)["oracle:budget=2"].counters.fetched == 2
    assert all(r.counters.steps == native.steps for r in usual(name).values())


@over_models
def test_budget_of_all_experts_keeps_native_loss(name: str) -> None:
    (result,) = evaluate(name, f"base:budget={tiny.EXPERTS}")
    torch.testing.assert_close(result.nll, usual(name)["native"].nll, rtol=0, atol=0)


def test_policies_do_not_influence_each_other() -> None:
    alone = [evaluate("qwen3_moe", policy)[0] for policy in POLICIES]
    for single, together in zip(alone, usual("qwen3_moe").values(), strict=True):
        assert torch.equal(single.nll, together.nll)
        assert single.counters == together.counters


@pytest.mark.parametrize("prefill", [0, -1, 11, 12])
def test_prefill_that_leaves_nothing_to_decode_is_refused(prefill: int) -> None:
    with pytest.raises(ValueError, match=f"prefill={prefill} must be between 1 and 10, the positions of a window"):
        evaluate("qwen3_moe", "native", prefill=prefill)


def test_longest_prefill_decodes_one_position() -> None:
    (result,) = evaluate("qwen3_moe", "native", prefill=10)
    assert result.tokens == len(WINDOWS)


def test_policy_active_in_no_step_is_refused() -> None:
    """A model that computes NaN: no row votes, so the routes are native and the loss means nothing."""
    model = tiny.build(tiny.available("qwen3_moe"))
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    policies = [parse("squared:budget=2")]
    with (
        pytest.warns(UserWarning, match="was active in 0 decode steps"),
        pytest.raises(InactivePolicyError, match="policy 'squared:budget=2' was active in 0 decode steps"),
    ):
        evaluate_text(model, policies, None, WINDOWS, batch=5, quiet=True)


def test_active_policy_passes() -> None:
    counters = Counters(2, dict.fromkeys(COUNTERS, 0.0))
    with pytest.raises(InactivePolicyError):
        require_active(parse("native"), counters)
    require_active(parse("native"), Counters(2, {**counters.totals, "steps": 2.0}))


def test_steps_name_the_flattened_tokens_of_each_position() -> None:
    decode_ = torch.tensor([[False, True, True], [False, True, False]])
    assert aligned_steps(decode_, 2).tolist() == [[-1, -1], [1, 4], [2, -1]]


def test_steps_of_several_batches_are_separate_and_a_smaller_last_batch_is_padded() -> None:
    decode_ = torch.tensor([[False, True, True], [False, True, False], [True, False, True]])
    assert aligned_steps(decode_, 2).tolist() == [[-1, -1], [1, 4], [2, -1], [6, -1], [-1, -1], [8, -1]]


@pytest.mark.parametrize("batch", [1, 3])
def test_batches_that_go_through_the_model_together_share_no_experts(batch: int) -> None:
    model = built("qwen3_moe")
    alone = [
        evaluate_text(model, [parse("squared:budget=4")], None, part, batch=batch, quiet=True)[0]
        for part in WINDOWS.split(batch)
    ]
    (together,) = evaluate_text(model, [parse("squared:budget=4")], None, WINDOWS, batch=batch, quiet=True)
    torch.testing.assert_close(together.nll, torch.cat([r.nll for r in alone]))
    assert together.counters.totals == pytest.approx(sum_counters([r.counters for r in alone]).totals)


def test_counters_of_several_batches_add_up() -> None:
    parts = [Counters(2, {name: float(i + j) for j, name in enumerate(COUNTERS)}, (i, 1.0)) for i in range(3)]
    total = sum_counters(parts)
    assert total.layers == 2
    assert total.totals == {name: 3.0 + 3 * j for j, name in enumerate(COUNTERS)}
    assert total.by_layer == (3, 3)
