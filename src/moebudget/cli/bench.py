"""`moebudget bench`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import app

bench = typer.Typer(help="Time kernels on this machine's GPU; one JSON row a result.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()
def group() -> None:
    """Time kernels on this machine's GPU; one JSON row a result."""


@bench.command()
def routing(
    model: Annotated[
        list[str] | None,
        typer.Option(help="qwen3-30b, qwen1.5-moe, deepseek-v2-lite, deepseek-v3, gpt-oss-120b; default: all."),
    ] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Rows a step; default: 1 8 16 32 64 128.")] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies; {M} stands for the model's budget. Default: base:budget={M}.")
    ] = None,
    compiled: Annotated[list[int] | None, typer.Option(help="Rows at which torch.compile is timed as well.")] = None,
    device: Annotated[str, typer.Option(help="A CUDA device.")] = "cuda",
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """What a policy adds to a layer's router: fused kernels against the torch form, in CUDA graphs."""
    from moebudget import provenance
    from moebudget.bench.routing import POLICIES, ROWS, SHAPES, run_routing

    found = run_routing(model or list(SHAPES), rows or ROWS, policy or POLICIES, device, compiled or ())
    table = Table(title=f"microseconds a layer on {found[0]['gpu']}")
    for name in ("model", "policy", "T", "native", "fused", "added", "torch form", "torch.compile", "floor"):
        table.add_column(name, justify="left" if name in ("model", "policy") else "right", no_wrap=True)
    for r in found:
        values = (r[k] for k in ("us_native", "us_total", "us_added", "us_torch", "us_compiled", "us_floor"))
        cells = ("" if value is None else f"{value:.2f}" for value in values)
        table.add_row(r["model"], r["policy"], str(r["T"]), *cells)
    Console(width=max(110, Console().width)).print(table)
    if results is not None:
        provenance.append_rows(results, found)
    sys.stdout.write(json.dumps({"rows": found}) + "\n")
