"""Benchmark of decode steps with experts in host memory: an LFU cache alone, and policies that see the cache.

    python -m experiments.studies.bench_offload stack demo
    python -m experiments.studies.bench_offload tiny --device cpu --results out/offload.jsonl

`stack` has the layer sizes of Qwen3-30B-A3B with random weights and is fed random tokens; `demo` is the embedded
model, fed held-out text. All policies get the same tokens, one per row and step on a key-value cache, after a prompt
of PROMPT tokens. The expert cache is empty before the prompt, and WARM steps precede the timed ones. `lfu` is the
model without a policy, `native` the same with the policy's hooks and no expert left out. Appends a row per model,
batch size, number of slots and policy to benchmarks/results/offload.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from experiments.studies.bench_calibration import random_qwen3
from moebudget import attach
from moebudget.core import provenance
from moebudget.engines.transformers.families import moe_layers
from moebudget.engines.transformers.offload import Offloaded, offload
from moebudget.engines.transformers.transfers import TransferFit, fit_transfer, measure_transfers
from moebudget.evaluate.tasks import cache_argument

ROOT = Path(__file__).resolve().parents[2]

PROMPT, WARM = 8, 8
POLICIES = (
    "lfu", "native", "caee_offload:theta=0.9", "caee_offload:theta=0.8", "caee_offload:theta=0.7",
    "worth:least=0.2,cost=squared", "worth:least=0.5,cost=squared",
)  # fmt: skip
SLOTS = {"stack": (32, 64), "demo": (16, 32), "tiny": (4,)}


def load(name: str, layers: int, rows: int, length: int, device: str) -> tuple[Any, str, torch.Tensor]:
    """(model, its name in rows, tokens [rows, length] to feed it)."""
    if name == "demo":
        from moebudget.demo.run import MODEL, NAME, heldout_windows
        from moebudget.engines.transformers.loading import default_dtype, load_model, vocabulary

        model, tokenizer = load_model(str(MODEL), device=device, dtype=default_dtype(device))
        return model, NAME, heldout_windows(tokenizer, vocabulary(model), rows)[:rows, :length]
    if name == "tiny":
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            head_dim=16, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=24,
        )  # fmt: skip
        model, text = AutoModelForCausalLM.from_config(config).eval(), "tiny"
    else:
        model, text = random_qwen3(layers, device), f"Qwen3-30B-A3B sizes, {layers} layers, random weights"
    tokens = torch.randint(0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    return model, text, tokens


@torch.no_grad()
def timed(model: Any, cached: Offloaded, policy: str, tokens: torch.Tensor, steps: int) -> float:
    """Seconds per step; the counters of `cached` are those of the timed steps."""
    cached.clear()
    device = tokens.device
    block = nullcontext() if policy == "lfu" else attach(model, policy, cached.stats(), finished_ids=frozenset())
    with block:
        out = model(input_ids=tokens[:, :PROMPT], use_cache=True)
        for position in range(PROMPT, PROMPT + WARM + steps):
            if position == PROMPT + WARM:
                cached.reset()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                started = time.perf_counter()
            cache = {cache_argument(model): out[cache_argument(model)]}
            out = model(input_ids=tokens[:, position : position + 1], use_cache=True, **cache)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / steps


def bench(a: argparse.Namespace, name: str, link: TransferFit | None) -> Iterator[list[dict[str, Any]]]:
    """Rows of each batch size and number of slots, one per policy; a round times every policy in turn."""
    model, text, tokens = load(name, a.layers, max(a.batch), PROMPT + WARM + a.steps, a.device)
    first = moe_layers(model)[0].spec
    for slots in a.slots or SLOTS[name]:
        with offload(model, slots, a.device) as cached:
            for batch in a.batch:
                fed = tokens[:batch].to(cached.layers[0].device)
                seconds: dict[str, list[float]] = {policy: [] for policy in a.policies}
                counts = {}
                for policy in a.policies:  # first calls of kernels and growth of memory pools are not timed
                    timed(model, cached, policy, fed, 1)
                for _ in range(a.rounds):
                    for policy in a.policies:
                        seconds[policy].append(timed(model, cached, policy, fed, a.steps))
                        counts[policy] = (cached.counters, None if link is None else cached.copy_seconds(link))
                alone, rows = min(seconds["lfu"]), []
                for policy, times in seconds.items():
                    c, copies = counts[policy]
                    tpot = min(times)
                    rows.append({
                        "bench": "offload", "model": text, "layers": len(cached.layers), "N": first.num_experts,
                        "K": first.top_k, "B": batch, "slots": slots, "policy": policy, "steps": a.steps,
                        "theta": float(policy.partition("theta=")[2]) if "theta=" in policy else None,
                        "tpot_ms": round(1e3 * tpot, 3), "tpot_rounds_ms": [round(1e3 * t, 3) for t in times],
                        "lfu_tpot_ms": round(1e3 * alone, 3), "reduction": round(1 - tpot / alone, 4),
                        "hits": round(c.hits / c.calls, 2), "misses": round(c.misses / c.calls, 2),
                        "passes": round(c.passes / c.calls, 2), "mb_per_step": round(c.bytes / a.steps / 1e6, 2),
                        "experts": model.config._experts_implementation, "expert_bytes": sum(cached.layers[0].sizes),
                        "copies_ms": None if copies is None else round(1e3 * copies / a.steps, 3),
                    })  # fmt: skip
                    print({k: rows[-1][k] for k in ("B", "slots", "policy", "tpot_ms", "reduction", "hits", "misses")})
                yield rows


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("model", nargs="+", choices=list(SLOTS))
    ap.add_argument("--layers", type=int, default=4, help="layers of the stack")
    ap.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    ap.add_argument("--slots", type=int, nargs="+", help="experts per layer on the device")
    ap.add_argument("--policies", nargs="+", default=list(POLICIES), help="policies to time, `lfu` among them")
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--commit", help="commit of a tree without history")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/offload.jsonl")
    a = ap.parse_args()
    if "lfu" not in a.policies:
        ap.error("--policies must include lfu, which the others are compared with")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for every length of the keys, some 10 ms per layer
    on_gpu, started = torch.device(a.device).type == "cuda", time.perf_counter()
    link = fit_transfer(*measure_transfers(a.device, [2**k for k in range(16, 26)])) if on_gpu else None
    for name in a.model:
        stamp = provenance.stamp(a.device) | ({"commit": a.commit} if a.commit else {})
        fit = {} if link is None else {"t0_us": round(1e6 * link.t0, 2), "gb_per_s": round(link.bandwidth / 1e9, 2)}
        for rows in bench(a, name, link):
            provenance.append_rows(a.results, [{**row, **fit, "gpu": stamp["device"], **stamp} for row in rows])
        print(f"{name}: {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
