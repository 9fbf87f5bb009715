"""`moebudget allocate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moebudget.cli.app import DeviceOption, DtypeOption, ModelArgument, app
from moebudget.cli.inputs import load_with_windows, require_folder


@app.command("allocate")
def allocate_command(
    model: ModelArgument,
    stats: Annotated[Path, typer.Option(help="Statistics made by `moebudget calibrate`.")],
    data: Annotated[str, typer.Option(help="Text that neither calibration nor evaluation uses: file, folder, ...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The statistics to write, with the allocation.")],
    average: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Solve for this many experts a layer; repeat the option for more. Others lie between."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step, as served.")] = 16,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to measure on at most.")] = 48,
    length: Annotated[int, typer.Option(min=4, help="Predicted tokens a window.")] = 256,
    fill: Annotated[str, typer.Option(help="Fill to measure with: half, original, by_layer, ...")] = "half",
    rounds: Annotated[int, typer.Option(min=0, help="Exchanges between layers at most, for each average.")] = 6,
    least: Annotated[
        int | None,
        typer.Option(min=1, help="Fewest experts of any layer, at most the smallest average; default: half of K."),
    ] = None,
    prices: Annotated[bool, typer.Option(help="Find the prices that the policy `price` reads, too.")] = True,
    gains: Annotated[
        str, typer.Option(help="Start from one-layer losses (measured) or from one backward pass (gradient).")
    ] = "measured",
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Measure how much each layer needs its experts, and store budgets by layer for every average budget.

    Policies spread and price read them; so does `attach(budgets=layer_budgets(stats, 10))` with any budgeted policy.
    """
    from moebudget.allocate import allocate
    from moebudget.allocate.run import AVERAGES, checked
    from moebudget.presets import spread
    from moebudget.stats import load_stats

    spread(1, fill)
    known = load_stats(stats)
    usual = [m for m in AVERAGES if (least or 1) <= m < known.facts.experts]
    averages, least = checked(average or usual, known.facts, least)
    require_folder(output)
    loaded, _, text, _ = load_with_windows(model, known, data, length, windows, device, dtype)
    found = allocate(
        loaded, known, text, averages=averages, batch=batch, fill=fill, rounds=rounds, prices=prices, gains=gains,
        least=least,
    )  # fmt: skip
    found.save(output)
    Console(stderr=True).print(f"wrote {output}")
    sys.stdout.write(json.dumps({"output": str(output), **found.info["allocation"]}) + "\n")
