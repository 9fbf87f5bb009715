"""The fill `mean_direction` in a model: the shift of a layer's output equals loops over rows and lost routes."""

from __future__ import annotations

import math

import pytest
import torch

from moebudget import attach
from tests.calibrate import reference
from tests.calibrate.fitted import CASES, built, fit, usual_stats
from tests.engines.transformers.tiny import experts_modules, forward, passes, prompts, recorded

NEEDS = {"predictor_weight", "predictor_bias", "output_direction"}
STEPS = torch.tensor([[3, 12, -1, 30], [4, 13, 22, -1]])


@pytest.mark.parametrize("name", CASES)
def test_the_output_is_shifted_by_the_mean_directions_of_lost_routes(name: str) -> None:
    model, words = built(name), prompts(4, 9)
    stats = fit(model, reference.make_corpus(), needs=NEEDS)
    outputs = []
    with recorded(model) as plain:
        forward(model, words)
    with (
        recorded(model) as calls,
        attach(model, "base:budget=3,fill=mean_direction", stats) as run,
        run.decode_steps(STEPS),
    ):
        hook = experts_modules(model)[0].register_forward_hook(lambda _m, _a, out: outputs.append(out))
        forward(model, words)
        hook.remove()
    before, after = passes(model, plain)[0][0], passes(model, calls)[0][0]
    experts = experts_modules(model)[0]
    shift = outputs[0] - type(experts).forward(experts, after.hidden, after.ids, after.weights)
    a, b = stats.tensors["predictor_weight"][0].double(), stats.tensors["predictor_bias"][0].double()
    expected = torch.zeros_like(shift, dtype=torch.float64)
    for t in STEPS[STEPS >= 0].tolist():
        z = after.hidden[t].double() / after.hidden[t].double().norm()
        runs = {u for u, w in zip(after.ids[t].tolist(), after.weights[t].tolist(), strict=True) if w}
        for u, w in zip(before.ids[t].tolist(), before.weights[t].tolist(), strict=True):
            if u not in runs:
                length = math.sqrt(math.exp(float(a[u] @ z + b[u])))
                expected[t] += w * length * stats.tensors["output_direction"][0, u].double()
    assert float(expected.norm()) > 0
    torch.testing.assert_close(shift.double(), expected, rtol=1e-3, atol=1e-6)


def test_a_budget_of_all_experts_shifts_nothing() -> None:
    model, words = built("qwen3_moe"), prompts(4, 9)
    stats = fit(model, reference.make_corpus(), needs=NEEDS)
    native = forward(model, words)[0]
    with attach(model, "base:budget=40,fill=mean_direction", stats) as run, run.decode_steps(STEPS):
        assert torch.equal(forward(model, words)[0], native)


def test_missing_mean_directions_are_refused() -> None:
    with (
        pytest.raises(LookupError, match=r"'output_direction'.*moebudget calibrate MODEL --data TEXT --for POLICY"),
        attach(built("qwen3_moe"), "base:budget=3,fill=mean_direction", usual_stats("qwen3_moe")),
    ):
        pass


def test_decode_and_prefill_policies_shift_only_their_rows() -> None:
    """In the first layer, the shifts of both policies together equal the sum of the shifts of each alone."""
    model, words = built("qwen3_moe"), prompts(4, 9)
    stats = fit(model, reference.make_corpus(), needs=NEEDS)
    direction, plain = "base:budget=3,fill=mean_direction", "base:budget=3"
    first_outputs = {}
    for decode, prefill in ((direction, direction), (direction, plain), (plain, direction), (plain, plain)):
        outputs: list[torch.Tensor] = []
        with attach(model, decode, stats, prefill=prefill) as run, run.decode_steps(STEPS):
            hook = experts_modules(model)[0].register_forward_hook(
                lambda _m, _a, out, outputs=outputs: outputs.append(out)
            )
            forward(model, words)
            hook.remove()
        first_outputs[decode, prefill] = outputs[0]
    without = first_outputs[plain, plain]
    shifts = {policies: outputs - without for policies, outputs in first_outputs.items()}
    both, decode_shift, prefill_shift = (
        shifts[policies] for policies in ((direction, direction), (direction, plain), (plain, direction))
    )
    torch.testing.assert_close(both, decode_shift + prefill_shift)
    decoding = torch.zeros(len(both), dtype=torch.bool).index_fill(0, STEPS[STEPS >= 0], True)
    assert float(decode_shift[~decoding].abs().max()) == 0
    assert float(prefill_shift[decoding].abs().max()) == 0
    assert float(both[decoding].norm()) > 0 < float(both[~decoding].norm())
