"""Benchmark of calibration: time and memory by phase, for the demo model or for random weights.

    python -m experiments.studies.bench_calibration --demo --device cuda
    python -m experiments.studies.bench_calibration --layers 4 --tokens 163840 --device cuda

The random model has the layer sizes of Qwen3-30B-A3B (128 experts, top-8, hidden 2048, expert width 768, bf16). The
time for all 48 layers and the published 2,455,552 + 489,472 tokens is extrapolated: the costs of a layer (its
forward pass and its statistics per token, its solves, and its share of the held-out pass) are measured here and
multiplied by their counts; each group of layers needs a separate pass up to its last layer. Appends a row to
benchmarks/results/calibration.jsonl.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moebudget.calibrate import DEFAULT_ALPHAS, Corpus, Packed, calibrate
from moebudget.calibrate import run as phases
from moebudget.calibrate.collect import LayerSums
from moebudget.core import provenance
from moebudget.engines.transformers.families import model_facts, moe_layers

ROOT = Path(__file__).resolve().parents[2]

PUBLISHED = {"layers": 48, "tokens": 2_455_552, "held_out": 489_472, "minutes": 38.9, "gpu": "RTX PRO 6000"}


def random_qwen3(layers: int, device: str) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=8192, hidden_size=2048, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for layer in moe_layers(model):
        layer.weight.data.normal_(0, 0.02)
    return model


def packed(tokens: int, length: int, vocabulary: int, seed: int) -> Packed:
    n = max(1, tokens // length)
    ids = torch.randint(0, vocabulary, (n, length), generator=torch.Generator().manual_seed(seed))
    return Packed(ids, torch.ones_like(ids, dtype=torch.bool))


def timed(call: Any, device: torch.device) -> tuple[Any, float]:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


@torch.no_grad()
def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--demo", action="store_true", help="the embedded model on the embedded text")
    ap.add_argument("--layers", type=int, default=4)
    ap.add_argument("--tokens", type=int, default=163_840)
    ap.add_argument("--length", type=int, default=2048)
    ap.add_argument("--device", default="cpu")
    ap.add_argument("--commit", help="commit of a tree without history")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/calibration.jsonl")
    a = ap.parse_args()
    if a.demo:
        from moebudget.demo.run import MODEL, NAME, calibration_corpus
        from moebudget.engines.transformers.loading import default_dtype, load_model, vocabulary

        model, tokenizer = load_model(str(MODEL), device=a.device, dtype=default_dtype(a.device))
        corpus, name = calibration_corpus(tokenizer, vocabulary(model), a.tokens * 5 // 4), NAME  # a fifth is held out
    else:
        model, name = random_qwen3(a.layers, a.device), f"Qwen3-30B-A3B sizes, {a.layers} layers, random weights"
        corpus = Corpus(packed(a.tokens, a.length, 8192, 0), packed(a.tokens // 5, a.length, 8192, 1), "random", 0)
    layers = moe_layers(model)
    facts, device = model_facts(layers, "qwen3_moe"), layers[0].weight.device
    quiet = Console(quiet=True)
    warm = Corpus(*(Packed(p.ids[:8], p.mask[:8]) for p in (corpus.fit, corpus.held_out)), "warm-up", 0)
    calibrate(model, warm, model_id=name, quiet=True)
    everything = range(len(layers))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    _, forward = timed(lambda: [phases.forward(model, *b) for b in phases.batches(corpus.fit, 8, device)], device)
    sums, collect = timed(lambda: phases._collect(model, corpus.fit, facts, everything, 8, device, quiet), device)
    solved, solve = timed(lambda: [sums[p].finish(list(DEFAULT_ALPHAS)) for p in everything], device)
    tensors = {name: torch.stack([layer[name] for layer in solved]) for name in solved[0]}
    sums.clear()
    _, validate = timed(lambda: phases.validate(model, corpus.held_out, tensors, 10, 16, device, quiet), device)
    solve /= len(layers)
    stats, total = timed(lambda: calibrate(model, corpus, model_id=name, quiet=True), device)
    row = {
        "bench": "calibration", "model": name, "tokens": corpus.fit.tokens, "held_out_tokens": corpus.held_out.tokens,
        "seconds": round(total, 2), "tokens_per_s": round(corpus.fit.tokens / total),
        "collect_tokens_per_s": round(corpus.fit.tokens / collect), "forward_s": round(forward, 3),
        "collect_s": round(collect, 3), "solve_s_per_layer": round(solve, 3), "validate_s": round(validate, 3),
        "layers_per_pass": phases.layers_per_pass(facts, device),
        "sums_mb_per_layer": round(LayerSums.size_in_bytes(facts.experts, facts.hidden) / 1e6, 1),
        "peak_gpu_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if device.type == "cuda" else None,
        "retained_energy": stats.info["retained_energy"], "r2_heldout": stats.info["r2_heldout"],
    }  # fmt: skip
    if not a.demo:
        row |= extrapolate(row, len(layers))
    row |= provenance.stamp(device)
    if a.commit:
        row["commit"] = a.commit
    provenance.append_rows(a.results, [row])
    print(row)


def extrapolate(row: dict[str, Any], layers: int) -> dict[str, Any]:
    """Minutes for 48 layers on the published number of tokens, with 61 GB of weights beside the sums."""
    total, n = PUBLISHED["layers"], row["tokens"] * layers
    forward, statistics = row["forward_s"] / n, (row["collect_s"] - row["forward_s"]) / n  # per layer and token
    free = 0.6 * (torch.cuda.mem_get_info()[1] - 61e9) if torch.cuda.is_available() else 0
    group = max(1, min(total, int(free // (row["sums_mb_per_layer"] * 1e6))))
    passes = [min(end, total) for end in range(group, total + group, group)]
    seconds = PUBLISHED["tokens"] * (forward * sum(passes) + statistics * total) + row["solve_s_per_layer"] * total
    seconds += row["validate_s"] / (row["held_out_tokens"] * layers) * total * PUBLISHED["held_out"]
    return {"extrapolated_minutes": round(seconds / 60, 1), "extrapolated_passes": len(passes), "published": PUBLISHED}


if __name__ == "__main__":
    main()
