"""Benchmark of vLLM decoding over two GPUs, expert and tensor parallel: the baseline, and budgets of three kinds.

    python -m experiments.studies.bench_ranks --layers 24             # all six engines, Qwen3-30B-A3B's sizes
    python -m experiments.studies.bench_ranks --cases ep_off ep_base  # all 48 layers
    python -m experiments.studies.bench_ranks demo --stats stats.safetensors

There is one engine per case; all start together and are timed in turns, repeat by repeat. vLLM's core runs in the
engine's process, so that requests arrive in the same way: a step of another size than in the warm-up would compile
kernels for a second while it is timed. Rows go to benchmarks/results/decode.jsonl. `ep` and `tp` have two ranks. The
policy `base` bounds the sum over ranks, `level` the sum before the other rank is filled up to the load of the fullest,
and `rank` each rank, with the budgets divided by the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from moebudget.bench.decode import run_policies
from moebudget.bench.diagnose.roofline import roofline
from moebudget.bench.engine import Turn
from moebudget.bench.sizes import read_config
from moebudget.core import provenance

ROOT = Path(__file__).resolve().parents[2]

DEMO = ROOT / "src/moebudget/demo/model"
# case -> policy; None: without the plugin
CASES: dict[str, str | None] = {
    "ep_off": None, "ep_base": "base:budget=16", "ep_level": "base:budget=16,level=yes", "ep_rank": "base_ep:budget=8",
    "tp_off": None, "tp_base": "base:budget=16",
}  # fmt: skip
ROOM = 5 * 10**9  # bytes on a GPU for an engine's input embedding, context, graphs, activations, keys and values
SHOWN = (
    "ep",
    "policy",
    "B",
    "M",
    "fetched",
    "max_fetched_per_rank",
    "tpot_ms",
    "spread",
    "baseline_tpot_ms",
    "baseline_spread",
)


def check_memory(config: dict[str, Any], engines: int, ranks: int) -> None:
    """ValueError if the engines do not fit side by side."""
    if not torch.cuda.is_available():
        return
    shape = roofline(config)
    weights = (shape.other_bytes + shape.layers * shape.experts * shape.expert_bytes) / ranks
    needed, total = engines * (weights + ROOM), torch.cuda.mem_get_info(0)[1]
    if needed > total:
        raise ValueError(
            f"{engines} engines take {needed / 1e9:.0f} GB on each GPU ({weights / 1e9:.0f} GB of weights each), and "
            f"one has {total / 1e9:.0f}: choose fewer --cases, or fewer --layers (now {config['num_hidden_layers']})"
        )


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("model", nargs="?", default="qwen3-30b", help="a size, a config.json, a folder, or demo")
    ap.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    ap.add_argument("--layers", type=int, help="keep this many layers, with random weights")
    ap.add_argument("--stats", help="statistics, for a model with trained weights")
    ap.add_argument("--budget", nargs="+", type=int, default=[16, 10], help="experts per layer over all ranks")
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--prompt", type=int, default=128)
    ap.add_argument("--tokens", type=int, default=128)
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--ranks", type=int, default=2)
    ap.add_argument("--engine", type=json.loads, help="arguments of vLLM's LLM, as JSON, instead of the script's")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/decode.jsonl")
    a = ap.parse_args()
    name = str(DEMO) if a.model == "demo" else a.model
    config, trained = read_config(name), Path(name).is_dir()
    if a.layers is not None:
        if trained or not 1 <= a.layers <= config["num_hidden_layers"]:
            ap.error(
                f"--layers {a.layers} must be between 1 and {config['num_hidden_layers']}, and the weights random"
            )
        config = {**config, "num_hidden_layers": a.layers}
    lone = {case[:2] for case in a.cases} - {case[:2] for case in a.cases if CASES[case]}
    if lone:
        ap.error(f"{lone.pop()}_off needs a case with a policy beside it, whose rows hold its time")
    shared = {
        "kv_cache_memory_bytes": 1_500_000_000, "gpu_memory_utilization": 0.02, "max_num_batched_tokens": 4096,
        "compilation_config": {"cudagraph_capture_sizes": sorted({8, a.batch})},
    } if a.engine is None else a.engine  # fmt: skip

    def run(kind: str, folder: str, turn: Turn) -> list[dict[str, Any]]:
        policies = [CASES[case] for case in a.cases if case[:2] == kind]
        each = [max(1, m // a.ranks) for m in a.budget]
        budgets = {p: each if p.startswith("base_ep") else a.budget for p in policies if p is not None}
        expert = {"enable_expert_parallel": True} if kind == "ep" else {}
        with turn.or_abort():
            return run_policies(
                folder, budgets, (a.batch,), prompt=a.prompt, tokens=a.tokens, repeats=a.repeats, stats=a.stats,
                baseline=None in policies, turn=turn, in_process=True, tensor_parallel_size=a.ranks, **expert,
                **shared,
            )  # fmt: skip

    try:
        check_memory(config, len(a.cases), a.ranks)
        with (
            tempfile.TemporaryDirectory() as folder,
            multiprocessing.get_context("spawn").Manager() as manager,
            ThreadPoolExecutor(2) as threads,
        ):
            cut = Path(folder, "config.json")
            cut.write_text(json.dumps(config))
            turn = Turn.of(manager, len(a.cases))
            kinds = dict.fromkeys(case[:2] for case in a.cases)
            jobs = [threads.submit(run, kind, name if trained else str(cut), turn) for kind in kinds]
            rows = [{**row, "model": Path(a.model).name} for job in jobs for row in job.result()]
    except ValueError as error:
        ap.error(str(error))
    provenance.append_rows(a.results, rows)
    for row in (row for row in rows if row["bench"] == "decode"):
        print({k: round(row[k], 3) if isinstance(row[k], float) else row[k] for k in (*SHOWN, "baseline_same_tokens")})


if __name__ == "__main__":
    main()
