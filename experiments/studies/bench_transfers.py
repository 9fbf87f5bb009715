"""Benchmark of host-to-GPU copies, with the fit t0 + bytes / bandwidth: the cost of an offloaded expert (CAEE).

python -m experiments.studies.bench_transfers
"""

from __future__ import annotations

import argparse
from pathlib import Path

from moebudget.core import provenance
from moebudget.engines.transformers.transfers import fit_transfer, measure_transfers

ROOT = Path(__file__).resolve().parents[2]

SIZES = [2**k for k in range(16, 28)]
EXPERTS = {"Qwen3-30B-A3B, bf16": 3 * 2048 * 768 * 2, "Mixtral-8x7B, bf16": 3 * 4096 * 14336 * 2}


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--commit", help="commit of a tree without history")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/transfers.jsonl")
    a = ap.parse_args()
    sizes, seconds = measure_transfers(a.device, SIZES)
    fit = fit_transfer(sizes, seconds)
    worst = max(abs(fit.seconds(s) - t) / t for s, t in zip(sizes, seconds, strict=True))
    row = {
        "bench": "transfers", "bytes": sizes, "us": [round(1e6 * t, 2) for t in seconds],
        "t0_us": round(1e6 * fit.t0, 2), "gb_per_s": round(fit.bandwidth / 1e9, 2),
        "largest_relative_error": round(worst, 3),
        "expert_us": {name: round(1e6 * fit.seconds(size), 1) for name, size in EXPERTS.items()},
        **provenance.stamp(a.device),
    }  # fmt: skip
    if a.commit:
        row["commit"] = a.commit
    provenance.append_rows(a.results, [row])
    print(row)


if __name__ == "__main__":
    main()
