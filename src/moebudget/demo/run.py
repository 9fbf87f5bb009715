"""Demo: calibrate the small model that ships with the package, and compare policies on it."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from moebudget.calibrate import Corpus, calibrate, load_corpus, merge_corpora
from moebudget.calibrate.data import tokenize
from moebudget.core import provenance
from moebudget.core.stats import load_stats
from moebudget.demo.items import TaskItem
from moebudget.demo.tasks import held_out
from moebudget.engines.transformers.loading import default_device, default_dtype, load_model, vocabulary
from moebudget.evaluate.corpus import Sliced, sliced_windows
from moebudget.evaluate.plot import plot_quality
from moebudget.evaluate.quality import Quality, evaluate, quality_table
from moebudget.methods.registry import parse

HERE = Path(__file__).parent
MODEL, DATA = HERE / "model", HERE / "data"
LANGUAGES = DATA / "languages.jsonl.xz"  # with a field `lang`; the model was trained on English and code only
NAME = "moebudget-demo-8m"
BATCH = 16
LENGTH = 512
WINDOW = 256
POLICIES = (
    "native", "topk:k=2", "oea:k0=1", "oea:k0=2", "router_mass:budget=10",
    "squared:budget=8", "squared:budget=10", "squared:budget=16",
    "static:budget=8", "static:budget=10", "static:budget=16",
    "base:budget=8", "base:budget=10", "base:budget=16", "oracle:budget=10",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of data: calibration tokens, windows of 256 tokens, items of each of the nine tasks."""

    tokens: int
    windows: int
    items: int


QUICK, FULL = Size(30_000, 16, 4), Size(150_000, 64, 24)


def embedded_text(part: str, folder: Path = DATA) -> list[Path]:
    """The files of the part `calibration` or `heldout`, one per domain."""
    files = sorted(folder.glob(f"{part}-*.txt.xz"))
    if not files:
        raise FileNotFoundError(f"there is no {part} text in {folder}: reinstall moebudget")
    return files


def run_demo(
    size: Size,
    out: Path,
    *,
    policies: tuple[str, ...] = POLICIES,
    device: str | None = None,
    stats: Path | None = None,
    results: Path | None = None,
) -> None:
    """Run the demo: write plot, rows and statistics into `out`, print a table and, as the last line, a JSON document.

    With `stats` the calibration is skipped; with `results` the rows are appended to that file.
    """
    console, started = Console(stderr=True, soft_wrap=True), time.perf_counter()
    parsed = [parse(text) for text in policies]
    known = None if stats is None else load_stats(stats)
    device = default_device() if device is None else device
    model, tokenizer = load_model(str(MODEL), device=device, dtype=default_dtype(device), stats=known)
    console.print(f"[bold]{NAME}[/bold]: Qwen3-MoE, 6 layers of 64 experts, 8 per token, batch {BATCH}, on {device}")
    if known is None:
        corpus = calibration_corpus(tokenizer, vocabulary(model), size.tokens)
        known = calibrate(model, corpus, model_id=NAME, budget=10, batch=BATCH)
    known.save(_made(out) / "stats.safetensors")
    info = known.info
    console.print(
        f"energy predictor fitted on {info['tokens']:,} tokens: held-out R² {info['r2_heldout']:.2f}, "
        f"retained energy {info['retained_energy']:.3f} at {info['retained_energy_at']['budget']} experts"
    )
    windows = heldout_windows(tokenizer, vocabulary(model), size.windows)
    items = demo_items(size.items)
    rows = evaluate(
        model, parsed, known, windows, items=items, tokenizer=tokenizer, start_id=tokenizer.eos_token_id, batch=BATCH
    )
    seconds = time.perf_counter() - started
    stamp = provenance.stamp(device)
    documents = [{**row.as_row(NAME), **stamp} for row in rows]
    plot_quality(documents, out / "quality.png")
    (out / "quality.json").write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
    if results is not None:
        provenance.append_rows(results, documents)
    title = f"{NAME}, batch {BATCH}: {rows[0].tokens:,} tokens of text, {rows[0].items} task items per policy"
    Console(width=max(116, console.width)).print(quality_table(rows, title))
    for line in findings(rows):
        console.print(line)
    console.print(f"{seconds:.0f} s; {out / 'quality.png'}, {out / 'quality.json'}, {out / 'stats.safetensors'}")
    slim = {"demo": NAME, "seconds": round(seconds, 1), "calibration": dict(info), "rows": documents}
    sys.stdout.write(json.dumps(slim) + "\n")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def calibration_corpus(tokenizer: Any, entries: int, tokens: int) -> Corpus:
    """The embedded text, an equal share of every domain; `tokens` in all, including the held-out part."""
    files = embedded_text("calibration")
    share = tokens // len(files)
    return merge_corpora([load_corpus(str(f), tokenizer, entries, length=LENGTH, max_tokens=share) for f in files])


def heldout_windows(
    tokenizer: Any, entries: int, limit: int, length: int = WINDOW, files: Sequence[Path] = ()
) -> Tensor:
    """Windows [n, length + 1] of these files, or of the embedded held-out text; domains are mixed."""
    return heldout_slices(tokenizer, entries, limit, length, files)[0]


def heldout_slices(
    tokenizer: Any, entries: int, limit: int, length: int = WINDOW, files: Sequence[Path] = ()
) -> Sliced:
    """The same windows, and the domain of each, from the names of the files."""
    files = files or embedded_text("heldout")
    domains = {
        f.name.removeprefix("heldout-").split(".")[0]: tokenize(str(f), tokenizer, entries, min_document=2)[0]
        for f in files
    }
    return sliced_windows(domains, length, tokenizer.eos_token_id, limit)


def demo_items(per_task: int) -> list[TaskItem]:
    """Test items of the nine tasks, shuffled."""
    items = held_out("test", per_task)
    random.Random(0).shuffle(items)
    return items


def findings(rows: list[Quality]) -> list[str]:
    """Sentences that sum up the table, about the policies in it."""
    by_name = {r.policy: r for r in rows}
    native, base = by_name["native"], by_name.get("base:budget=10")
    lines = [f"A native decode step of {native.batch} tokens fetches {native.fetched:.1f} of 64 experts per layer."]
    if base is None:
        return lines
    share = 100 * base.megabytes / native.megabytes
    lines.append(
        f"BASE with a budget of 10 reads {share:.0f} % as many expert bytes as native and loses "
        f"{base.delta:.2f} nats per token."
    )
    rules = {"squared": "squared router weights", "static": "mean energies", "router_mass": "router mass"}
    costs = [f"{by_name[k].delta:.2f} with {v}" for n, v in rules.items() if (k := f"{n}:budget=10") in by_name]
    if costs:
        lines.append(
            f"Other rules with 10 experts: {', '.join(costs)}. A router weight is a token's preference for an expert, "
            "not the size of the expert's output for it; BASE multiplies the two."
        )
    bound = by_name.get("oracle:budget=10")
    if bound is not None:
        lines.append(f"With true instead of predicted energies BASE would lose {bound.delta:.2f}.")
    return lines
