#!/usr/bin/env python3
"""`moebudget bench routing` for a checkout without the command line's packages.

python scripts/bench_routing.py --rows 1 16 128 --compiled 16
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from moebudget import provenance
from moebudget.bench.routing import POLICIES, ROWS, SHAPES, run_routing


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", nargs="*", default=list(SHAPES))
    ap.add_argument("--rows", nargs="*", type=int, default=ROWS)
    ap.add_argument("--policy", nargs="*", default=POLICIES)
    ap.add_argument("--compiled", nargs="*", type=int, default=[])
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/routing.jsonl")
    a = ap.parse_args()
    rows = run_routing(a.model, a.rows, a.policy, compiled=a.compiled)
    provenance.append_rows(a.results, rows)
    for r in rows:
        print(
            *(r[k] for k in ("model", "policy", "T", "us_native", "us_total", "us_added", "us_torch", "us_compiled"))
        )


if __name__ == "__main__":
    main()
