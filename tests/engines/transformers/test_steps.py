"""Decode steps among other rows of a forward pass: wider rows, prefill policies, merged rows."""

from __future__ import annotations

import torch

from moebudget import attach, parse
from moebudget.engines.transformers.attach import place_experts
from moebudget.engines.transformers.steps import merge_rows, prefill_rows
from tests.engines.transformers import tiny


def test_prefill_rows_are_those_that_no_decode_step_names() -> None:
    steps = torch.tensor([[1, 4], [-1, 2]])
    assert prefill_rows(6, steps, steps.device).tolist() == [[0, -1, -1, 3, -1, 5]]
    assert prefill_rows(3, None, steps.device).tolist() == [[0, 1, 2]]


def test_merged_rows_are_decoded_if_a_step_names_them() -> None:
    first = (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2))
    decoded = (torch.ones(3, 3, dtype=torch.int64), torch.ones(3, 3))
    ids, weights = merge_rows(first, decoded, torch.tensor([[1]]))
    assert ids.tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0]]
    assert weights.tolist() == [[0, 0, 0], [1, 1, 1], [0, 0, 0]]


@torch.no_grad()
def test_wider_decode_rows_leave_prefill_rows_native() -> None:
    """OEA with k_max above K: decode rows execute up to 5 experts, prefill rows keep their 3."""
    model = tiny.build(tiny.available("qwen3_moe"))
    ids = tiny.prompts(4, 6, seed=3)
    steps = torch.arange(24).view(4, 6).T[3:]  # the first three positions are prefill
    plain = model(input_ids=ids, use_cache=False).logits
    with attach(model, f"oea:k0={tiny.TOP_K},k_max=5") as run, run.decode_steps(steps), tiny.recorded(model) as calls:
        wide = model(input_ids=ids, use_cache=False).logits
    # Five slots are summed in another order.
    torch.testing.assert_close(wide[:, :3], plain[:, :3], rtol=1e-4, atol=1e-4)
    assert (wide[:, 3:] - plain[:, 3:]).abs().max() > 1e-2
    used = (calls[0].weights != 0).sum(-1).view(4, 6)
    assert calls[0].ids.shape[-1] == 5
    assert (used[:, :3] == tiny.TOP_K).all()
    assert used[:, 3:].max() == 5
    assert run.counters.fetched == run.counters.native_union


@torch.no_grad()
def test_prefill_policies_act_on_prefill_rows_only() -> None:
    model, ids = tiny.build(tiny.available("qwen3_moe")), tiny.prompts(4, 6, seed=3)
    with tiny.recorded(model) as plain:
        model(input_ids=ids, use_cache=False)
    steps = torch.arange(24).view(4, 6).T[4:]
    decoding = torch.arange(6).repeat(4) >= 4
    with attach(model, "oea:k0=2", prefill="topk:k=1") as run, tiny.recorded(model) as calls:
        with run.decode_steps(steps):
            model(input_ids=ids, use_cache=False)
        assert run.prefill_counters is not None
        assert run.prefill_counters.rows == 16  # 4 of 6 positions, one step per pass
        assert run.counters.rows == 4
        assert ((calls[0].weights != 0).sum(-1)[~decoding] == 1).all()
        assert torch.equal(calls[0].ids[~decoding][:, 0], plain[0].ids[~decoding][:, 0])
        assert ((calls[0].weights != 0).sum(-1)[decoding] > 1).all()
        run.reset()
        assert run.prefill_counters.totals["rows"] == run.counters.totals["rows"] == 0
        with run.decode_steps(steps):
            model(input_ids=ids, use_cache=False)
        assert run.prefill_counters.totals["rows"] == 2 * 16
    with attach(model, "oea:k0=2") as run, run.decode_steps(steps), tiny.recorded(model) as alone:
        model(input_ids=ids, use_cache=False)
        assert run.prefill_counters is None
    assert torch.equal(alone[0].ids[~decoding], plain[0].ids[~decoding])
    assert torch.equal(alone[0].ids[decoding], calls[0].ids[decoding])


def test_prefill_policies_act_in_generate() -> None:
    model, prompts = tiny.build(tiny.available("qwen3_moe")), tiny.prompts(2, 5, seed=1)
    with attach(model, "native", prefill="topk:k=1") as run:
        tiny.generate(model, prompts, 4)
    assert run.prefill_counters is not None
    assert run.prefill_counters.rows == 10
    assert run.counters.rows == 2


def test_device_aware_policies_read_the_placement() -> None:
    model, prompts = tiny.build(tiny.available("qwen3_moe")), tiny.prompts(4, 5, seed=1)
    placed = place_experts(model, None, 3)
    assert placed.tensors["placement_device"][0].tolist() == [u * 3 // tiny.EXPERTS for u in range(tiny.EXPERTS)]
    for policy in ("xshare_balanced:m=6", "caee:theta=0.5", "xshare_ep:k0=1,m_device=1"):
        with attach(model, policy, placed) as run:
            tiny.generate(model, prompts, 4)
        assert 0 < run.counters.fetched < tiny.EXPERTS
    assert parse("caee:theta=0.5").needs == {"placement_device", "placement_cost"}
