"""Check of `moebudget diagnose --engine vllm` on four cases of known answers, in two engines with random weights.

    python -m experiments.checks.check_diagnose                     # one H200, about three minutes

One engine serves Qwen3-30B-A3B's sizes at 1, 16 and 256 rows, the other a model of tiny layers in eager mode, which
the host binds. Both start together and are timed in turns. A row of benchmarks/results/diagnose.jsonl holds the answer
and the expected one, and the measured time per expert over the time that its bytes take at the bandwidth of a copy. If
experts bind the step, that ratio should be 1 to within TOLERANCE. The exit code is 1 if an answer or a price is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moebudget.bench.diagnose.bandwidth import copy_bandwidth
from moebudget.bench.diagnose.run import measure
from moebudget.bench.engine import Turn
from moebudget.bench.sizes import SIZES, read_config
from moebudget.core import provenance

ROOT = Path(__file__).resolve().parents[2]

TOLERANCE = 0.15
TINY = {
    **SIZES["qwen3-30b"], "hidden_size": 256, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_experts": 64, "vocab_size": 2048,
}  # fmt: skip
EXPECTED = {1: "will not help", 16: "will help", 256: "will not help"}
SHARED = {"gpu_memory_utilization": 0.1, "max_num_batched_tokens": 8192}
LARGE = {"kv_cache_memory_bytes": 6 * 10**9, "compilation_config": {"cudagraph_capture_sizes": [1, 8, 16, 256]}}
SMALL = {"kv_cache_memory_bytes": 10**9, "enforce_eager": True}


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", default="qwen3-30b", help="model that experts bind: a size or a config.json")
    ap.add_argument("--batch", nargs="*", type=int, default=list(EXPECTED))
    ap.add_argument("--budget", type=int, default=16)
    ap.add_argument("--steps", type=int, default=64)
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/diagnose.jsonl")
    a = ap.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    gb_s = copy_bandwidth(torch.device(device))
    print(f"a copy moves {gb_s:,.0f} GB/s", flush=True)

    def run(model: str, batches: list[int], arguments: dict[str, Any], turn: Turn) -> list[dict[str, Any]]:
        with turn.or_abort():
            return measure(
                model, read_config(model), "vllm", batches=batches, budget=a.budget, steps=a.steps, gb_s=gb_s,
                turn=turn, device=device, arguments={**SHARED, **arguments},
            )  # fmt: skip

    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Manager() as manager,
        ThreadPoolExecutor(2) as threads,
    ):
        tiny = Path(folder, "config.json")
        tiny.write_text(json.dumps(TINY))
        turn = Turn.of(manager, 2)
        large = threads.submit(run, a.model, a.batch, LARGE, turn)
        small = threads.submit(run, str(tiny), [16], SMALL, turn)
        cases = [(a.model, EXPECTED.get(row["B"], ""), row) for row in large.result()]
        cases += [("tiny, eager", "will not help", row) for row in small.result()]
    wrong = []
    for name, expected, row in cases:
        price = expected == "will help"  # only then do experts bind the step
        close = abs(row["b_over_price"] - 1) <= TOLERANCE if price else None
        verdict = {"expected": expected, "as_expected": row["answer"] == expected, "price_as_expected": close}
        named = {"bench": "diagnose", "model": name, "weights": "random"}
        provenance.append_rows(a.results, [{**named, **row, **verdict, **provenance.stamp(row["device"])}])
        print(f"\n{name}: {row['title']}; native union {row['native_union']:.1f}")
        print("  " + ", ".join(f"{fetched:.1f}: {ms:.3f}" for fetched, ms, _ in row["points"]))
        print(f"  an expert costs {row['b_over_price']:.3f} times the price of its bytes, {row['price_ms']:.5f} ms")
        print(f"  {row['answer']} (expected: {expected or 'unknown'}): {row['reason']}")
        wrong += [name] * (not verdict["as_expected"]) + [f"{name}, B={row['B']}: price"] * (close is False)
    print("\nas expected" if not wrong else f"\nnot as expected: {'; '.join(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
