"""Check of `hold`: the experts that a price fetches at batch sizes that its thresholds were not made for.

    python -m experiments.checks.check_hold --stats out/spread.safetensors

Held-out text of the embedded model is decoded token by token with a cache, all windows of a batch together, and
the experts fetched are counted in quarters of the run. `study_spread.py calibrate allocate` makes the statistics.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moebudget.core import provenance
from moebudget.core.stats import Stats, load_stats
from moebudget.demo.run import MODEL, NAME, embedded_text, heldout_windows
from moebudget.engines.transformers.attach import attach
from moebudget.engines.transformers.loading import load_model, vocabulary
from moebudget.methods.registry import parse

ROOT = Path(__file__).resolve().parents[2]

POLICIES = ("spread:budget=10", "price:budget=10", "price:budget=10,hold=0.02", "price:budget=10,hold=0.1")
SIZES = (4, 16, 64)
QUARTERS = 4


@torch.no_grad()
def decode(model: Any, text: str, stats: Stats, windows: Tensor) -> dict[str, Any]:
    """Experts fetched per layer in each quarter of the steps, and the loss of all steps in nats per token."""
    steps, losses, fetched = windows.shape[1] - 2, [], []
    with attach(model, parse(text), stats, finished_ids=frozenset()) as run:
        cache = model(input_ids=windows[:, :1], use_cache=True).past_key_values
        for step in range(steps):
            if step * QUARTERS // steps != (step - 1) * QUARTERS // steps:
                if step:
                    fetched.append(run.counters.fetched)
                run.reset()
            out = model(input_ids=windows[:, step + 1 : step + 2], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            losses.append(F.cross_entropy(out.logits[:, -1].float(), windows[:, step + 2]))
        fetched.append(run.counters.fetched)
    return {"fetched_by_quarter": fetched, "nll": float(torch.stack(losses).mean()), "tokens": steps * len(windows)}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--stats", type=Path, required=True)
    ap.add_argument("--batch", type=int, nargs="+", default=SIZES)
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/analysis.jsonl")
    a = ap.parse_args()
    model, tokenizer = load_model(str(MODEL), device="cpu", dtype="float32")
    stats, stamp = load_stats(a.stats), provenance.stamp("cpu")
    for batch in a.batch:
        windows = heldout_windows(tokenizer, vocabulary(model), batch, files=embedded_text("heldout"))[:batch]
        for text in POLICIES:
            measured = decode(model, text, stats, windows)
            row = {"bench": "hold", "model": NAME, "policy": text, "B": batch, **measured, **stamp}
            provenance.append_rows(a.results, [row])
            print(
                batch,
                text,
                [round(fetched, 2) for fetched in measured["fetched_by_quarter"]],
                round(measured["nll"], 4),
                flush=True,
            )


if __name__ == "__main__":
    main()
