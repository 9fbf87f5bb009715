"""`moebudget analyse`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moebudget.cli.app import DeviceOption, DtypeOption, ModelArgument, app
from moebudget.cli.inputs import load_with_windows


@app.command("analyse")
def analyse_command(
    model: ModelArgument,
    data: Annotated[str, typer.Option(help="Held-out text: file, .jsonl, folder or hub data set.")],
    stats: Annotated[
        Path | None, typer.Option(help="Statistics, made with --for base,static,nonlinear,sere for all studies.")
    ] = None,
    tasks: Annotated[Path | None, typer.Option(help="Task items, as for `moebudget eval`.")] = None,
    study: Annotated[
        list[str] | None, typer.Option(help="geometry, selection, fill, batch, draining; default: all that can run.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step.")] = 16,
    budget: Annotated[int, typer.Option(min=1, help="Experts of the studies with a fixed budget.")] = 10,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text at most.")] = 128,
    length: Annotated[int, typer.Option(min=4, help="Predicted tokens a window.")] = 256,
    out: Annotated[Path, typer.Option(help="Folder for the rows and the picture.")] = Path("out"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """What removal costs rest on, on your model: geometry of expert outputs, ablations, batch size, draining."""
    from moebudget import provenance
    from moebudget.analyse import STUDIES, Setting, can_run, require_study, run_study
    from moebudget.analyse.show import plot_studies, tables
    from moebudget.demo.tasks import load_items
    from moebudget.integrations.families import facts_of
    from moebudget.stats import Stats, load_stats

    known = None if stats is None else load_stats(stats)
    items = [] if tasks is None else load_items(tasks)
    have = set() if known is None else set(known.tensors)
    for name in study or []:
        require_study(name, have, bool(items))
    chosen = study or [name for name in STUDIES if can_run(name, have, bool(items))]
    loaded, tokenizer, text, device = load_with_windows(model, known, data, length, windows, device, dtype)
    known = Stats(facts_of(loaded), {}) if known is None else known
    setting = Setting(loaded, model, known, text, items, tokenizer, tokenizer.bos_token_id, batch, budget)
    console, rows = Console(width=max(100, Console().width)), list[dict[str, Any]]()
    left_out = [name for name in STUDIES if name not in chosen]
    if left_out and not study:
        Console(stderr=True).print(f"left out, for want of statistics or items: {', '.join(left_out)}")
    for name in chosen:
        Console(stderr=True).print(f"study {name}")
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
