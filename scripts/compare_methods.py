#!/usr/bin/env python3
"""Every method on the embedded model at the same number of fetched experts, and the studies of `moebudget analyse`.

    python scripts/compare_methods.py calibrate --stats out/every.safetensors
    python scripts/compare_methods.py methods --stats out/every.safetensors
    python scripts/compare_methods.py studies --stats out/every.safetensors

The settings of a method are searched on windows that the comparison does not use; of those that fetch the target
number of experts (within 0.5) the one with the lowest loss there is compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from moebudget import provenance
from moebudget.analyse import STUDIES, Setting, run_study
from moebudget.calibrate import calibrate
from moebudget.calibrate.run import KNOWN
from moebudget.demo.run import BATCH, MODEL, NAME, calibration_corpus, demo_items, heldout_windows
from moebudget.evaluate.compare import compare
from moebudget.evaluate.match import Family
from moebudget.integrations.loading import default_device, load_model, vocabulary
from moebudget.integrations.transformers import place_experts
from moebudget.stats import Stats, load_stats

TARGETS = (10, 16)
DEVICES = 4


def budgets(name: str, most: int = 40) -> list[Family]:
    return [Family(f"{name}:budget={{}}", 4, most, whole=True)]


METHODS: dict[str, list[Family]] = {
    "plain top-k": [Family("topk:k={}", 1, 8, whole=True)],
    "dynamic skipping": [Family("skip:scale={}", 0.1, 6)],
    "OEA, simplified": [Family("oea:k0={}", 1, 8, whole=True)],
    "OEA, general": [Family(f"oea:k0={k0},p={{}}", 0.02, 0.98) for k0 in (2, 4, 8)],
    "SERE": [
        Family(f"sere:s={s},rho={{}},metric={m}", 0.02, 1) for s in (1, 2) for m in ("frobenius", "cosine", "cka")
    ],
    "Lynx": [Family(f"lynx:alpha={{}},beta={beta}", 0.05, 8) for beta in (1, 2, 4, 0)],
    "LYNX-Lat": [Family("lynx_lat:drop={}", 0, 40, whole=True)],
    "ExFold": budgets("exfold"),
    "ExFold, static pool": budgets("exfold_static", 64),
    "ExFold, prefill rule in decode": [Family("exfold_prefill:p={}", 1, 8, whole=True)],
    "XShare, greedy": [Family("xshare:k0=0,m={}", 4, 40, whole=True)],
    "XShare, warm-up + budget": [Family(f"xshare:k0={k0},m={{}}", 0, 32, whole=True) for k0 in (1, 2)],
    "XShare, round-robin": [Family("xshare_balanced:m={}", 4, 48, whole=True)],
    "XShare, per device": [Family(f"xshare_ep:k0={k0},m_device={{}}", 1 - k0, 12, whole=True) for k0 in (0, 1)],
    "CAEE, device": [Family(f"caee:theta={{}},guard={guard}", 0.02, 8) for guard in ("yes", "no")],
    "CAEE, offload": [Family("caee_offload:theta={}", 0.02, 1)],
    "REAP on the batch": budgets("reap"),
    "REAP, static pruning": budgets("reap_static", 64),
    "MoE-Spec": [*budgets("moe_spec"), Family("moe_spec:budget={},fill=drop", 4, 40, whole=True)],
    "DES-Vote": [Family("des_vote:beta={}", 0.12, 0.5)],
    "dMoE share": [Family("dmoe:share={}", 0.05, 0.99)],
    "AcceptMoE rank": [Family("acceptmoe:scale={}", 0.05, 2)],
    "router mass": budgets("router_mass"),
    "squared weights": budgets("squared"),
    "mean energy": budgets("static"),
    "BASE": budgets("base"),
    "BASE, nonlinear": budgets("nonlinear"),
    "true energy (bound)": budgets("oracle"),
}


def methods(model: Any, tokenizer: Any, stats: Stats, windows: torch.Tensor, items: list[Any], quiet: bool) -> Any:
    """The rows of all methods at all targets; the windows of the search are the last tenth."""
    search = BATCH * max(1, len(windows) // (10 * BATCH))  # whole batches
    found = compare(
        model, METHODS, stats, windows, TARGETS, search=search, items=items, tokenizer=tokenizer,
        start_id=tokenizer.eos_token_id, batch=BATCH, quiet=quiet, say=lambda line: print(line, file=sys.stderr),
    )  # fmt: skip
    return [{**one.as_row(NAME, "methods"), "devices": DEVICES, "search_windows": search} for one in found]


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("stage", choices=("calibrate", "methods", "studies"))
    ap.add_argument("--stats", type=Path, required=True)
    ap.add_argument("--tokens", type=int, default=300_000, help="calibration tokens")
    ap.add_argument("--windows", type=int, default=176, help="of 256 tokens, the search's included")
    ap.add_argument("--items", type=int, default=60, help="of each task")
    ap.add_argument("--study", nargs="*", default=list(STUDIES))
    ap.add_argument("--device", default=default_device())
    ap.add_argument("--commit", help="commit of a tree without its history")
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
