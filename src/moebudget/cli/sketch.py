"""Command `moebudget sketch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moebudget.cli.app import (
    STATISTICS,
    BatchOption,
    DeviceOption,
    DtypeOption,
    LengthOption,
    ModelArgument,
    StatsOption,
    app,
)
from moebudget.cli.inputs import load_with_windows, require_folder


@app.command("sketch", rich_help_panel=STATISTICS)
def sketch_command(
    model: ModelArgument,
    stats: StatsOption,
    data: Annotated[
        str, typer.Option(help="Text that evaluation does not use: file, .jsonl, folder or hub data set.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write: the statistics with the sketches added.")
    ],
    budget: Annotated[int, typer.Option(min=1, help="Budget while serving, in experts per layer.")] = 10,
    rank: Annotated[
        int, typer.Option(min=1, help="Rank of each map; 2 d + 1 numbers per expert per rank, d the hidden size.")
    ] = 4,
    batch: BatchOption = 16,
    windows: Annotated[int, typer.Option(min=1, help="Most windows of text to fit on.")] = 256,
    length: LengthOption = 256,
    layers_per_pass: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layers per pass over the text; each takes 8 N d^2 bytes, for N experts and hidden size d. Default: "
            "all.",
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Fit low-rank sketches of the experts, which replace those that a budget leaves out (fill=sketch)."""
    from moebudget.calibrate.sketch import sketch
    from moebudget.core.stats import load_stats

    known = load_stats(stats)
    require_folder(output)
    loaded, _, text, _ = load_with_windows(model, known, data, length, windows, device, dtype)
    sketched = sketch(loaded, known, text, budget=budget, rank=rank, batch=batch, group=layers_per_pass)
    sketched.save(output)
    Console(stderr=True).print(f"wrote {output}")
    sys.stdout.write(json.dumps({"output": str(output), **sketched.info["sketch"]}) + "\n")
