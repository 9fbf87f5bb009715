"""`moebudget diagnose`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import DeviceOption, DtypeOption, app


@app.command()
def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint folder, a config.json, or qwen3-30b, qwen1.5-moe, deepseek-v2-lite (sizes alone)."
        ),
    ],
    engine: Annotated[
        str, typer.Option(help="What decodes on this machine: vllm, hf (transformers), or none: the estimate alone.")
    ] = "none",
    batch: Annotated[int, typer.Option(min=1, help="Rows of a decode step.")] = 16,
    budget: Annotated[int, typer.Option(min=1, help="Experts a layer that a step shall fetch.")] = 16,
    union: Annotated[
        float | None,
        typer.Option(
            help="Experts a layer that the unchanged model fetches, if known; else measured, or equal loads."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens behind each row, for the estimate.")] = 512,
    gpu: Annotated[str | None, typer.Option(help="Whose bandwidth to take for the estimate, as H200.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Or the bandwidth itself, in GB/s.")] = None,
    data: Annotated[str | None, typer.Option(help="Text to decode after, for engine hf.")] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: Annotated[Path | None, typer.Option(help="Append the row to this .jsonl file.")] = None,
) -> None:
    """Will capping experts make this model faster here, by how much, and if not, why not."""
    from moebudget import provenance
    from moebudget.diagnose.report import ENGINES, estimate, measure, read_config
    from moebudget.spelling import unknown

    if engine not in ENGINES:
        raise ValueError(unknown("engine", engine, list(ENGINES)))
    if engine == "hf" and data is None:
        raise ValueError("engine hf decodes after given text, because the union depends on it: --data text.txt")
    config = read_config(model)
    console = Console(width=max(110, Console().width))
    if engine == "none":
        row = estimate(config, batch=batch, budget=budget, union=union, context=context, gpu=gpu, bandwidth=bandwidth)
    else:
        row = measure(
            model, config, engine, batch=batch, budget=budget, union=union, data=data, device=device, dtype=dtype
        )
    table = Table(title=row["title"])
    for name in ("experts a layer", "ms a step", "against the union"):
        table.add_column(name, justify="right", no_wrap=True)
    for fetched, ms, ratio in row["points"]:
        table.add_row(f"{fetched:.1f}", f"{ms:.3f}", f"{ratio:.2f}x")
    console.print(table)
    console.print(f"[bold]{row['answer']}[/bold]: {row['reason']}", soft_wrap=True, highlight=False)
    found: dict[str, Any] = {"bench": "diagnose", "model": model, **row, **provenance.stamp(row.pop("device"))}
    if results is not None:
        provenance.append_rows(results, [found])
    sys.stdout.write(json.dumps({"rows": [found]}) + "\n")
