"""Check of the noise band of `moebudget eval` against whole evaluations in other orders, on the embedded model.

python -m experiments.checks.check_noise --stats out/demo-stats.safetensors
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch

from moebudget.core import provenance
from moebudget.core.stats import load_stats
from moebudget.demo.run import BATCH, MODEL, NAME, demo_items, heldout_windows
from moebudget.engines.transformers.loading import default_device, load_model, vocabulary
from moebudget.evaluate.noise import task_noise, text_noise
from moebudget.evaluate.paired import Z95
from moebudget.evaluate.tasks import evaluate_tasks
from moebudget.evaluate.text import evaluate_text
from moebudget.methods.registry import parse

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--stats", type=Path, required=True)
    ap.add_argument("--policy", nargs="*", default=["base:budget=10", "oea:k0=1"])
    ap.add_argument("--windows", type=int, default=64)
    ap.add_argument("--items", type=int, default=24, help="items of each task")
    ap.add_argument("--orders", type=int, default=12)
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/analysis.jsonl")
    a = ap.parse_args()
    device = default_device()
    model, tokenizer = load_model(str(MODEL), device=device, dtype="float32")
    stats, policies = load_stats(a.stats), [parse(p) for p in a.policy]
    windows, items = heldout_windows(tokenizer, vocabulary(model), a.windows), demo_items(a.items)
    how: dict[str, Any] = {"batch": BATCH, "quiet": True}
    start = {"start_id": tokenizer.eos_token_id}
    text = evaluate_text(model, policies, stats, windows, **how)
    tasks = evaluate_tasks(model, policies, stats, items, tokenizer, **start, **how)
    text_bands = text_noise(model, text, stats, windows, prefill=1, **how)
    task_bands = task_noise(model, tasks, stats, items, tokenizer, **start, **how)
    losses, averages = [[float(r.nll.mean()) for r in text]], [[r.average for r in tasks]]
    for seed in range(1, a.orders):
        order = list(range(len(windows)))
        random.Random(seed).shuffle(order)
        mixed = random.Random(seed).sample(items, len(items))
        losses.append([float(r.nll.mean()) for r in evaluate_text(model, policies, stats, windows[order], **how)])
        averages.append([r.average for r in evaluate_tasks(model, policies, stats, mixed, tokenizer, **start, **how)])
        print(f"order {seed}", file=sys.stderr, flush=True)
    spread = [Z95 * torch.tensor(values, dtype=torch.float64).std(0) for values in (losses, averages)]
    rows = [
        {
            "bench": "noise", "model": NAME, "policy": p.name, "B": BATCH, "windows": len(windows),
            "items": len(items), "orders": a.orders, "nll_noise": text_bands[i], "nll_spread": float(spread[0][i]),
            "task_noise": task_bands[i], "task_spread": float(spread[1][i]), **provenance.stamp(device),
        }
        for i, p in enumerate(policies)
    ]  # fmt: skip
    provenance.append_rows(a.results, rows)
    for row in rows:
        print({k: row[k] for k in ("policy", "nll_noise", "nll_spread", "task_noise", "task_spread")})


if __name__ == "__main__":
    main()
