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
from moebudget.cli.inputs import DEMO


@app.command()
def diagnose(
    model: Annotated[
        str,
        typer.Argument(
            help="A checkpoint folder, a config.json (random weights if timed), `demo`, or qwen3-30b, qwen1.5-moe, "
            "deepseek-v2-lite (sizes)."
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            help="What decodes on this machine: vllm, hf (transformers), or none, the estimate alone, which is the "
            "default but for `demo`."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows of a decode step, as often as you like; default: 16.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Experts a layer that a step shall fetch.")] = 16,
    union: Annotated[
        float | None,
        typer.Option(
            help="Experts a layer that the unchanged model fetches, if known; else measured, or equal loads."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="Tokens behind each row, for the estimate.")] = 512,
    gpu: Annotated[str | None, typer.Option(help="Whose bandwidth to take for the estimate, as H200.")] = None,
    bandwidth: Annotated[
        float | None, typer.Option(help="Or the bandwidth itself, in GB/s; else a copy is timed.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Text to decode after, for engine hf.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Decode steps a timing; default: 8 for hf, 128 for vllm.")
    ] = None,
    vllm: Annotated[
        str, typer.Option(help="Arguments of vLLM's LLM as JSON, such as '{\"enforce_eager\": true}'.")
    ] = "{}",
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """Will capping experts make this model faster here, by how much, and if not, why not."""
    from moebudget import provenance
    from moebudget.bench.sizes import read_config
    from moebudget.demo import run as demo
    from moebudget.diagnose.report import ENGINES, estimate, measure
    from moebudget.spelling import unknown

    engine = ("hf" if model == DEMO else "none") if engine is None else engine
    if engine not in ENGINES:
        raise ValueError(unknown("engine", engine, list(ENGINES)))
    path = str(demo.MODEL) if model == DEMO else model
    if model == DEMO and data is None:
        data = str(demo.DATA / "heldout-prose.txt.xz")
    if engine == "hf" and data is None:
        raise ValueError("engine hf decodes after given text, because the union depends on it: --data text.txt")
    config, batches = read_config(path), list(dict.fromkeys(batch or [16]))
    if engine == "none":
        rows = [
            estimate(config, batch=b, budget=budget, union=union, context=context, gpu=gpu, bandwidth=bandwidth)
            for b in batches
        ]
    else:
        rows = measure(
            path, config, engine, batches=batches, budget=budget, union=union, data=data, device=device, dtype=dtype,
            steps=steps, gb_s=bandwidth, arguments=_json_object(vllm),
        )  # fmt: skip
    console = Console(width=max(110, Console().width))
    for row in rows:
        _show(row, console)
    name = demo.NAME if model == DEMO else model
    found = [{"bench": "diagnose", "model": name, **row, **provenance.stamp(row["device"])} for row in rows]
    if results is not None:
        provenance.append_rows(results, found)
    sys.stdout.write(json.dumps({"rows": found}) + "\n")


def _show(row: dict[str, Any], console: Console) -> None:
    console.print(row["title"], soft_wrap=True, highlight=False)
    table = Table()
    for name in ("experts a layer", "ms a step", "against the union"):
        table.add_column(name, justify="right", no_wrap=True)
    for fetched, ms, ratio in row["points"]:
        table.add_row(f"{fetched:.1f}", f"{ms:.3f}", f"{ratio:.2f}x")
    if row["points"]:
        console.print(table)
    console.print(f"[bold]{row['answer']}[/bold]: {row['reason']}", soft_wrap=True, highlight=False)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--vllm {text!r} is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f'--vllm {text!r} must be an object, such as {{"enforce_eager": true}}')
    return found
