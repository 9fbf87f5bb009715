"""`moebudget lm-eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import DeviceOption, DtypeOption, ModelArgument, app


@app.command("lm-eval")
def lm_eval_command(
    model: ModelArgument,
    policy: Annotated[list[str], typer.Option(help="A policy, as base:budget=10; repeat the option for more.")],
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="cmmlu, boolq, bbh, math, gsm8k, math401, humaneval, mbpp; default: all but the last two, of the hub "
            "without math401, which is on none."
        ),
    ] = None,
    items: Annotated[
        Path | None, typer.Option(help="Folder with the items, as gsm8k_test.jsonl; default: from the hub.")
    ] = None,
    stats: Annotated[Path | None, typer.Option(help="Statistics made by `moebudget calibrate`.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step.")] = 16,
    constant: Annotated[
        bool, typer.Option("--constant/--draining", help="Refill places at once, or let each batch run empty.")
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Items a task; default: all.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens an answer at most; default: the task's own.")
    ] = None,
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Execute code that the model writes (humaneval, mbpp).")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """Benchmarks of lm-evaluation-harness, decoded freely in batches of constant size; dense comes first."""
    from moebudget import provenance
    from moebudget.evaluate.report import pm
    from moebudget.integrations.lm_eval.items import TASKS
    from moebudget.integrations.lm_eval.run import CODE, run_tasks
    from moebudget.integrations.loading import default_device

    usual = [name for name, source in TASKS.items() if name not in CODE and (items is not None or source.hub)]
    tasks = list(dict.fromkeys(task)) if task else usual
    device = default_device() if device is None else device
    rows = run_tasks(
        model, tasks, list(dict.fromkeys(["dense", *policy])),
        items=None if items is None else str(items), unsafe_code=unsafe_code, limit=limit, most=tokens,
        stats=None if stats is None else str(stats), batch_size=batch, constant=constant, device=device, dtype=dtype,
    )  # fmt: skip
    stamp = provenance.stamp(device)
    rows = [{**row, **stamp} for row in rows]
    counts = ", ".join(f"{name} {number}" for name, number in rows[0]["items"].items())
    table = Table(
        title=f"percent correct, {rows[0]['batching']} batch of {batch}",
        caption=f"items: {counts}; ± half of a 95 % interval, none below 30",
    )
    table.add_column("policy", no_wrap=True)
    for name in ("experts\nfetched", "rows\na step", *tasks):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row['fetched']:.1f}",
            f"{row['rows_a_step']:.1f}",
            *(pm(row["tasks"][name], row["tasks_ci95"][name], 1) for name in tasks),
        ]
        table.add_row(row["policy"], *cells)
    console = Console(width=max(110, Console().width))
    console.print(table)
    if not rows[0]["full_batches"]:
        console.print(f"The batch of {batch} was never full: give more items, or a smaller --batch.", highlight=False)
    elif rows[0]["tail"]:
        steps, width = rows[0]["tail"]["steps"], rows[0]["tail"]["rows_a_step"]
        text = f"Experts and rows are those of full batches; {steps} more steps had {width:.1f} rows (dense)."
        console.print(text, highlight=False)
    if results is not None:
        provenance.append_rows(results, rows)
    sys.stdout.write(json.dumps({"rows": rows}) + "\n")
