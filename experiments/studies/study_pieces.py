"""Study of single parts beyond BASE at equal fetched experts: weights, coverage, sketches of lost experts.

    python -m experiments.studies.study_spread calibrate --folder out
    python -m experiments.studies.study_pieces sketch denominators gradient measure --folder out
    python -m experiments.studies.study_spread mixed --folder out  # budgets by layer, for the rest
    python -m experiments.studies.study_pieces sketch combined answers orders --folder out --tasks --fit 1000 --rank 8

Sketches are fitted on calibration text, denominators and layers' shares chosen on its documents held out of the
fit, as in `study_spread.py`. Rows go to benchmarks/results/quality.jsonl, each with its difference to BASE and to BASE
with `fill=mean_direction` on the same windows.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from torch import Tensor

from experiments.studies.coverage import Coverage
from experiments.studies.study_spread import (
    AIMS,
    BOTH,
    ROUNDS,
    SOLVED,
    TOKENS,
    Study,
    allocation_windows,
    arguments,
    file_of,
    task_windows,
)
from moebudget.calibrate.allocation import allocate
from moebudget.calibrate.data import pack
from moebudget.calibrate.sketch import sketch
from moebudget.core import provenance
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats, load_stats
from moebudget.demo.run import BATCH, WINDOW, calibration_corpus
from moebudget.demo.tasks import held_out
from moebudget.evaluate import evaluate_tasks, evaluate_text
from moebudget.evaluate.corpus import load_windows
from moebudget.evaluate.paired import paired_hits
from moebudget.evaluate.quality import half_width
from moebudget.methods.base import PredictedEnergy
from moebudget.methods.fills import Backfill, EnergyGain, MeanDirection
from moebudget.methods.registry import parse

BENCH = "pieces2"
RANKS = (1, 2, 4, 8)
STAGES = ("sketch", "denominators", "gradient", "measure", "combined", "answers", "orders")
ORDERS = 3  # compositions of the batches that `orders` compares


def of_rank(stats: Stats, rank: int) -> Stats:
    """The sketches of the first `rank` singular directions, equal to a fit of that rank."""
    cut = {name: stats.tensors[name][:, :, :rank].contiguous() for name in ("sketch_in", "sketch_out")}
    return dataclasses.replace(stats, tensors={**stats.tensors, **cut})


def covering(m: int, exponent: float) -> Policy:
    return Policy(PredictedEnergy(), Coverage(m, exponent), Backfill(), f"coverage:budget={m},exponent={exponent:g}")


def energy_and_direction(m: int) -> Policy:
    name = f"base:budget={m},fill=mean_direction"
    return dataclasses.replace(parse(name), fill=MeanDirection(EnergyGain()), name=f"{name} of energy")


def rules(m: int) -> dict[str, tuple[Policy, str, int]]:
    """Name -> policy, file of its statistics, and rank; BASE and the mean direction come first."""
    every, sketches = "every", "sketch"
    return {
        "BASE": (parse(f"base:budget={m}"), every, 0),
        "mean direction": (parse(f"base:budget={m},fill=mean_direction"), every, 0),
        **{f"sketch of rank {r}": (parse(f"base:budget={m},fill=sketch"), sketches, r) for r in RANKS},
        "energy kept": (parse(f"base:budget={m},fill=energy"), every, 0),
        "energy kept, mean direction": (energy_and_direction(m), every, 0),
        **{f"coverage, exponent {q:g}": (covering(m, q), every, 0) for q in (1.5, 2.0, 3.0)},
        "denominator by layer": (parse(f"base:budget={m},fill=by_layer"), "by_layer", 0),
    }


def combined(m: int) -> dict[str, str]:
    """Policies with and without an allocation over the layers, and with and without sketches, by rule."""
    return {"BASE": f"base:budget={m}"} | {
        f"{name}, {fill.replace('_', ' ')}": f"{rule}:budget={m},fill={fill}"
        for name, rule in (("BASE", "base"), ("spread", "spread"))
        for fill in ("geometric", "mean_direction", "sketch")
    }


def sketch_cost(model: torch.nn.Module, stats: Stats, lost: float) -> float:
    """The size of the sketches of `lost` experts, in experts of this model."""
    rank, d = stats.tensors["sketch_in"].shape[2], stats.facts.hidden
    return lost * rank * (2 * d + 1) / (3 * d * model.config.moe_intermediate_size)


def measure(study: Study, m: int, windows: Tensor) -> None:
    seen = dict[str, Tensor]()
    (native,) = evaluate_text(study.model, [parse("native")], None, windows, batch=BATCH, quiet=True)
    for name, (policy, file, rank) in rules(m).items():
        if study.a.rules and name not in ("BASE", "mean direction", *study.a.rules):
            continue
        stats = load_stats(study.a.folder / f"{file}.safetensors")
        stats = of_rank(stats, rank) if rank else stats
        (result,) = evaluate_text(study.model, [policy], stats, windows, batch=BATCH, quiet=True)
        seen[name] = result.nll
        row: dict[str, Any] = {
            "bench": BENCH, "model": study.a.name, "B": BATCH, "method": name, "policy": policy.name, "target": m,
            "fetched": round(result.counters.fetched, 4), "native_union": round(result.counters.native_union, 4),
            "nll": round(float(result.nll.mean()), 5), "native_nll": round(float(native.nll.mean()), 5),
            "nll_delta_ci95": round(half_width(result.nll - native.nll), 5), "tokens": result.tokens,
            "agreement": round(100 * float(result.agreement.mean()), 3),
            "agreement_ci95": round(100 * half_width(result.agreement), 3),
        }  # fmt: skip
        for key, reference in (("base", "BASE"), ("mean_direction", "mean direction")):
            if reference in seen:
                gap = result.nll - seen[reference]
                row |= {f"over_{key}": round(float(gap.mean()), 5), f"over_{key}_ci95": round(half_width(gap), 5)}
        if rank:
            lost = result.counters.native_union - result.counters.fetched
            row["sketches_in_experts"] = round(sketch_cost(study.model, stats, lost), 4)
        provenance.append_rows(study.a.results, [{**row, **study.stamp}])
        study.say(f"{name} at {m}: +{result.nll.mean() - native.nll.mean():.4f}")


def with_sketches(study: Study) -> Stats:
    """The allocation of BOTH and the sketches, cut to the rank of the arguments."""
    spread, sketches = (load_stats(study.a.folder / name) for name in (file_of(BOTH), "sketch.safetensors"))
    maps = {name: of_rank(sketches, study.a.rank).tensors[name] for name in ("sketch_in", "sketch_out")}
    return dataclasses.replace(spread, tensors={**spread.tensors, **maps})


def answer(study: Study, m: int, stats: Stats, about: dict[str, Any]) -> None:
    """Append one row per rule: tasks answered, and the difference to BASE on the same items."""
    named, questions = combined(m), held_out("test", study.a.items)
    random.Random(0).shuffle(questions)
    results = evaluate_tasks(
        study.model, [parse(text) for text in named.values()], stats, questions, study.tokenizer, batch=BATCH,
        start_id=study.tokenizer.eos_token_id, quiet=True,
    )  # fmt: skip
    rows = []
    for name, result in zip(named, results, strict=True):
        lost = paired_hits(result.hits, results[0].hits, result.tasks)
        rows.append({
            "bench": "spread_answers", "model": study.a.name, "B": BATCH, "method": name, "target": m,
            "policy": result.policy.name, "task_avg": round(result.average, 3), "items": len(questions),
            "task_ci95": round(result.half_width, 3), "task_fetched": round(result.counters.fetched, 4),
            "over_base": round(-lost.mean, 3), "over_base_low": round(-lost.high, 3),
            "over_base_high": round(-lost.low, 3), **about, **study.stamp,
        })  # fmt: skip
    provenance.append_rows(study.a.results, rows)
    study.say(f"answers: {len(rows)} rules at {m}")


def orders(study: Study, m: int, stats: Stats, about: dict[str, Any]) -> None:
    """Append one row per rule: its loss over BASE's on the same windows, shuffled into other batches each time."""
    named, windows = combined(m), study.windows(study.a.windows)
    policies, losses = [parse(text) for text in named.values()], []
    for seed in range(ORDERS):
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        native, *results = evaluate_text(study.model, [parse("native"), *policies], stats, windows[order], batch=BATCH)
        losses.append([float((result.nll - native.nll).mean()) for result in results])
        study.say(f"order {seed}: {losses[-1]}")
    rows = [
        {
            "bench": "spread_orders", "model": study.a.name, "B": BATCH, "method": name, "target": m,
            "policy": policy.name, "windows": len(windows), "over_native": [round(loss[i], 5) for loss in losses],
            "share_of_base": [round(loss[i] / loss[0], 4) for loss in losses], **about, **study.stamp,
        }
        for i, (name, policy) in enumerate(zip(named, policies, strict=True))
    ]  # fmt: skip
    provenance.append_rows(study.a.results, rows)


def main() -> None:
    ap = arguments(__doc__, STAGES)
    ap.add_argument("--targets", type=int, nargs="+", default=(10, 16), help="experts per layer to measure at")
    ap.add_argument("--rules", nargs="+", help="rules by name, after BASE and the mean direction; default: all")
    ap.add_argument("--items", type=int, default=60, help="items of each task, for `combined` and `answers`")
    ap.add_argument("--rank", type=int, default=4, choices=RANKS, help="rank of the sketches after `measure`")
    ap.add_argument("--search", type=int, default=32, help="windows of 256 tokens to allocate on")
    ap.add_argument("--fit", type=int, default=256, help="windows of 256 tokens to fit sketches on")
    ap.add_argument("--tasks", action="store_true", help="fit a third of the windows on task documents")
    a = ap.parse_args()
    study = Study(a)
    for stage in a.stages:
        if stage == "measure":
            for m in a.targets:
                measure(study, m, study.windows(a.windows))
            continue
        if stage in ("combined", "answers", "orders"):
            stats, about = (
                with_sketches(study),
                {"rank": a.rank, "sketched_on": "text and tasks" if a.tasks else "text"},
            )
            if stage == "combined":
                for m in AIMS:
                    study.measure(
                        "spread_sketch", combined(m), m, stats, study.windows(a.windows), items=a.items, **about
                    )
            else:
                (answer if stage == "answers" else orders)(study, AIMS[0], stats, about)
            continue
        stats = load_stats(a.folder / "every.safetensors")
        if stage == "sketch":
            corpus = calibration_corpus(study.tokenizer, study.entries, TOKENS)
            packed = pack([corpus.fit.ids[corpus.fit.mask].tolist()], WINDOW + 1, None)
            tasks = (
                task_windows(study.tokenizer, a.fit // 3) if a.tasks else torch.empty(0, WINDOW + 1, dtype=torch.long)
            )
            windows = torch.cat([load_windows(packed.ids, packed.mask, a.fit - len(tasks)), tasks])
            sketch(study.model, stats, windows, rank=max(RANKS)).save(a.folder / "sketch.safetensors")
            continue
        windows = allocation_windows(study.tokenizer, study.entries, a.search)
        if stage == "denominators":
            settings: dict[str, Any] = {"averages": (10, 16), "rounds": 0, "fill": "by_layer"}
        else:
            settings = {"averages": SOLVED, "rounds": ROUNDS, "gains": "gradient"}
        allocated = allocate(study.model, stats, windows, batch=BATCH, prices=False, least=1, **settings)
        allocated.save(a.folder / ("by_layer.safetensors" if stage == "denominators" else "gradient.safetensors"))
        study.say(f"{stage}: {allocated.info['allocation']}")


if __name__ == "__main__":
    main()
