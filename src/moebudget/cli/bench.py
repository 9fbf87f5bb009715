"""Commands `moebudget bench routing` and `moebudget bench decode`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import SPEED, ResultsOption, app
from moebudget.cli.inputs import VllmOption, json_object

bench = typer.Typer(no_args_is_help=True)
app.add_typer(bench, name="bench", rich_help_panel=SPEED)


@bench.callback()
def group() -> None:
    """Time the routing kernels, or decode steps in vLLM; one JSON row per result."""


@bench.command()
def routing(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Router to time: qwen3-30b, qwen1.5-moe, deepseek-v2-lite, deepseek-v3 or gpt-oss-120b; repeat the "
            "option for more. Default: all."
        ),
    ] = None,
    rows: Annotated[
        list[int] | None, typer.Option(help="Rows per step; repeat the option for more. Default: 1 8 16 32 64 128.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Policy string, in which {M} is replaced by the model's budget; repeat the option for more. Default: "
            "base:budget={M}."
        ),
    ] = None,
    compiled: Annotated[
        list[int] | None,
        typer.Option(
            help="Rows per step at which torch.compile is timed too; repeat the option for more. Default: none."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="CUDA device.")] = "cuda",
    results: ResultsOption = None,
) -> None:
    """Time what a policy adds to a layer's router: fused kernels against the torch form, in CUDA graphs."""
    from moebudget.bench.routing import POLICIES, ROWS, SHAPES, run_routing
    from moebudget.core import provenance

    timed = run_routing(model or list(SHAPES), rows or ROWS, policy or POLICIES, device, compiled or ())
    table = Table(title=f"microseconds per layer on {timed[0]['gpu']}, at T rows per step")
    for name in ("model", "policy", "T", "native", "fused", "added", "torch form", "torch.compile", "floor"):
        table.add_column(name, justify="left" if name in ("model", "policy") else "right", no_wrap=True)
    for r in timed:
        values = (r[k] for k in ("us_native", "us_total", "us_added", "us_torch", "us_compiled", "us_floor"))
        cells = ("" if value is None else f"{value:.2f}" for value in values)
        table.add_row(r["model"], r["policy"], str(r["T"]), *cells)
    Console(width=max(110, Console().width)).print(table)
    if results is not None:
        provenance.append_rows(results, timed)
    sys.stdout.write(json.dumps({"rows": timed}) + "\n")


@bench.command()
def decode(
    model: Annotated[
        list[str],
        typer.Argument(
            help="Models to time: checkpoint folders, or qwen3-30b, qwen1.5-moe, deepseek-v2-lite or a config.json "
            "with random weights."
        ),
    ],
    policy: Annotated[str, typer.Option(help="Policy string with a budget.")] = "base:budget=16",
    budget: Annotated[
        list[int] | None,
        typer.Option(
            help="Budget to time, in experts per layer; repeat the option for more. Native routing is always timed. "
            "Default: 16 10 24 32 48 64."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            help="Rows per decode step; repeat the option for more, which are timed with the first two budgets only. "
            "Default: 16."
        ),
    ] = None,
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.", min=1)] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens decoded per request.", min=1)] = 384,
    repeats: Annotated[int, typer.Option(help="Turns over all settings; the median of each one counts.", min=1)] = 3,
    stats: Annotated[
        Path | None, typer.Option(help="Statistics file of a single model. Default: random ones for random weights.")
    ] = None,
    union: Annotated[
        float | None,
        typer.Option(
            help="Experts that a single model fetches per layer per step with trained weights, at the first batch "
            "size. Default: the published number, if there is one."
        ),
    ] = None,
    uneven: Annotated[
        list[int] | None,
        typer.Option(
            help="Average budget at which budgets that differ between layers are timed too; repeat the option for "
            "more. Default: none."
        ),
    ] = None,
    baseline: Annotated[bool, typer.Option(help="Also time the baseline, an engine without the plugin.")] = True,
    in_process: Annotated[
        bool,
        typer.Option(
            "--in-process",
            help="Run vLLM's core in the engine's process: requests arrive at the same steps, so that decoded tokens "
            "can be compared with the baseline's.",
        ),
    ] = False,
    together: Annotated[
        bool,
        typer.Option(
            "--together",
            help="Start all engines at once and time them in turns; needs memory for all, and --vllm with "
            "kv_cache_memory_bytes and a small gpu_memory_utilization.",
        ),
    ] = False,
    vllm: VllmOption = "{}",
    results: ResultsOption = None,
) -> None:
    """Time decode steps of vLLM, native and with budgets, and fit a line to step time against fetched experts."""
    from moebudget.bench.decode import BATCHES, BUDGETS, run_models
    from moebudget.core import provenance

    if len(model) > 1 and (stats is not None or union is not None):
        raise ValueError(f"--stats and --union belong to one model, but there are {len(model)}")
    timed = run_models(
        model, policy=policy, budgets=budget or BUDGETS, batches=batch or BATCHES, prompt=prompt, tokens=tokens,
        repeats=repeats, stats=None if stats is None else str(stats), union=union, uneven=uneven or (),
        baseline=baseline, in_process=in_process, together=together, **json_object(vllm),
    )  # fmt: skip
    documents: list[dict[str, Any]] = []
    for rows in timed:
        if results is not None:
            provenance.append_rows(results, rows)
        _show(rows)
        documents += rows
    sys.stdout.write(json.dumps({"rows": documents}) + "\n")


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table and the sentences of one model."""
    from moebudget.bench.decode import remarks

    settings = [row for row in rows if row["bench"] == "decode"]
    table = Table(title=f"{rows[0]['model']}, {rows[0]['weights']} weights, on {rows[0]['gpu']}")
    for name in ("B", "budget", "experts per layer", "ms per step", "speedup over native", "tokens/s", "expert GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in settings:
        values = (f"{r['fetched']:.1f}", f"{r['tpot_ms']:.2f}", f"{r['speedup']:.2f}x", f"{r['e2e_tok_s']:.0f}")
        table.add_row(str(r["B"]), str(r["M"]), *values, f"{r['gb_s']:.0f}")
    console = Console(width=max(100, Console().width))
    console.print(table)
    for line in remarks(settings):
        console.print(line)
    for r in (row for row in rows if row["bench"] == "decode_fit"):
        speedups = ", ".join(f"{m}: {speedup:.2f}x" for m, speedup in r["speedup_at_union"].items())
        console.print(
            f"B={r['B']}: {r['a_ms']:.2f} ms + {r['b_ms']:.4f} ms per expert per layer (R² {r['r2']:.3f}); speedup on "
            f"this line over {r['at_union']:.1f} experts, by budget: {speedups}"
        )
    for r in (row for row in rows if row["bench"] == "decode_uneven"):
        span = f"{min(r['budgets'])} to {max(r['budgets'])} per layer"
        console.print(
            f"B={r['B']}: budgets of {span}, {r['fetched']:.1f} on average: {r['tpot_ms']:.2f} ms; the line gives "
            f"{r['line_ms']:.2f} ms"
        )
