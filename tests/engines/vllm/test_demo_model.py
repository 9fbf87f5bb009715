"""The trained demo model: vLLM and transformers decode it alike under the same policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import ROOM, Drive, start
from tests.engines.vllm.demo_model import MODEL, POLICY, PROMPTS, TOKENS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
SAME = ("steps", "rows", "native_union", "fetched", "backfilled", "dropped", "rescued", "nonfinite", "unrestricted")


def test_vllm_and_transformers_decode_alike(tmp_path: Path, drive: Drive) -> None:
    start(f"{ROOM}.demo_model", str(tmp_path), log=tmp_path / "log.txt")
    expected = json.loads((tmp_path / "answers.json").read_text())
    config = {"moebudget": {"policy": POLICY, "stats": str(tmp_path / "stats.safetensors")}}
    engine = {"model": str(MODEL), "dtype": "float32", "max_num_batched_tokens": 256, "additional_config": config}
    requests = [{"prompt": prompt, "tokens": TOKENS} for prompt in PROMPTS]
    [answer] = drive([{"engine": engine, "phases": [{"requests": requests}], "logprobs": True}])
    assert "error" not in answer, answer
    [phase] = answer["phases"]
    assert phase["tokens"] == expected["tokens"]
    counters = phase["states"][0]["counters"]
    assert {name: counters[name] for name in SAME} == {name: expected["counters"][name] for name in SAME}
    assert counters["steps"] == (TOKENS - 1) * counters["layers"]
    assert counters["fetched_mean"] == 9 < counters["native_union_mean"]
    loss, expected_loss = (
        sum(map(sum, rows)) / len(rows) / TOKENS for rows in (phase["logprobs"], expected["logprobs"])
    )
    assert loss == pytest.approx(expected_loss, abs=1e-4)
