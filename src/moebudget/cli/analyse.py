"""Command `moebudget analyse`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moebudget.cli.app import (
    QUALITY,
    BatchOption,
    DeviceOption,
    DtypeOption,
    LengthOption,
    ModelArgument,
    ResultsOption,
    app,
)
from moebudget.cli.inputs import HeldOutData, load_with_windows, note


@app.command("analyse", rich_help_panel=QUALITY)
def analyse_command(
    model: ModelArgument,
    data: HeldOutData,
    stats: Annotated[
        Path | None,
        typer.Option(
            help="Statistics file of `moebudget calibrate`; made with --for base,static,nonlinear,sere it serves all "
            "studies. Default: none."
        ),
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="Task items, as for `moebudget eval`. Default: none.")] = None,
    study: Annotated[
        list[str] | None,
        typer.Option(
            help="Study to run: geometry, selection, fill, batch or draining; repeat the option for more. Default: "
            "all that can run."
        ),
    ] = None,
    batch: BatchOption = 16,
    budget: Annotated[
        int, typer.Option(min=1, help="Budget in experts per layer, for the studies with a fixed budget.")
    ] = 10,
    windows: Annotated[int, typer.Option(min=1, help="Most windows of text.")] = 128,
    length: LengthOption = 256,
    out: Annotated[Path, typer.Option(help="Folder for the rows and the plot.")] = Path("out"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: ResultsOption = None,
) -> None:
    """Study what removal costs assume, on your model: geometry of expert outputs, ablations, batch size, draining."""
    from moebudget.analyse import STUDIES, Setting, can_run, require_study, run_study
    from moebudget.core import provenance
    from moebudget.core.stats import Stats, load_stats
    from moebudget.demo.tasks import load_items
    from moebudget.engines.transformers.families import facts_of
    from moebudget.report.analyses import plot_studies, tables

    known = None if stats is None else load_stats(stats)
    items = [] if tasks is None else load_items(tasks)
    held = set() if known is None else set(known.tensors)
    for name in study or []:
        require_study(name, held, bool(items))
    studies = study or [name for name in STUDIES if can_run(name, held, bool(items))]
    loaded, tokenizer, text, device = load_with_windows(model, known, data, length, windows, device, dtype)
    known = Stats(facts_of(loaded), {}) if known is None else known
    setting = Setting(loaded, model, known, text, items, tokenizer, tokenizer.bos_token_id, batch, budget)
    console, rows = Console(width=max(100, Console().width)), list[dict[str, Any]]()
    left_out = [name for name in STUDIES if name not in studies]
    if left_out and not study:
        note(f"left out, because statistics or task items are missing: {', '.join(left_out)}")
    for name in studies:
        note(f"study {name}")
        rows += run_study(name, setting)
    stamped = [{**row, **provenance.stamp(device)} for row in rows]
    for table in tables(rows):
        console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    plot_studies(rows, out / "analysis.png")
    (out / "analysis.json").write_text(json.dumps(stamped, indent=1) + "\n", encoding="utf-8")
    if results is not None:
        provenance.append_rows(results, stamped)
    sys.stdout.write(json.dumps({"rows": stamped}) + "\n")
