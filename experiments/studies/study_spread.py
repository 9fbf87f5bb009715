"""Study of allocations over the layers, at equal average numbers of fetched experts.

    python -m experiments.studies.study_spread calibrate allocate measure tasks sizes domains --folder out

The default is the embedded model on the embedded held-out text. For another model that `train_demo.py` made, on its
validation text: --model MODEL --name NAME --text FOLDER. Calibration and allocation use the embedded calibration
documents; the allocation uses those that the predictor was not fitted on. Rows are appended to
benchmarks/results/quality.jsonl as they are measured.
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

from moebudget.calibrate import calibrate, load_corpus
from moebudget.calibrate.allocation import allocate
from moebudget.calibrate.data import pack
from moebudget.calibrate.run import DEFAULT_NEEDS
from moebudget.core import provenance
from moebudget.core.stats import Stats, load_stats
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
from moebudget.engines.transformers.loading import default_device, load_model, vocabulary
from moebudget.evaluate import evaluate
from moebudget.evaluate.corpus import load_windows
from moebudget.methods.registry import parse

ROOT = Path(__file__).resolve().parents[2]

TARGETS = (10, 16, 8, 13, 6, 20)  # the most important first
SOLVED = (6, 10, 16)  # averages that are solved for; the others are interpolated
AIMS = (10, 16)  # averages that `mixed` solves for and measures
ROUNDS = 3  # of exchanges
SIZES = (8, 32, 4, 64, 1)
ALONE = 5  # experts per layer at batch 1, where native routing fetches 8
TOKENS = 300_000  # of calibration text, as in compare_methods.py
BOTH = "text and tasks, 4 at least"
# Allocations compared by `mixed`: with task documents or not, and the least number of experts per layer.
MIXED = {"text and tasks": (True, 1), "text, 4 at least": (False, 4), BOTH: (True, 4)}
TASK_BYTES = 200_000  # of generated task documents
STAGES = ("calibrate", "allocate", "measure", "tasks", "sizes", "domains", "mixed")


def domain_of(file: Path) -> str:
    return file.name.removesuffix(".txt.xz").partition("-")[2]


def file_of(where: str) -> str:
    """The statistics with an allocation of MIXED, in the study's folder."""
    return where.replace(", ", "-").replace(" ", "-") + ".safetensors"


def task_windows(tokenizer: Any, limit: int) -> Tensor:
    """Windows [n, 257] of task documents like those in the training text, from another seed."""
    documents = training_documents(TASK_BYTES, seed=77)
    ends = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in documents]
    packed = pack([[token for document in ends for token in document]], WINDOW + 1, None)
    return load_windows(packed.ids, packed.mask, limit)


def allocation_windows(tokenizer: Any, entries: int, limit: int, domain: str = "") -> Tensor:
    """Windows [n, 257] of the calibration documents held out of the fit, of all domains mixed or of one domain."""
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
    """Policies that an allocation changes, by rule."""
    return {
        "spread": f"spread:budget={m},fill=geometric",
        "spread, native denominator": f"spread:budget={m},fill=native",
        "spread, mean direction": f"spread:budget={m},fill=mean_direction",
        "price": f"price:budget={m},fill=geometric",
        "price, native denominator": f"price:budget={m},fill=native",
        "price, mean direction": f"price:budget={m},fill=mean_direction",
    }


def ways(m: int) -> dict[str, str]:
    """Policies compared at every target, by rule."""
    return {
        "BASE": f"base:budget={m}",
        "BASE, geometric": f"base:budget={m},fill=geometric",
        "BASE, mean direction": f"base:budget={m},fill=mean_direction",
        "BASE, relative": f"base:budget={m},relative=0.5",
        "BASE, geometric, relative": f"base:budget={m},fill=geometric,relative=0.5",
        **allocated(m),
        "mean energies": f"static:budget={m}",
        "true energies (bound)": f"oracle:budget={m}",
    }


def left_out(m: int) -> dict[str, str]:
    """Policies with one part of `spread` left out or added, at one target and with the same budgets."""
    return {
        "with the executed denominator": f"spread:budget={m},fill=executed",
        "with relative costs, .5": f"spread:budget={m},fill=geometric,relative=0.5",
        "with relative costs, 1": f"spread:budget={m},fill=geometric,relative=1",
        "with a floor": f"spread:budget={m},fill=geometric,floor=yes",
        "price with a floor": f"price:budget={m},fill=geometric,floor=yes",
        "price with a ceiling of 20": f"price:budget={m},fill=geometric,ceiling=20",
    }


UNIONS = {
    **{f"OEA, k0 = {k}": f"oea:k0={k}" for k in (1, 2)},
    **{f"plain top-k, k = {k}": f"topk:k={k}" for k in (1, 2, 4)},
}  # rules without a budget


class Study:
    """One model, the text it is measured on, and the file that rows are appended to."""

    def __init__(self, a: argparse.Namespace) -> None:
        self.a, self.started = a, time.time()
        self.model, self.tokenizer = load_model(str(a.model), device=a.device, dtype=a.dtype)
        self.entries = vocabulary(self.model)
        self.files = sorted(a.text.glob("valid-*.txt.xz")) if a.text else embedded_text("heldout")
        self.stamp = provenance.stamp(a.device) | ({"commit": a.commit} if a.commit else {})

    def say(self, line: str) -> None:
        print(f"{time.time() - self.started:.0f} s: {line}", file=sys.stderr, flush=True)

    def windows(self, limit: int, domain: str = "") -> Tensor:
        files = [f for f in self.files if domain in ("", domain_of(f))]
        return heldout_windows(self.tokenizer, self.entries, limit, files=files)

    def allocate(
        self, averages: tuple[int, ...], batch: int = BATCH, domain: str = "", *, tasks: bool = False, least: int = 1
    ) -> Stats:
        """Statistics with an allocation. `tasks`: a third of the windows are task documents, as in training."""
        windows = allocation_windows(self.tokenizer, self.entries, max(self.a.search, batch), domain)
        if tasks:
            share = max(batch, len(windows) // 3 // batch * batch)  # batches of one kind, as text and tasks are served
            windows = torch.cat([windows[: len(windows) - share], task_windows(self.tokenizer, share)])
        stats = load_stats(self.a.folder / "every.safetensors")
        allocated = allocate(self.model, stats, windows, averages=averages, rounds=ROUNDS, batch=batch, least=least)
        self.say(f"allocated at batch {batch} on {len(windows)} windows of {domain or 'all domains'}")
        return allocated

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
        """Append one row per rule, and one of native routing, which has target 0."""
        policies = {name: parse(text) for name, text in named.items()}
        questions = held_out("test", items) if items else []
        random.Random(0).shuffle(questions)
        qualities = evaluate(
            self.model, list(policies.values()), stats, windows, items=questions, tokenizer=self.tokenizer,
            start_id=self.tokenizer.eos_token_id, batch=batch, retained_windows=2 * batch, quiet=True,
        )  # fmt: skip
        names = {policy.name: name for name, policy in policies.items()}
        rows = []
        for quality in qualities:
            name = names.get(quality.policy, "native")
            about = {"bench": bench, "method": name, "target": target if quality.policy in names else 0, **extra}
            rows.append({**quality.as_row(self.a.name), **about, **self.stamp})
        provenance.append_rows(self.a.results, rows)
        self.say(f"{bench}: {len(rows)} rules at {target}, batch {batch} {extra or ''}")


def arguments(doc: str, stages: tuple[str, ...]) -> argparse.ArgumentParser:
    """The arguments that `Study` reads, for every study of one model."""
    ap = argparse.ArgumentParser(description=doc.splitlines()[0])
    ap.add_argument("stages", nargs="+", choices=stages)
    ap.add_argument("--folder", type=Path, required=True, help="folder of the statistics")
    ap.add_argument("--model", type=Path, default=MODEL)
    ap.add_argument("--name", default=NAME, help="name of the model in the rows")
    ap.add_argument("--text", type=Path, help="folder of valid-DOMAIN.txt.xz to measure on")
    ap.add_argument("--windows", type=int, default=96, help="windows of 256 tokens to measure on")
    ap.add_argument("--device", default=default_device())
    ap.add_argument("--dtype", default="float32")
    ap.add_argument("--commit", help="commit of a tree without history")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/quality.jsonl")
    return ap


def main() -> None:
    ap = arguments(__doc__, STAGES)
    ap.add_argument("--solve", type=int, nargs="+", default=SOLVED, help="averages that are solved for")
    ap.add_argument("--targets", type=int, nargs="+", default=TARGETS, help="averages to measure")
    ap.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="other batch sizes to measure")
    ap.add_argument("--search", type=int, default=32, help="windows of 256 tokens to allocate on")
    ap.add_argument("--items", type=int, default=60, help="items of each task")
    ap.add_argument("--mixed", nargs="+", choices=list(MIXED), default=list(MIXED), help="allocations of `mixed`")
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
                additive = {"with the sum of one-layer losses alone": "spread:budget=10,fill=geometric"}
                study.measure("spread", additive, 10, one_layer_solution(stats, 10), windows)
            study.measure("spread", UNIONS, 0, stats, windows)
        elif stage == "tasks":
            rules = ways(10) | UNIONS
            study.measure("spread_tasks", rules, 10, load_stats(mixed), study.windows(BATCH), items=a.items)
        elif stage == "sizes":
            for batch in a.sizes:
                m, windows = ALONE if batch == 1 else 10, study.windows(a.windows // batch * batch)
                study.measure("spread_sizes", ways(m), m, load_stats(mixed), windows, batch, allocated_at=BATCH)
                stats = study.allocate((m,), batch)
                study.measure("spread_sizes", allocated(m), m, stats, windows, batch, allocated_at=batch)
        elif stage == "mixed":
            windows = study.windows(a.windows)
            for where in a.mixed:
                tasks, least = MIXED[where]
                stats = study.allocate(AIMS, tasks=tasks, least=least)
                stats.save(a.folder / file_of(where))
                for m in AIMS:
                    rules = {name: ways(m)[name] for name in ("BASE", "BASE, geometric", *allocated(m))}
                    study.measure("spread_mixed", rules, m, stats, windows, items=a.items, allocated_on=where)
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
