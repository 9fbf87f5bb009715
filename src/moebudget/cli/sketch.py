"""`moebudget sketch`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moebudget.cli.app import DeviceOption, DtypeOption, ModelArgument, app
from moebudget.cli.inputs import load_with_windows, require_folder


@app.command("sketch")
def sketch_command(
    model: ModelArgument,
    stats: Annotated[Path, typer.Option(help="Statistics made by `moebudget calibrate`.")],
    data: Annotated[str, typer.Option(help="Text that evaluation does not use: file, folder, ...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The statistics to write, with the sketches.")],
    budget: Annotated[int, typer.Option(min=1, help="Experts a layer, as served.")] = 10,
    rank: Annotated[int, typer.Option(min=1, help="Of the maps; each costs 2 d + 1 numbers a rank.")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step, as served.")] = 16,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to fit on at most.")] = 256,
    length: Annotated[int, typer.Option(min=4, help="Predicted tokens a window.")] = 256,
    layers_per_pass: Annotated[
        int | None, typer.Option(min=1, help="Layers a pass over the text; default: all, 8 N d^2 bytes each.")
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Fit a linear map of low rank to every expert where a budget leaves it out, for the fill `sketch`."""
    from moebudget.allocate import sketch
    from moebudget.stats import load_stats

    known = load_stats(stats)
    require_folder(output)
    loaded, _, text, _ = load_with_windows(model, known, data, length, windows, device, dtype)
    found = sketch(loaded, known, text, budget=budget, rank=rank, batch=batch, group=layers_per_pass)
    found.save(output)
    Console(stderr=True).print(f"wrote {output}")
    sys.stdout.write(json.dumps({"output": str(output), **found.info["sketch"]}) + "\n")
