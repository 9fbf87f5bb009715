#!/usr/bin/env python3
"""What spreading experts over the layers gains, at equal average numbers of fetched experts.

    python scripts/study_spread.py calibrate allocate measure tasks sizes domains --folder out

Without --model it studies the embedded model on the embedded held-out text; another one that `train_demo.py` made on
its validation text: --model MODEL --name NAME --text FOLDER. Calibration and allocation use the embedded calibration
documents, the latter those that the predictor was not fitted on. Rows go to benchmarks/results/quality.jsonl as they
are measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from moebudget import provenance
from moebudget.allocate import allocate
from moebudget.calibrate import calibrate, load_corpus
from moebudget.calibrate.data import pack
from moebudget.calibrate.run import DEFAULT_NEEDS
from moebudget.demo.run import (
    BATCH,
    LENGTH,
    MODEL,
    NAME,
    WINDOW,
    calibration_corpus,
    embedded_text,
    heldout_windows,
)
from moebudget.demo.tasks import held_out, training_documents
from moebudget.evaluate import evaluate
from moebudget.evaluate.windows import load_windows
from moebudget.integrations.loading import default_device, load_model, vocabulary
from moebudget.presets import parse
from moebudget.stats import Stats, load_stats

TARGETS = (10, 16, 8, 13, 6, 20)  # what matters most comes first
SOLVED = (6, 10, 16)  # averages that are solved for; the others lie between
AIMS = (10, 16)  # averages that `mixed` is solved for and measured at
ROUNDS = 3  # of exchanges
SIZES = (8, 32, 4, 64, 1)
ALONE = 5  # experts a layer at batch 1, where 8 is all
TOKENS = 300_000  # of calibration text, as in compare_methods.py
BOTH = "text and tasks, 4 at least"
# Allocations compared by `mixed`: with task documents or not, and the least experts of a layer.
MIXED = {"text and tasks": (True, 1), "text, 4 at least": (False, 4), BOTH: (True, 4)}
TASK_BYTES = 200_000  # of generated task documents, of which as many windows are taken as of a domain of the text
STAGES = ("calibrate", "allocate", "measure", "tasks", "sizes", "domains", "mixed")


def domain_of(file: Path) -> str:
    return file.name.removesuffix(".txt.xz").partition("-")[2]


def file_of(where: str) -> str:
    """The statistics with an allocation of MIXED, in the study's folder."""
    return where.replace(", ", "-").replace(" ", "-") + ".safetensors"


def task_windows(tokenizer: Any, limit: int) -> Tensor:
    """Windows [n, 257] of task documents as the models were trained on, of a seed of their own."""
    documents = training_documents(TASK_BYTES, seed=77)
    ends = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in documents]
    packed = pack([[token for one in ends for token in one]], WINDOW + 1, None)
    return load_windows(packed.ids, packed.mask, limit)


def allocation_windows(tokenizer: Any, entries: int, limit: int, domain: str = "") -> Tensor:
    """Windows [n, 257] of the calibration documents that are held out of the fit, domains mixed, or of one domain."""
    files = embedded_text("calibration")
    share = TOKENS // len(files)
    parts = [
        load_corpus(str(f), tokenizer, entries, length=LENGTH, max_tokens=share).held_out
        for f in files
        if domain in ("", domain_of(f))
    ]
    tokens = torch.cat([part.ids[part.mask] for part in parts]).tolist()
    packed = pack([tokens], WINDOW + 1, None)
    return load_windows(packed.ids, packed.mask, limit)


def one_layer_solution(stats: Stats, average: int) -> Stats:
    """The statistics with the budgets that minimise the sum of one-layer losses, without exchanges."""
    budgets = torch.tensor(stats.info["allocation"]["averages"][str(average)]["one_layer_solution"])
    table = stats.tensors["layer_budget"].clone()
    table[:, average - 1] = budgets
    return dataclasses.replace(stats, tensors={**stats.tensors, "layer_budget": table})


def allocated(m: int) -> dict[str, str]:
    """Rules that an allocation changes."""
    return {
        "spread": f"spread:budget={m},fill=half",
        "spread, original": f"spread:budget={m},fill=original",
        "spread, stand-in": f"spread:budget={m},fill=stand_in",
        "price": f"price:budget={m},fill=half",
        "price, original": f"price:budget={m},fill=original",
        "price, stand-in": f"price:budget={m},fill=stand_in",
    }


def ways(m: int) -> dict[str, str]:
    """Rules compared at every target."""
    return {
        "BASE": f"base:budget={m}",
        "BASE, half": f"base:budget={m},fill=half",
        "BASE, stand-in": f"base:budget={m},fill=stand_in",
        "BASE, relative": f"base:budget={m},relative=0.5",
        "BASE, half, relative": f"base:budget={m},fill=half,relative=0.5",
        **allocated(m),
        "mean energies": f"static:budget={m}",
        "true energies (bound)": f"oracle:budget={m}",
    }


def left_out(m: int) -> dict[str, str]:
    """Each piece of `spread` left out or added, at one target; the budgets stay."""
    return {
        "with the executed denominator": f"spread:budget={m},fill=executed",
        "with relative costs, .5": f"spread:budget={m},fill=half,relative=0.5",
        "with relative costs, 1": f"spread:budget={m},fill=half,relative=1",
        "with a floor": f"spread:budget={m},fill=half,floor=yes",
        "price with a floor": f"price:budget={m},fill=half,floor=yes",
        "price with a ceiling of 20": f"price:budget={m},fill=half,ceiling=20",
    }


UNIONS = {
    **{f"OEA, k0 = {k}": f"oea:k0={k}" for k in (1, 2)},
    **{f"plain top-k, k = {k}": f"topk:k={k}" for k in (1, 2, 4)},
}  # rules without a budget: at their own numbers of experts


class Study:
    """One model, the text it is measured on, and the file that rows are appended to."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.started = a, time.time()
        self.model, self.tokenizer = load_model(str(a.model), device=a.device, dtype=a.dtype)
        self.entries = vocabulary(self.model)
        self.files = sorted(a.text.glob("valid-*.txt.xz")) if a.text else embedded_text("heldout")
        self.stamp = provenance.stamp(a.device) | ({"commit": a.commit} if a.commit else {})

    def say(self, what: str) -> None:
        print(f"{time.time() - self.started:.0f} s: {what}", file=sys.stderr, flush=True)

    def windows(self, limit: int, domain: str = "") -> Tensor:
        files = [f for f in self.files if domain in ("", domain_of(f))]
        return heldout_windows(self.tokenizer, self.entries, limit, files=files)

    def allocate(
        self, averages: tuple[int, ...], batch: int = BATCH, domain: str = "", *, tasks: bool = False, least: int = 1
    ) -> Stats:
        """`tasks`: a third of the windows are of task documents, about what the models were trained on."""
        windows = allocation_windows(self.tokenizer, self.entries, max(self.a.search, batch), domain)
        if tasks:
            share = max(batch, len(windows) // 3 // batch * batch)  # batches of one kind, as text and tasks are served
            windows = torch.cat([windows[: len(windows) - share], task_windows(self.tokenizer, share)])
        known = load_stats(self.a.folder / "every.safetensors")
        found = allocate(self.model, known, windows, averages=averages, rounds=ROUNDS, batch=batch, least=least)
        self.say(f"allocated at batch {batch} on {len(windows)} windows of {domain or 'all domains'}")
        return found

    def measure(
        self,
        bench: str,
        named: dict[str, str],
        target: int,
        stats: Stats,
        windows: Tensor,
        batch: int = BATCH,
        items: int = 0,
        **extra: Any,
    ) -> None:
        """Append one row a rule, and one of the unchanged model, which has target 0."""
        policies = {name: parse(text) for name, text in named.items()}
        questions = held_out("test", items) if items else []
        random.Random(0).shuffle(questions)
        found = evaluate(
            self.model, list(policies.values()), stats, windows, items=questions, tokenizer=self.tokenizer,
            start_id=self.tokenizer.eos_token_id, batch=batch, retained_windows=2 * batch, quiet=True,
        )  # fmt: skip
        names = {policy.name: name for name, policy in policies.items()}
        rows = []
        for quality in found:
            name = names.get(quality.policy, "unchanged model")
            about = {"bench": bench, "method": name, "target": target if quality.policy in names else 0, **extra}
            rows.append({**quality.as_row(self.a.name), **about, **self.stamp})
        provenance.append_rows(self.a.results, rows)
        self.say(f"{bench}: {len(rows)} rules at {target}, batch {batch} {extra or ''}")


def arguments(doc: str, stages: tuple[str, ...]) -> argparse.ArgumentParser:
    """What every study of one model asks for; `Study` reads it."""
    ap = argparse.ArgumentParser(description=doc.splitlines()[0])
    ap.add_argument("stages", nargs="+", choices=stages)
    ap.add_argument("--folder", type=Path, required=True, help="of the statistics")
    ap.add_argument("--model", type=Path, default=MODEL)
    ap.add_argument("--name", default=NAME, help="of the model, in the rows")
    ap.add_argument("--text", type=Path, help="folder of valid-DOMAIN.txt.xz to measure on")
    ap.add_argument("--windows", type=int, default=96, help="of 256 tokens to measure on")
    ap.add_argument("--device", default=default_device())
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--commit", help="commit of a tree without its history")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/quality.jsonl")
    return ap


def main() -> None:
    ap = arguments(__doc__, STAGES)
    ap.add_argument("--solve", type=int, nargs="+", default=SOLVED, help="averages that are solved for")
    ap.add_argument("--targets", type=int, nargs="+", default=TARGETS, help="averages to measure")
    ap.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="other batch sizes to measure")
    ap.add_argument("--search", type=int, default=32, help="of 256 tokens to allocate on")
    ap.add_argument("--items", type=int, default=60, help="of each task")
    ap.add_argument("--mixed", nargs="+", choices=list(MIXED), default=list(MIXED), help="allocations of that stage")
    a = ap.parse_args()
    study = Study(a)
    mixed = a.folder / "spread.safetensors"
    for stage in a.stages:
        if stage == "calibrate":
            corpus = calibration_corpus(study.tokenizer, study.entries, TOKENS)
            needs = DEFAULT_NEEDS | {"output_direction"}
            stats = calibrate(study.model, corpus, model_id=a.name, needs=needs, budget=10, batch=BATCH, rows=16)
            stats.save(a.folder / "every.safetensors")
            study.say(f"calibrated: {dict(stats.info)}")
        elif stage == "allocate":
            study.allocate(tuple(a.solve)).save(mixed)
        elif stage == "measure":
            stats, windows = load_stats(mixed), study.windows(a.windows)
            for m in a.targets:
                study.measure("spread", ways(m) | (left_out(m) if m == 10 else {}), m, stats, windows)
            if 10 in a.solve:
                additive = {"with the sum of one-layer losses alone": "spread:budget=10,fill=half"}
                study.measure("spread", additive, 10, one_layer_solution(stats, 10), windows)
            study.measure("spread", UNIONS, 0, stats, windows)
        elif stage == "tasks":
            rules = ways(10) | UNIONS
            study.measure("spread_tasks", rules, 10, load_stats(mixed), study.windows(BATCH), items=a.items)
        elif stage == "sizes":
            for batch in a.sizes:
                m, windows = ALONE if batch == 1 else 10, study.windows(a.windows // batch * batch)
                study.measure("spread_sizes", ways(m), m, load_stats(mixed), windows, batch, allocated_at=BATCH)
                own = study.allocate((m,), batch)
                study.measure("spread_sizes", allocated(m), m, own, windows, batch, allocated_at=batch)
        elif stage == "mixed":
            windows = study.windows(a.windows)
            for where in a.mixed:
                tasks, least = MIXED[where]
                own = study.allocate(AIMS, tasks=tasks, least=least)
                own.save(a.folder / file_of(where))
                for m in AIMS:
                    rules = {name: ways(m)[name] for name in ("BASE", "BASE, half", *allocated(m))}
                    study.measure("spread_mixed", rules, m, own, windows, items=a.items, allocated_on=where)
        else:
            allocations = {"all domains": load_stats(mixed)}
            allocations |= {d: study.allocate((10,), domain=d) for d in ("prose", "code")}
            for domain in map(domain_of, study.files):
                windows = study.windows(a.windows, domain)
                windows = windows[: len(windows) // BATCH * BATCH]
                for source, stats in allocations.items():
                    rules = ways(10) if source == "all domains" else allocated(10)
                    extra = {"domain": domain, "allocated_on": source}
                    study.measure("spread_domains", rules, 10, stats, windows, **extra)


if __name__ == "__main__":
    main()
