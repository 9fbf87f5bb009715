"""Commands `moebudget demo`, `policies` and `stats`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import START, STATISTICS, DeviceOption, ResultsOption, app


@app.command(rich_help_panel=START)
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Finish in under a minute: fewer tokens and items, wider intervals.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the plot, the rows and the statistics.")] = Path("out"),
    tokens: Annotated[
        int | None, typer.Option(min=1000, help="Calibration tokens. Default: 150,000; 30,000 with --quick.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=1, help="Windows of 256 held-out tokens. Default: 64; 16 with --quick.")
    ] = None,
    items: Annotated[
        int | None, typer.Option(min=1, help="Items of each of the nine tasks. Default: 24; 4 with --quick.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy string to run; repeat the option for more. Default: fifteen settings of eight policies."
        ),
    ] = None,
    stats: Annotated[
        Path | None, typer.Option(help="Statistics file to use instead of calibrating. Default: calibrate.")
    ] = None,
    device: DeviceOption = None,
    results: ResultsOption = None,
) -> None:
    """Run the demo: calibrate the small trained model in the package and compare policies on it, in a few minutes."""
    from dataclasses import replace

    from moebudget.demo.run import FULL, POLICIES, QUICK, run_demo

    size = QUICK if quick else FULL
    changes = {k: v for k, v in (("tokens", tokens), ("windows", windows), ("items", items)) if v is not None}
    policies = POLICIES if not policy else ("native", *(p for p in policy if p != "native"))
    run_demo(replace(size, **changes), out, policies=policies, device=device, stats=stats, results=results)


@app.command(rich_help_panel=START)
def policies() -> None:
    """List all policies: how to write each one, its rule, the statistics it reads, and its source."""
    from moebudget.core.types import makers
    from moebudget.methods import METHODS
    from moebudget.methods.registry import shortest

    table = Table(
        title="policy string: name:field=value,field=value",
        caption="statistics: the commands that make what a policy reads; placement: use --devices",
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("rule (optional fields and defaults)")
    table.add_column("statistics")
    table.add_column("source", no_wrap=True)
    for kind in KINDS:
        table.add_section()
        for method in (m for m in METHODS.values() if _kind(m.source) == kind):
            optional = ", ".join(f"{n}={shortest(f.default)}" for n, f in method.fields.items() if not f.required)
            rule = method.rule + (f" [dim]({optional})[/dim]" if optional else "")
            statistics = ", ".join(makers(method.needs)) or "none"
            table.add_row(method.signature, rule, statistics, _short(method.source))
    Console(width=max(110, Console().width)).print(table)


KINDS = ("reference", "published", "ours")  # order of the table


def _kind(source: str) -> str:
    if source.startswith("ours"):
        return "ours"
    return "published" if "https://" in source else "reference"


def _short(source: str) -> str:
    """The identifier of the paper, or whose rule it is."""
    paper = re.search(r"https://arxiv\.org/abs/([^\s,]+)", source)
    return source.partition(",")[0] if paper is None or _kind(source) == "ours" else f"arXiv:{paper[1]}"


@app.command("stats", rich_help_panel=STATISTICS)
def stats_command(
    file: Annotated[Path, typer.Argument(help="Statistics file written by `moebudget calibrate`.")],
) -> None:
    """Describe a statistics file, as JSON."""
    from moebudget.core.stats import describe, load_stats

    sys.stdout.write(json.dumps(describe(load_stats(file)), indent=1) + "\n")
