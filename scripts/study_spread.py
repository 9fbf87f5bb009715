#!/usr/bin/env python3
"""What spreading experts over the layers gains on the embedded model, at equal average numbers of fetched experts.

    python scripts/compare_methods.py calibrate --stats out/every.safetensors
    python scripts/study_spread.py allocate --folder out
    python scripts/study_spread.py measure --folder out  # then tasks and sizes

`allocate` uses calibration documents that the predictor was not fitted on; `measure` the held-out text that
`compare_methods.py` compares methods on. Rows go to benchmarks/results/quality.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from moebudget import provenance
from moebudget.allocate import allocate
from moebudget.calibrate import load_corpus
from moebudget.calibrate.data import pack
from moebudget.demo.run import BATCH, LENGTH, MODEL, NAME, WINDOW, embedded_text, heldout_windows
from moebudget.demo.tasks import held_out
from moebudget.evaluate import evaluate
from moebudget.evaluate.report import load_windows
from moebudget.integrations.loading import default_device, load_model, vocabulary
from moebudget.presets import parse
from moebudget.stats import Stats, load_stats

TARGETS = (6, 8, 10, 13, 16, 20)
SOLVED = (6, 10, 16)  # averages that are solved for; the others lie between
ROUNDS = 3  # of exchanges
OTHER_BATCHES = (4, 64)
TOKENS = 300_000  # of calibration text, as in compare_methods.py


def allocation_windows(tokenizer: Any, entries: int, limit: int) -> Tensor:
    """Windows [n, 257] of the calibration documents that are held out of the fit, domains mixed."""
    files = embedded_text("calibration")
    share = TOKENS // len(files)
    parts = [load_corpus(str(f), tokenizer, entries, length=LENGTH, max_tokens=share).held_out for f in files]
    tokens = torch.cat([part.ids[part.mask] for part in parts]).tolist()
    packed = pack([tokens], WINDOW + 1, None)
    return load_windows(packed.ids, packed.mask, limit)


def one_layer_solution(stats: Stats, average: int) -> Stats:
    """The statistics with the budgets that minimise the sum of one-layer losses, without exchanges."""
    budgets = torch.tensor(stats.info["allocation"]["averages"][str(average)]["one_layer_solution"])
    table = stats.tensors["layer_budget"].clone()
    table[:, average - 1] = budgets
    return dataclasses.replace(stats, tensors={**stats.tensors, "layer_budget": table})


def ways(m: int) -> dict[str, str]:
    """Rules compared at every target."""
    return {
        "BASE": f"base:budget={m}",
        "BASE, half": f"base:budget={m},fill=half",
        "BASE, half, relative": f"base:budget={m},fill=half,relative=0.5",
        "spread": f"spread:budget={m}",
        "price": f"price:budget={m}",
    }


def left_out(m: int) -> dict[str, str]:
    """Each piece of `spread` left out or added, at one target; the budgets stay."""
    return {
        "with the original denominator": f"spread:budget={m},fill=original",
        "with the executed denominator": f"spread:budget={m},fill=executed",
        "with relative costs, .5": f"spread:budget={m},relative=0.5",
        "with relative costs, 1": f"spread:budget={m},relative=1",
        "with a floor": f"spread:budget={m},floor=yes",
        "price with a floor": f"price:budget={m},floor=yes",
        "price with a ceiling of 20": f"price:budget={m},ceiling=20",
    }


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("stage", choices=("allocate", "measure", "tasks", "sizes"))
    ap.add_argument("--folder", type=Path, required=True, help="of the statistics")
    ap.add_argument("--windows", type=int, default=96, help="of 256 tokens to measure on")
    ap.add_argument("--search", type=int, default=32, help="of 256 tokens to allocate on")
    ap.add_argument("--items", type=int, default=60, help="of each task")
    ap.add_argument("--device", default=default_device())
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/quality.jsonl")
    a = ap.parse_args()
    model, tokenizer = load_model(str(MODEL), device=a.device, dtype="float32")
    entries = vocabulary(model)

    rows: list[dict[str, Any]] = []

    def measure(
        named: dict[int, dict[str, str]],
        stats: Stats,
        windows: Tensor,
        bench: str,
        batch: int = BATCH,
        items: int = 0,
        **extra: Any,
    ) -> None:
        policies = [parse(p) for some in named.values() for p in some.values()]
        questions = held_out("test", items) if items else []
        random.Random(0).shuffle(questions)
        found = evaluate(
            model, policies, stats, windows, items=questions, tokenizer=tokenizer,
            start_id=tokenizer.eos_token_id, batch=batch, retained_windows=2 * batch, quiet=True,
        )  # fmt: skip
        labels = {policy: (name, m) for m, some in named.items() for name, policy in some.items()}
        labels["dense"] = ("unchanged model", 0)
        for quality in found:
            name, target = labels[quality.policy]
            rows.append({**quality.as_row(NAME), "bench": bench, "method": name, "target": target, **extra})

    base = a.folder / "every.safetensors"
    mixed = a.folder / "spread.safetensors"
    if a.stage == "allocate":
        windows = allocation_windows(tokenizer, entries, a.search)
        allocate(model, load_stats(base), windows, averages=SOLVED, rounds=ROUNDS).save(mixed)
    elif a.stage == "measure":
        stats, windows = load_stats(mixed), heldout_windows(tokenizer, entries, 176)[: a.windows]
        measure({m: ways(m) | (left_out(m) if m == 10 else {}) for m in TARGETS}, stats, windows, "spread")
        additive = {10: {"with the sum of one-layer losses alone": "spread:budget=10"}}
        measure(additive, one_layer_solution(stats, 10), windows, "spread")
    elif a.stage == "tasks":
        windows = heldout_windows(tokenizer, entries, 176)[:BATCH]
        measure({10: ways(10)}, load_stats(mixed), windows, "spread_tasks", items=a.items)
    else:
        windows = heldout_windows(tokenizer, entries, 176)[: a.windows // 64 * 64]
        for batch in OTHER_BATCHES:
            measure({10: ways(10)}, load_stats(mixed), windows, "spread_sizes", batch=batch, allocated_at=BATCH)
    if rows:
        stamp = provenance.stamp(a.device)
        provenance.append_rows(a.results, [{**row, **stamp} for row in rows])


if __name__ == "__main__":
    main()
