"""Command `moebudget allocate`."""

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


@app.command("allocate", rich_help_panel=STATISTICS)
def allocate_command(
    model: ModelArgument,
    stats: StatsOption,
    data: Annotated[
        str,
        typer.Option(help="Text that neither calibration nor evaluation uses: file, .jsonl, folder or hub data set."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="File to write: the statistics with the allocation added.")
    ],
    average: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Average budget to solve for, in experts per layer; repeat the option for more. Budgets in between "
            "are interpolated. Default: a list of common values.",
        ),
    ] = None,
    batch: BatchOption = 16,
    windows: Annotated[int, typer.Option(min=1, help="Most windows of text to measure on.")] = 48,
    length: LengthOption = 256,
    fill: Annotated[str, typer.Option(help="Fill to measure with: geometric, native, by_layer, ...")] = "geometric",
    rounds: Annotated[int, typer.Option(min=0, help="Most exchanges between layers per average budget.")] = 6,
    least: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Smallest budget of any layer, in experts; at most the smallest average. Default: half of the routes "
            "per token.",
        ),
    ] = None,
    prices: Annotated[bool, typer.Option(help="Also find the prices that the policy `price` reads.")] = True,
    gains: Annotated[
        str,
        typer.Option(
            help="Start from the measured loss of each layer (measured) or from one backward pass (gradient)."
        ),
    ] = "measured",
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Allocate an average budget to the layers, by how much each layer needs its experts.

    The policies `spread` and `price` read the allocation; `attach(budgets=layer_budgets(stats, 10))` applies it to any
    policy with a budget.
    """
    from moebudget.calibrate.allocation import allocate
    from moebudget.calibrate.allocation.run import AVERAGES, checked
    from moebudget.core.stats import load_stats
    from moebudget.methods.spread import spread

    spread(1, fill)
    known = load_stats(stats)
    usual = [m for m in AVERAGES if (least or 1) <= m < known.facts.experts]
    averages, least = checked(average or usual, known.facts, least)
    require_folder(output)
    loaded, _, text, _ = load_with_windows(model, known, data, length, windows, device, dtype)
    allocated = allocate(
        loaded, known, text, averages=averages, batch=batch, fill=fill, rounds=rounds, prices=prices, gains=gains,
        least=least,
    )  # fmt: skip
    allocated.save(output)
    Console(stderr=True).print(f"wrote {output}")
    sys.stdout.write(json.dumps({"output": str(output), **allocated.info["allocation"]}) + "\n")
