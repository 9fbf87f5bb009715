"""`moebudget demo`, `policies` and `stats`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import DeviceOption, app


@app.command()
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: fewer tokens and items, wide intervals.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the plot, the rows and the statistics.")] = Path("out"),
    tokens: Annotated[int | None, typer.Option(min=1000, help="Calibration tokens.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Windows of 256 held-out tokens.")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="Items of each of the nine tasks.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies instead of the demo's own.")] = None,
    stats: Annotated[Path | None, typer.Option(help="Use these statistics, do not calibrate.")] = None,
    device: DeviceOption = None,
    results: Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")] = None,
) -> None:
    """Calibrate the small real model in the package, cap its experts by six rules, show what each costs."""
    from dataclasses import replace

    from moebudget.demo.run import FULL, POLICIES, QUICK, run_demo

    size = QUICK if quick else FULL
    given = {k: v for k, v in (("tokens", tokens), ("windows", windows), ("items", items)) if v is not None}
    policies = POLICIES if not policy else ("dense", *(p for p in policy if p != "dense"))
    run_demo(replace(size, **given), out, policies=policies, device=device, stats=stats, results=results)


@app.command()
def policies() -> None:
    """List the policies that --policy understands."""
    import inspect

    from moebudget.presets import EXAMPLES, PRESETS, parse
    from moebudget.types import PLACEMENT

    table = Table(title="policy = name:field=value,...")
    table.add_column("policy", no_wrap=True)
    table.add_column("rule")
    table.add_column("statistics", no_wrap=True)
    for name, make in PRESETS.items():
        parameters = inspect.signature(make).parameters
        required = [n for n, p in parameters.items() if p.default is p.empty]
        optional = [f"{n}={p.default}" for n, p in parameters.items() if p.default is not p.empty]
        spelling = name + (":" + ",".join(f"{n}=.." for n in required) if required else "")
        needs = parse(EXAMPLES[name]).needs
        doc = (inspect.getdoc(make) or "").splitlines()[0]
        rule = doc + (f" [dim]({', '.join(optional)})[/dim]" if optional else "")
        asks = [w for w, some in (("yes", needs - PLACEMENT), ("placement", needs & PLACEMENT)) if some]
        table.add_row(spelling, rule, ", ".join(asks) or "no")
    Console(width=max(100, Console().width)).print(table)


@app.command("stats")
def stats_command(file: Annotated[Path, typer.Argument(help="Statistics made by `moebudget calibrate`.")]) -> None:
    """Show what a statistics file holds, as JSON."""
    from moebudget.stats import describe, load_stats

    sys.stdout.write(json.dumps(describe(load_stats(file)), indent=1) + "\n")
