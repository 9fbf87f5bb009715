"""Study of offloading: loss of the embedded model under an LFU cache, by policy, batch size and slots.

    python -m experiments.studies.study_offload --stats out/stats.safetensors

Missing statistics are calibrated on the embedded text. Decode mode on held-out text, in float32 on the
CPU. The cache is simulated step by step as `offload` keeps it, so hits and misses are exact; times are measured by
bench_offload.py. Appends a row for every setting to benchmarks/results/offload.jsonl.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from experiments.studies.offload_simulation import evaluate_offloaded
from moebudget import load_stats, parse
from moebudget.calibrate import calibrate
from moebudget.core import provenance
from moebudget.core.stats import Stats
from moebudget.demo.run import BATCH, FULL, MODEL, NAME, calibration_corpus, heldout_windows
from moebudget.engines.transformers.families import moe_layers
from moebudget.engines.transformers.loading import load_model, vocabulary
from moebudget.evaluate.quality import expert_bytes, half_width

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = ((1, 16), (4, 16), (16, 16), (16, 32))  # batch, slots
POLICIES = (
    "native", "caee_offload:theta=0.9", "caee_offload:theta=0.8", "caee_offload:theta=0.7", "caee_offload:theta=0.5",
    "worth:least=0.1", "worth:least=0.2", "worth:least=0.5", "worth:least=1", "worth:least=0.5,cost=squared",
)  # fmt: skip


def demo(file: Path) -> tuple[Any, Any, Stats]:
    """The embedded model, its tokenizer and the statistics in `file`, which is made if it is missing."""
    model, tokenizer = load_model(str(MODEL), device="cpu", dtype="float32")
    if not file.is_file():
        corpus = calibration_corpus(tokenizer, vocabulary(model), FULL.tokens)
        calibrate(model, corpus, model_id=NAME, budget=10, batch=BATCH).save(file)
    return model, tokenizer, load_stats(file)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--stats", type=Path, required=True)
    ap.add_argument("--windows", type=int, default=48, help="windows of 256 tokens; the first 16 fill the caches")
    ap.add_argument("--policies", nargs="+", default=list(POLICIES), help="policies to compare; `native` first")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/offload.jsonl")
    a = ap.parse_args()
    if a.policies[0] != "native":
        ap.error("--policies: the first must be native, which the others are compared with")
    model, tokenizer, stats = demo(a.stats)
    windows = heldout_windows(tokenizer, vocabulary(model), a.windows)
    size, layers, started = expert_bytes(model), len(moe_layers(model)), time.perf_counter()
    for batch, slots in SETTINGS:
        rows, native = [], None
        for text in a.policies:
            r = evaluate_offloaded(model, parse(text), stats, windows, slots=slots, batch=batch)
            native = native or r
            rows.append({
                "bench": "offload_quality", "model": NAME, "B": batch, "slots": slots, "policy": r.policy,
                "theta": float(text.partition("theta=")[2]) if "theta=" in text else None,
                "nll": round(float(r.nll.mean()), 5), "native_nll": round(float(native.nll.mean()), 5),
                "nll_delta_ci95": None if r is native else round(half_width(r.nll - native.nll), 5),
                "hits": round(r.hits, 3), "misses": round(r.misses, 3), "passes": round(r.passes, 3),
                "mb_per_step": round(r.misses * layers * size / 1e6, 4), "lfu_misses": round(native.misses, 3),
                "fetched": round(r.counters.fetched, 3), "dropped_mass": round(r.counters.dropped_mass, 5),
                "windows": len(r.nll), "tokens": len(r.nll) * (windows.shape[1] - 2),
            })  # fmt: skip
            shown = {k: rows[-1][k] for k in ("B", "slots", "policy", "nll", "misses")}
            print(f"{time.perf_counter() - started:.0f} s", shown, flush=True)
        provenance.append_rows(a.results, [{**row, **provenance.stamp("cpu")} for row in rows])


if __name__ == "__main__":
    main()
