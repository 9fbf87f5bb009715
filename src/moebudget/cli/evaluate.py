"""`moebudget eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moebudget.cli.app import DeviceOption, DtypeOption, ModelArgument, app


@app.command("eval")
def eval_command(
    model: ModelArgument,
    policy: Annotated[list[str], typer.Option(help="A policy, as base:budget=10; repeat the option for more.")],
    data: Annotated[str, typer.Option(help="Held-out text: file, .jsonl, folder or hub data set.")],
    stats: Annotated[Path | None, typer.Option(help="Statistics made by `moebudget calibrate`.")] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(help="Task items, one JSON object a line with task, prompt and target (the exact continuation)."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step, kept constant.")] = 16,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to evaluate at most.")] = 64,
    length: Annotated[int, typer.Option(min=4, help="Predicted tokens a window.")] = 256,
    prefill: Annotated[int, typer.Option(min=1, help="Leading tokens of a window that are prefill.")] = 1,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Experts lie on this many devices, in equal blocks (for policies with a placement)."),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here too.")] = None,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """Loss, agreement, task accuracy and fetched experts of policies in decode mode, on the same batches."""
    from moebudget import provenance
    from moebudget.demo.tasks import load_items
    from moebudget.evaluate.report import evaluate, quality_table, read_windows
    from moebudget.integrations.loading import default_device, default_dtype, load_model, vocabulary
    from moebudget.integrations.transformers import place_experts
    from moebudget.presets import parse
    from moebudget.stats import load_stats, require_stats
    from moebudget.types import PLACEMENT

    parsed = [parse(text) for text in policy]
    known = None if stats is None else load_stats(stats)
    for p in parsed:
        require_stats(p.name, p.needs if devices is None else p.needs - PLACEMENT, known)
    items = [] if tasks is None else load_items(tasks)
    device = default_device() if device is None else device
    dtype = default_dtype(device) if dtype is None else dtype
    loaded, tokenizer = load_model(model, device=device, dtype=dtype, stats=known)
    if devices is not None:
        known = place_experts(loaded, known, devices)
    text = read_windows(data, tokenizer, vocabulary(loaded), length, windows, tokenizer.eos_token_id)
    rows = evaluate(
        loaded,
        parsed,
        known,
        text,
        items=items,
        tokenizer=tokenizer,
        start_id=tokenizer.bos_token_id,
        batch=batch,
        prefill=prefill,
    )
    stamp = provenance.stamp(device)
    documents_out: list[dict[str, Any]] = [{**row.as_row(model), **stamp} for row in rows]
    title = f"{model}, batch {batch}: {rows[0].tokens:,} tokens" + (f", {rows[0].items} items" if items else "")
    Console(width=max(100, Console().width)).print(quality_table(rows, title))
    if json_file is not None:
        json_file.write_text(json.dumps(documents_out, indent=1) + "\n", encoding="utf-8")
    if results is not None:
        provenance.append_rows(results, documents_out)
    sys.stdout.write(json.dumps({"rows": documents_out}) + "\n")
