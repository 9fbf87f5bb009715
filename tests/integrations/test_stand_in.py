"""The fill `stand_in` in a model: what is added to a layer's output, against loops over rows and lost routes."""

from __future__ import annotations

import math

import pytest
import torch

from moebudget import attach
from tests.calibrate import reference
from tests.calibrate.fitted import CASES, built, fit, usual_stats
from tests.integrations.tiny import experts_modules, forward, passes, prompts, recorded

NEEDS = {"predictor_weight", "predictor_bias", "output_direction"}
STEPS = torch.tensor([[3, 12, -1, 30], [4, 13, 22, -1]])


@pytest.mark.parametrize("name", CASES)
def test_a_layer_is_moved_by_other_than_its_lost_routes(name: str) -> None:
    model, words = built(name), prompts(4, 9)
    stats = fit(model, reference.make_corpus(), needs=NEEDS)
    outputs = []
    with recorded(model) as plain:
        forward(model, words)
    with (
        recorded(model) as calls,
        attach(model, "base:budget=3,fill=stand_in", stats) as run,
        run.decode_steps(STEPS),
    ):
        hook = experts_modules(model)[0].register_forward_hook(lambda _m, _a, out: outputs.append(out))
        forward(model, words)
        hook.remove()
    before, after = passes(model, plain)[0][0], passes(model, calls)[0][0]
    experts = experts_modules(model)[0]
    moved = outputs[0] - type(experts).forward(experts, after.hidden, after.ids, after.weights)
    a, b = stats.tensors["predictor_weight"][0].double(), stats.tensors["predictor_bias"][0].double()
    wanted = torch.zeros_like(moved, dtype=torch.float64)
    for t in STEPS[STEPS >= 0].tolist():
        z = after.hidden[t].double() / after.hidden[t].double().norm()
        runs = {u for u, w in zip(after.ids[t].tolist(), after.weights[t].tolist(), strict=True) if w}
        for u, w in zip(before.ids[t].tolist(), before.weights[t].tolist(), strict=True):
            if u not in runs:
                length = math.sqrt(math.exp(float(a[u] @ z + b[u])))
                wanted[t] += w * length * stats.tensors["output_direction"][0, u].double()
    assert float(wanted.norm()) > 0
    torch.testing.assert_close(moved.double(), wanted, rtol=1e-3, atol=1e-6)


def test_a_budget_of_all_experts_moves_the_output_or_a_missing_direction_is_ignored() -> None:
    model, words = built("qwen3_moe"), prompts(4, 9)
    stats = fit(model, reference.make_corpus(), needs=NEEDS)
    free = forward(model, words)[0]
    with attach(model, "base:budget=40,fill=stand_in", stats) as run, run.decode_steps(STEPS):
        assert torch.equal(forward(model, words)[0], free)
    with (
        pytest.raises(LookupError, match=r"'output_direction'.*moebudget calibrate MODEL --data TEXT --for POLICY"),
        attach(model, "base:budget=3,fill=stand_in", usual_stats("qwen3_moe")),
    ):
        pass


def test_prefill_is_moved_by_the_decode_rule_or_decoding_by_the_prefill_rule() -> None:
    """Each rule shifts its own rows: together they give what each gives alone in the first layer."""
    model, words = built("qwen3_moe"), prompts(4, 9)
    stats = fit(model, reference.make_corpus(), needs=NEEDS)
    stand_in, plain = "base:budget=3,fill=stand_in", "base:budget=3"
    found = {}
    for decode, prefill in ((stand_in, stand_in), (stand_in, plain), (plain, stand_in), (plain, plain)):
        outputs: list[torch.Tensor] = []
        with attach(model, decode, stats, prefill=prefill) as run, run.decode_steps(STEPS):
            hook = experts_modules(model)[0].register_forward_hook(
                lambda _m, _a, out, outputs=outputs: outputs.append(out)
            )
            forward(model, words)
            hook.remove()
        found[decode, prefill] = outputs[0]
    both, base = found[stand_in, stand_in] - found[plain, plain], found[plain, plain]
    torch.testing.assert_close(both, found[stand_in, plain] + found[plain, stand_in] - 2 * base)
    decoding = torch.zeros(len(both), dtype=torch.bool).index_fill(0, STEPS[STEPS >= 0], True)
    assert float((found[stand_in, plain] - base)[~decoding].abs().max()) == 0
    assert float((found[plain, stand_in] - base)[decoding].abs().max()) == 0
    assert float(both[decoding].norm()) > 0 < float(both[~decoding].norm())
