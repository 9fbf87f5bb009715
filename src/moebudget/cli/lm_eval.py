"""Command `moebudget lm-eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import QUALITY, BatchOption, DeviceOption, DtypeOption, ModelArgument, ResultsOption, app
from moebudget.cli.inputs import PoliciesOption


@app.command("lm-eval", rich_help_panel=QUALITY)
def lm_eval_command(
    model: ModelArgument,
    policy: PoliciesOption,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Benchmark: cmmlu, boolq, bbh, math, gsm8k, math401, humaneval or mbpp; repeat the option for more. "
            "Default: all but the last two, and without --items also without math401, which the hub lacks."
        ),
    ] = None,
    items: Annotated[
        Path | None,
        typer.Option(help="Folder with the items of each benchmark, such as gsm8k_test.jsonl. Default: from the hub."),
    ] = None,
    stats: Annotated[
        Path | None, typer.Option(help="Statistics file written by `moebudget calibrate`. Default: none.")
    ] = None,
    batch: BatchOption = 16,
    constant: Annotated[
        bool, typer.Option("--constant/--draining", help="Refill finished rows at once, or let each batch empty.")
    ] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="Most items per benchmark. Default: all.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per answer. Default: that of each benchmark.")
    ] = None,
    unsafe_code: Annotated[
        bool, typer.Option("--unsafe-code", help="Execute the code that the model writes (humaneval, mbpp).")
    ] = False,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: ResultsOption = None,
) -> None:
    """Run benchmarks of lm-evaluation-harness with freely decoded answers, for native routing and for policies."""
    from moebudget.core import provenance
    from moebudget.engines.transformers.loading import default_device
    from moebudget.evaluate.lm_eval.items import TASKS
    from moebudget.evaluate.lm_eval.run import CODE, run_tasks
    from moebudget.evaluate.quality import pm

    usual = [name for name, source in TASKS.items() if name not in CODE and (items is not None or source.hub)]
    tasks = list(dict.fromkeys(task)) if task else usual
    device = default_device() if device is None else device
    rows = run_tasks(
        model, tasks, list(dict.fromkeys(["native", *policy])),
        items=None if items is None else str(items), unsafe_code=unsafe_code, limit=limit, most=tokens,
        stats=None if stats is None else str(stats), batch_size=batch, constant=constant, device=device, dtype=dtype,
    )  # fmt: skip
    stamp = provenance.stamp(device)
    rows = [{**row, **stamp} for row in rows]
    counts = ", ".join(f"{name} {number}" for name, number in rows[0]["items"].items())
    table = Table(
        title=f"% correct, {rows[0]['batching']} batch of {batch}",
        caption=f"items: {counts}; ± half of a 95 % interval, from 30 items on",
    )
    table.add_column("policy", no_wrap=True)
    for name in ("experts\nfetched", "rows\nper step", *tasks):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{row['fetched']:.1f}",
            f"{row['rows_per_step']:.1f}",
            *(pm(row["tasks"][name], row["tasks_ci95"][name], 1) for name in tasks),
        ]
        table.add_row(row["policy"], *cells)
    console = Console(width=max(110, Console().width))
    console.print(table)
    if not rows[0]["full_batches"]:
        console.print(f"The batch of {batch} was never full: use more items or a smaller --batch.", highlight=False)
    elif rows[0]["tail"]:
        steps, width = rows[0]["tail"]["steps"], rows[0]["tail"]["rows_per_step"]
        text = (
            f"Experts and rows are those of full batches; {steps} other steps had a mean of {width:.1f} rows (native)."
        )
        console.print(text, highlight=False)
    if results is not None:
        provenance.append_rows(results, rows)
    sys.stdout.write(json.dumps({"rows": rows}) + "\n")
