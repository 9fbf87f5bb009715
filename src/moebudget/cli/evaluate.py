"""`moebudget eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moebudget.cli.app import DeviceOption, DtypeOption, app
from moebudget.cli.inputs import (
    AnyModel,
    DataOption,
    ItemsOption,
    OutOption,
    SlicesOption,
    StatsOption,
    TasksOption,
    read_inputs,
)


@app.command("eval")
def eval_command(
    model: AnyModel,
    policy: Annotated[list[str], typer.Option(help="A policy, as base:budget=10; repeat the option for more.")],
    data: DataOption = None,
    slices: SlicesOption = None,
    stats: StatsOption = None,
    tasks: TasksOption = None,
    items: ItemsOption = 24,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step, kept constant.")] = 16,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to evaluate at most.")] = 64,
    length: Annotated[int, typer.Option(min=4, help="Predicted tokens a window.")] = 256,
    prefill: Annotated[int, typer.Option(min=1, help="Leading tokens of a window that are prefill.")] = 1,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Experts lie on this many devices, in equal blocks (for policies with a placement)."),
    ] = None,
    draining: Annotated[
        bool,
        typer.Option("--draining", help="Tasks, and --generate alone, in batches that drain before the next starts."),
    ] = False,
    noise: Annotated[
        bool, typer.Option(help="Run up to four batches again with other batch mates, for the noise of the batch.")
    ] = True,
    generate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Also continue the windows' first 32 tokens by this many, for loops and ends; in a constant batch "
            "and in draining ones.",
        ),
    ] = 0,
    out: OutOption = Path("out"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here too.")] = None,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """Loss, agreement, task accuracy and fetched experts of policies in decode mode, on the same batches."""
    from moebudget import provenance
    from moebudget.evaluate.generate import BATCHINGS, PROMPT, Generated, generated_table
    from moebudget.evaluate.generate import generate as make
    from moebudget.evaluate.report import evaluate, quality_table
    from moebudget.evaluate.verdicts import verdict_table
    from moebudget.integrations.transformers import place_experts
    from moebudget.presets import dense, parse
    from moebudget.types import PLACEMENT

    parsed = [parse(text) for text in policy]
    given = read_inputs(
        model, data=data, stats=stats, tasks=tasks, demo_items=items, windows=windows, length=length, out=out,
        device=device, dtype=dtype, slices=slices,
    )  # fmt: skip
    for p in parsed:
        given.require(p.name, p.needs if devices is None else p.needs - PLACEMENT)
    loaded = given.load(parsed)
    known = given.stats if devices is None else place_experts(loaded, given.stats, devices)
    made: list[Generated] = []
    if generate:  # first, for it can be refused
        every = [*([] if any(p.name == "dense" for p in parsed) else [dense()]), *parsed]
        kinds = BATCHINGS[1:] if draining else BATCHINGS
        prompts = given.windows[:, :PROMPT]
        made = make(loaded, every, known, prompts, given.tokenizer, tokens=generate, batch=batch, batchings=kinds)
    rows = evaluate(
        loaded,
        parsed,
        known,
        given.windows,
        items=given.items,
        tokenizer=given.tokenizer,
        start_id=given.start_id,
        batch=batch,
        prefill=prefill,
        refill=not draining,
        slices=given.slices,
        noise=noise,
    )
    stamp, rates = provenance.stamp(given.device), dict[str, dict[str, Any]]()
    for one in made:
        rates.setdefault(one.policy, {}).update(one.as_fields())
    documents_out: list[dict[str, Any]] = [
        {**row.as_row(given.name), **rates.get(row.policy, {}), **stamp} for row in rows
    ]
    title = f"{given.name}, batch {batch}: {rows[0].tokens:,} tokens, {len(given.windows)} windows"
    title += f", {rows[0].items} items" if rows[0].items else ""
    console = Console(width=max(110, Console().width))
    console.print(quality_table(rows, title))
    console.print(verdict_table(rows))
    if made:
        console.print(generated_table(made))
    if json_file is not None:
        json_file.write_text(json.dumps(documents_out, indent=1) + "\n", encoding="utf-8")
    if results is not None:
        provenance.append_rows(results, documents_out)
    sys.stdout.write(json.dumps({"rows": documents_out}) + "\n")
