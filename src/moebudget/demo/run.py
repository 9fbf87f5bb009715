"""The demo: calibrate the small model that ships with the package and compare rules on it."""

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

from moebudget import provenance
from moebudget.calibrate import Corpus, calibrate, load_corpus, merge_corpora
from moebudget.calibrate.data import tokenize
from moebudget.demo.tasks import TaskItem, held_out
from moebudget.evaluate.plot import plot_quality
from moebudget.evaluate.report import Quality, evaluate, quality_table
from moebudget.evaluate.windows import Sliced, sliced_windows
from moebudget.integrations.loading import default_device, default_dtype, load_model, vocabulary
from moebudget.presets import parse
from moebudget.stats import load_stats

HERE = Path(__file__).parent
MODEL, DATA = HERE / "model", HERE / "data"
LANGUAGES = DATA / "languages.jsonl.xz"  # by `lang`; the model learnt English and code alone
NAME = "moebudget-demo-8m"
BATCH = 16
LENGTH = 512
WINDOW = 256
POLICIES = (
    "dense", "topk:k=2", "oea:k0=1", "oea:k0=2", "router_mass:budget=10",
    "squared:budget=8", "squared:budget=10", "squared:budget=16",
    "static:budget=8", "static:budget=10", "static:budget=16",
    "base:budget=8", "base:budget=10", "base:budget=16", "oracle:budget=10",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """How much the demo measures: calibration tokens, windows of 256 tokens, items of each of the nine tasks."""

    tokens: int
    windows: int
    items: int


QUICK, FULL = Size(30_000, 16, 4), Size(150_000, 64, 24)


def embedded_text(part: str, folder: Path = DATA) -> list[Path]:
    """The files of the part `calibration` or `heldout`, one a domain."""
    files = sorted(folder.glob(f"{part}-*.txt.xz"))
    if not files:
        raise FileNotFoundError(f"the package holds no {part} text in {folder}: reinstall moebudget")
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
    """Run the demo, write table, plot and statistics into `out`, and print one JSON document as the last line.

    `stats` skips the calibration; `results` appends the rows to a benchmark file.
    """
    console, started = Console(stderr=True, soft_wrap=True), time.perf_counter()
    parsed = [parse(text) for text in policies]
    known = None if stats is None else load_stats(stats)
    device = default_device() if device is None else device
    model, tokenizer = load_model(str(MODEL), device=device, dtype=default_dtype(device), stats=known)
    console.print(f"[bold]{NAME}[/bold]: Qwen3-MoE, 6 layers of 64 experts, 8 a token, batch {BATCH}, on {device}")
    if known is None:
        corpus = calibration_corpus(tokenizer, vocabulary(model), size.tokens)
        known = calibrate(model, corpus, model_id=NAME, budget=10, batch=BATCH)
    known.save(_made(out) / "stats.safetensors")
    info = known.info
    console.print(
        f"energy predictor fitted on {info['tokens']:,} tokens: held-out R2 {info['r2_heldout']:.2f}, "
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
    title = f"{NAME}, batch {BATCH}: {rows[0].tokens:,} tokens of text, {rows[0].items} task items a row"
    Console(width=max(100, console.width)).print(quality_table(rows, title))
    for line in findings(rows):
        console.print(line)
    console.print(f"{seconds:.0f} s; {out / 'quality.png'}, {out / 'quality.json'}, {out / 'stats.safetensors'}")
    slim = {"demo": NAME, "seconds": round(seconds, 1), "calibration": dict(info), "rows": documents}
    sys.stdout.write(json.dumps(slim) + "\n")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def calibration_corpus(tokenizer: Any, entries: int, tokens: int) -> Corpus:
    """The embedded text, an equal share of every domain, `tokens` together with the held-out part."""
    files = embedded_text("calibration")
    share = tokens // len(files)
    return merge_corpora([load_corpus(str(f), tokenizer, entries, length=LENGTH, max_tokens=share) for f in files])


def heldout_windows(
    tokenizer: Any, entries: int, limit: int, length: int = WINDOW, files: Sequence[Path] = ()
) -> Tensor:
    """Windows [n, length + 1] of these files, or of the embedded held-out text, domains mixed."""
    return heldout_slices(tokenizer, entries, limit, length, files)[0]


def heldout_slices(
    tokenizer: Any, entries: int, limit: int, length: int = WINDOW, files: Sequence[Path] = ()
) -> Sliced:
    """The same windows and the domain of each, by the names of the files."""
    files = files or embedded_text("heldout")
    domains = {
        f.name.removeprefix("heldout-").split(".")[0]: tokenize(str(f), tokenizer, entries, min_document=2)[0]
        for f in files
    }
    return sliced_windows(domains, length, tokenizer.eos_token_id, limit)


def demo_items(per_task: int) -> list[TaskItem]:
    """Test items of the nine tasks, mixed."""
    items = held_out("test", per_task)
    random.Random(0).shuffle(items)
    return items


def findings(rows: list[Quality]) -> list[str]:
    """What the table says, in sentences made from its numbers; only about policies that were run."""
    by_name = {r.policy: r for r in rows}
    dense, base = by_name["dense"], by_name.get("base:budget=10")
    lines = [f"An unchanged decode step of {dense.batch} tokens fetches {dense.fetched:.1f} of 64 experts a layer."]
    if base is None:
        return lines
    share = 100 * base.megabytes / dense.megabytes
    lines.append(
        f"BASE at 10 experts moves {share:.0f} % of the expert weights and costs {base.delta:.2f} nats a token."
    )
    rivals = {"squared": "squared router weights", "static": "mean energies", "router_mass": "router mass"}
    others = [f"{by_name[k].delta:.2f} with {v}" for n, v in rivals.items() if (k := f"{n}:budget=10") in by_name]
    if others:
        lines.append(
            f"The same 10 experts chosen by other rules cost {', '.join(others)}: the router's weight says how much a "
            "token wants an expert, not how large that expert's output is for it; BASE multiplies the two."
        )
    bound = by_name.get("oracle:budget=10")
    if bound is not None:
        lines.append(f"With true energies instead of predicted ones it would cost {bound.delta:.2f}.")
    return lines
