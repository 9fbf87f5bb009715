"""Command `moebudget report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moebudget.cli.app import SPEED, app


@app.command(rich_help_panel=SPEED)
def report(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows, written with --results or --json.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML page to write.")] = Path("report.html"),
    plots: Annotated[
        Path | None, typer.Option(help="Also write every plot into this folder, as .svg and .png. Default: do not.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Heading of the page. Default: a general one.")] = None,
) -> None:
    """Write one HTML page from benchmark rows: quality, time, kernels, studies, and the origin of every row."""
    from moebudget.report import build

    made = build(rows, out, plots=plots, title=title)
    where = "" if plots is None else f"; the plots are in {plots}"
    Console(soft_wrap=True).print(
        f"{made['rows']} rows, {len(made['charts'])} charts, {made['bytes'] / 1e6:.1f} MB: {out}{where}",
        highlight=False,
    )
    sys.stdout.write(json.dumps(made) + "\n")
