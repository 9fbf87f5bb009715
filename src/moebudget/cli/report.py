"""`moebudget report`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moebudget.cli.app import app


@app.command()
def report(
    rows: Annotated[list[Path], typer.Argument(help="Rows that --results, --json or a benchmark wrote.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    plots: Annotated[Path | None, typer.Option(help="Also write every plot here, as .svg and .png.")] = None,
    title: Annotated[str | None, typer.Option(help="The page's heading.")] = None,
) -> None:
    """One HTML page from benchmark rows: quality, time, kernels, studies, and where every row comes from."""
    from moebudget.report import build

    made = build(rows, out, plots=plots, title=title)
    where = "" if plots is None else f"; the plots are in {plots}"
    Console(soft_wrap=True).print(
        f"{made['rows']} rows, {len(made['charts'])} charts, {made['bytes'] / 1e6:.1f} MB: {out}{where}",
        highlight=False,
    )
    sys.stdout.write(json.dumps(made) + "\n")
