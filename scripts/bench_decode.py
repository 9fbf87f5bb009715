#!/usr/bin/env python3
"""`moebudget bench decode` for a checkout without the command line's packages.

python scripts/bench_decode.py qwen3-30b --batch 16 --budget 10 16 24 32 48 64

With --together all engines start side by side, those of several models too, and are timed in turns when the last is
ready; that needs --engine '{"kv_cache_memory_bytes": 4000000000, "gpu_memory_utilization": 0.1}'.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from moebudget import provenance
from moebudget.bench.decode import BATCHES, BUDGETS, remarks, run_decode
from moebudget.bench.engine import Turn


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("model", nargs="+")
    ap.add_argument("--policy", default="base:budget=16")
    ap.add_argument("--budget", nargs="*", type=int, default=BUDGETS)
    ap.add_argument("--batch", nargs="*", type=int, default=BATCHES)
    ap.add_argument("--tokens", type=int, default=384)
    ap.add_argument("--prompt", type=int, default=128)
    ap.add_argument("--repeats", type=int, default=3, help="turns over all settings; of each the median counts")
    ap.add_argument("--stats", help="of a model that is a folder")
    ap.add_argument("--union", type=float)
    ap.add_argument("--uneven", nargs="*", type=int, default=[], help="average budgets to time unevenly as well")
    ap.add_argument("--no-off", action="store_true")
    ap.add_argument(
        "--in-process", action="store_true",
        help="no process of its own for vLLM's core: requests arrive alike, so that two engines make equal steps",
    )  # fmt: skip
    ap.add_argument("--together", action="store_true", help="start all engines at once")
    ap.add_argument("--engine", type=json.loads, default={}, help="further arguments of vLLM's LLM, as JSON")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/decode.jsonl")
    a = ap.parse_args()

    def run(model: str, turn: Turn | None = None) -> None:
        with nullcontext() if turn is None else turn.or_abort():
            rows = run_decode(
                model, a.policy, a.budget, a.batch, prompt=a.prompt, tokens=a.tokens, repeats=a.repeats,
                stats=a.stats if Path(model).is_dir() else None, union=a.union, off=not a.no_off, uneven=a.uneven,
                turn=turn, in_process=a.in_process, **a.engine,
            )  # fmt: skip
        provenance.append_rows(a.results, rows)
        for row in rows:
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items() if k not in ("versions",)})
        print(*remarks([row for row in rows if row["bench"] == "decode"]), sep="\n")

    if not a.together:
        for model in a.model:
            run(model)
        return
    engines = len(a.model) * (1 if a.no_off else 2)
    with multiprocessing.get_context("spawn").Manager() as manager, ThreadPoolExecutor(len(a.model)) as threads:
        turn = Turn.of(manager, engines)
        for done in [threads.submit(run, model, turn) for model in a.model]:
            done.result()


if __name__ == "__main__":
    main()
