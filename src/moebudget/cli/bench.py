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

bench = typer.Typer(help="Time kernels, or decoding in vLLM; one JSON row a result.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.callback()
def group() -> None:
    """Time kernels, or decoding in vLLM; one JSON row a result."""


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


@bench.command()
def decode(
    model: Annotated[
        str,
        typer.Argument(help="A checkpoint folder, or qwen3-30b, qwen1.5-moe, deepseek-v2-lite with random weights."),
    ],
    policy: Annotated[str, typer.Option(help="A policy with a budget.")] = "base:budget=16",
    budget: Annotated[list[int] | None, typer.Option(help="Default: 16 10 24 32 48 64; dense comes first.")] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Default: 16. All but the first are timed dense and at two budgets.")
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens decoded a request.", min=1)] = 384,
    stats: Annotated[Path | None, typer.Option(help="Statistics; random ones for random weights.")] = None,
    union: Annotated[
        float | None, typer.Option(help="Experts a layer that the trained model fetches at the first batch size.")
    ] = None,
    uneven: Annotated[
        list[int] | None, typer.Option(help="Averages at which budgets that differ between layers are timed too.")
    ] = None,
    off: Annotated[bool, typer.Option(help="Also start an engine without the plugin.")] = True,
    in_process: Annotated[
        bool, typer.Option(help="vLLM's core in the bench's process: requests arrive alike, tokens can be compared.")
    ] = False,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """Dense and budgeted decode steps of vLLM in one engine, and the line through them."""
    from moebudget import provenance
    from moebudget.bench.decode import BATCHES, BUDGETS, remarks, run_decode

    found = run_decode(
        model, policy, budget or BUDGETS, batch or BATCHES,
        prompt=prompt, tokens=tokens, stats=None if stats is None else str(stats), union=union, off=off,
        uneven=uneven or (), in_process=in_process,
    )  # fmt: skip
    if results is not None:
        provenance.append_rows(results, found)
    table = Table(title=f"{found[0]['model']}, {found[0]['weights']} weights, on {found[0]['gpu']}")
    for name in ("B", "budget", "experts a layer", "ms a step", "against dense", "tokens/s", "expert GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in (row for row in found if row["bench"] == "decode"):
        values = (f"{r['fetched']:.1f}", f"{r['tpot_ms']:.2f}", f"{r['speedup']:.2f}x", f"{r['e2e_tok_s']:.0f}")
        table.add_row(str(r["B"]), str(r["M"]), *values, f"{r['gb_s']:.0f}")
    console = Console(width=max(100, Console().width))
    console.print(table)
    for line in remarks([row for row in found if row["bench"] == "decode"]):
        console.print(line)
    for r in (row for row in found if row["bench"] == "decode_fit"):
        at = ", ".join(f"{m}: {speed:.2f}x" for m, speed in r["speedup_at_union"].items())
        console.print(
            f"B={r['B']}: {r['a_ms']:.2f} ms + {r['b_ms']:.4f} ms an expert a layer (R2 {r['r2']:.3f}); on this line, "
            f"against {r['at_union']:.1f} experts: {at}"
        )
    for r in (row for row in found if row["bench"] == "decode_uneven"):
        span = f"{min(r['budgets'])} to {max(r['budgets'])} a layer"
        console.print(
            f"B={r['B']}: budgets of {span}, {r['fetched']:.1f} on average: {r['tpot_ms']:.2f} ms; the line gives "
            f"{r['line_ms']:.2f}"
        )
    sys.stdout.write(json.dumps({"rows": found}) + "\n")
