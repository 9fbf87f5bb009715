"""Command `moebudget diagnose`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import START, DeviceOption, DtypeOption, ResultsOption, app
from moebudget.cli.inputs import DEMO, VllmOption, json_object


@app.command(rich_help_panel=START)
def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            help="Model: a checkpoint folder, a config.json (timed with random weights), `demo`, or the published "
            "sizes of qwen3-30b, qwen1.5-moe or deepseek-v2-lite."
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine that decodes on this machine: vllm, hf (transformers), or none for an estimate without "
            "timing. Default: none; hf for `demo`."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows per decode step; repeat the option for more. Default: 16.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Budget to judge, in experts fetched per layer per step.")] = 16,
    union: Annotated[
        float | None,
        typer.Option(
            help="Experts fetched per layer per step by native routing. Default: measured, or that of equal loads."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Cached tokens per row, for the estimate.")] = 512,
    gpu: Annotated[
        str | None, typer.Option(help="GPU whose memory bandwidth the estimate uses, such as H200. Default: none.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            help="Memory bandwidth in GB/s, instead of --gpu. Default: with an engine, that of a timed copy."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Text that the prompts come from, for engine hf. Default: none, except for `demo`."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Decode steps per timing. Default: 8 for hf, 128 for vllm.")
    ] = None,
    vllm: VllmOption = "{}",
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: ResultsOption = None,
) -> None:
    """Tell whether a budget makes a model's decode steps faster, by how much, and if not, why not."""
    from moebudget.bench.diagnose.run import ENGINES, estimate, measure
    from moebudget.bench.sizes import read_config
    from moebudget.core import provenance
    from moebudget.core.errors import unknown
    from moebudget.demo import run as demo

    engine = ("hf" if model == DEMO else "none") if engine is None else engine
    if engine not in ENGINES:
        raise ValueError(unknown("engine", engine, list(ENGINES)))
    path = str(demo.MODEL) if model == DEMO else model
    if model == DEMO and data is None:
        data = str(demo.DATA / "heldout-prose.txt.xz")
    if engine == "hf" and data is None:
        raise ValueError("engine hf needs a text, because the union depends on it: use --data text.txt")
    config, batches = read_config(path), list(dict.fromkeys(batch or [16]))
    if engine == "none":
        rows = [
            estimate(config, batch=b, budget=budget, union=union, context=context, gpu=gpu, bandwidth=bandwidth)
            for b in batches
        ]
    else:
        rows = measure(
            path, config, engine, batches=batches, budget=budget, union=union, data=data, device=device, dtype=dtype,
            steps=steps, gb_s=bandwidth, arguments=json_object(vllm),
        )  # fmt: skip
    console = Console(width=max(110, Console().width))
    for row in rows:
        _show(row, console)
    name = demo.NAME if model == DEMO else model
    documents = [{"bench": "diagnose", "model": name, **row, **provenance.stamp(row["device"])} for row in rows]
    if results is not None:
        provenance.append_rows(results, documents)
    sys.stdout.write(json.dumps({"rows": documents}) + "\n")


def _show(row: dict[str, Any], console: Console) -> None:
    console.print(row["title"], soft_wrap=True, highlight=False)
    table = Table()
    for name in ("experts fetched per layer", "ms per step", "speedup over native"):
        table.add_column(name, justify="right", no_wrap=True)
    for fetched, ms, ratio in row["points"]:
        table.add_row(f"{fetched:.1f}", f"{ms:.3f}", f"{ratio:.2f}x")
    if row["points"]:
        console.print(table)
    console.print(f"[bold]{row['answer']}[/bold]: {row['reason']}", soft_wrap=True, highlight=False)
