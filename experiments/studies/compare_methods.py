"""Comparison of every method on the embedded model at equal fetched experts, and the studies of `moebudget analyse`.

    python -m experiments.studies.compare_methods calibrate --stats out/every.safetensors
    python -m experiments.studies.compare_methods methods --stats out/every.safetensors
    python -m experiments.studies.compare_methods studies --stats out/every.safetensors

A method's searches are the `variants` of its registration; methods whose statistics are missing, such as an
allocation, are left out. Settings are searched on windows that the comparison does not use. Of the settings that fetch
the target number of experts, within 0.5, the one with the lowest loss is compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from moebudget.analyse import STUDIES, Setting, run_study
from moebudget.calibrate import calibrate
from moebudget.calibrate.run import KNOWN
from moebudget.core import provenance
from moebudget.core.stats import Stats, load_stats
from moebudget.demo.run import BATCH, MODEL, NAME, calibration_corpus, demo_items, heldout_windows
from moebudget.engines.transformers.attach import place_experts
from moebudget.engines.transformers.loading import default_device, load_model, vocabulary
from moebudget.evaluate.compare import compare
from moebudget.evaluate.sweep import Sweep, make_sweep
from moebudget.methods.registry import METHODS

ROOT = Path(__file__).resolve().parents[2]

TARGETS = (10, 16)
DEVICES = 4


def sweeps(stats: Stats) -> dict[str, list[Sweep]]:
    """The searches of every registered method whose statistics are there, by label."""
    return {
        label: [make_sweep(template, stats.facts) for template in templates]
        for method in METHODS.values()
        if method.needs <= stats.tensors.keys()
        for label, templates in method.variants.items()
    }


def methods(model: Any, tokenizer: Any, stats: Stats, windows: torch.Tensor, items: list[Any], quiet: bool) -> Any:
    """The rows of all methods at all targets; the windows of the search are the last tenth."""
    search = BATCH * max(1, len(windows) // (10 * BATCH))  # whole batches
    rows = compare(
        model, sweeps(stats), stats, windows, TARGETS, search=search, items=items, tokenizer=tokenizer,
        start_id=tokenizer.eos_token_id, batch=BATCH, quiet=quiet, say=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    return [{**row.as_row(NAME, "methods"), "devices": DEVICES, "search_windows": search} for row in rows]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("stage", choices=("calibrate", "methods", "studies"))
    ap.add_argument("--stats", type=Path, required=True)
    ap.add_argument("--tokens", type=int, default=300_000, help="calibration tokens")
    ap.add_argument("--windows", type=int, default=176, help="windows of 256 tokens, those of the search included")
    ap.add_argument("--items", type=int, default=60, help="items of each task")
    ap.add_argument("--study", nargs="*", default=list(STUDIES))
    ap.add_argument("--device", default=default_device())
    ap.add_argument("--commit", help="commit of a tree without history")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    ap.add_argument("--quiet", action="store_true")
    a = ap.parse_args()
    model, tokenizer = load_model(str(MODEL), device=a.device, dtype="float32")
    if a.stage == "calibrate":
        corpus = calibration_corpus(tokenizer, vocabulary(model), a.tokens)
        stats = calibrate(model, corpus, model_id=NAME, needs=KNOWN, budget=10, batch=BATCH, quiet=a.quiet)
        stats.save(a.stats)
        print(dict(stats.info))
        return
    stats = place_experts(model, load_stats(a.stats), DEVICES)
    windows = heldout_windows(tokenizer, vocabulary(model), a.windows)
    items = demo_items(a.items)
    if a.stage == "methods":
        rows, file = methods(model, tokenizer, stats, windows, items, a.quiet), "quality.jsonl"
    else:
        setting = Setting(model, NAME, stats, windows, items, tokenizer, tokenizer.eos_token_id, BATCH, 10, a.quiet)
        rows, file = [row for name in a.study for row in run_study(name, setting)], "analysis.jsonl"
    stamp = provenance.stamp(a.device) | ({"commit": a.commit} if a.commit else {})
    provenance.append_rows(a.results / file, [{**row, **stamp} for row in rows])


if __name__ == "__main__":
    main()
