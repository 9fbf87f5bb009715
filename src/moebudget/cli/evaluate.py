"""Command `moebudget eval`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from moebudget.cli.app import QUALITY, BatchOption, DeviceOption, DtypeOption, LengthOption, ResultsOption, app
from moebudget.cli.inputs import (
    AnyModel,
    DataOption,
    ItemsOption,
    OptionalStats,
    OutOption,
    PoliciesOption,
    SlicesOption,
    TasksOption,
    read_inputs,
)


@app.command("eval", rich_help_panel=QUALITY)
def eval_command(
    model: AnyModel,
    policy: PoliciesOption,
    data: DataOption = None,
    slices: SlicesOption = None,
    stats: OptionalStats = None,
    tasks: TasksOption = None,
    items: ItemsOption = 24,
    batch: BatchOption = 16,
    windows: Annotated[int, typer.Option(min=1, help="Most windows of text to evaluate.")] = 64,
    length: LengthOption = 256,
    prefill: Annotated[int, typer.Option(min=1, help="Leading tokens of each window that are prefill.")] = 1,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices that hold equal blocks of experts, for policies that read a placement. Default: none.",
        ),
    ] = None,
    draining: Annotated[
        bool,
        typer.Option(
            "--draining",
            help="Run tasks and --generate in batches that empty before the next starts, instead of refilling rows.",
        ),
    ] = False,
    noise: Annotated[
        bool,
        typer.Option(
            help="Measure the noise of the batch composition: run up to four batches again, mixed differently."
        ),
    ] = True,
    generate: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens to generate after the first 32 of each window, to count loops and ends, in a constant and in "
            "draining batches; 0 for none.",
        ),
    ] = 0,
    out: OutOption = Path("out"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the rows to this .json file. Default: do not.")
    ] = None,
    results: ResultsOption = None,
) -> None:
    """Evaluate policies in decode mode on the same batches: loss, agreement, task accuracy and fetched experts."""
    from moebudget.core import provenance
    from moebudget.core.types import PLACEMENT
    from moebudget.engines.transformers.attach import place_experts
    from moebudget.evaluate.generate import BATCHINGS, PROMPT, Generated, generated_table
    from moebudget.evaluate.generate import generate as make
    from moebudget.evaluate.quality import evaluate, quality_table
    from moebudget.evaluate.verdicts import verdict_table
    from moebudget.methods.native import native
    from moebudget.methods.registry import parse

    parsed = [parse(text) for text in policy]
    inputs = read_inputs(
        model, data=data, stats=stats, tasks=tasks, demo_items=items, windows=windows, length=length, out=out,
        device=device, dtype=dtype, slices=slices,
    )  # fmt: skip
    for p in parsed:
        inputs.require(p.name, p.needs if devices is None else p.needs - PLACEMENT)
    loaded = inputs.load(parsed)
    known = inputs.stats if devices is None else place_experts(loaded, inputs.stats, devices)
    made: list[Generated] = []
    if generate:  # first, because it can fail
        with_native = [*([] if any(p.name == "native" for p in parsed) else [native()]), *parsed]
        kinds = BATCHINGS[1:] if draining else BATCHINGS
        prompts = inputs.windows[:, :PROMPT]
        made = make(
            loaded, with_native, known, prompts, inputs.tokenizer, tokens=generate, batch=batch, batchings=kinds
        )
    rows = evaluate(
        loaded,
        parsed,
        known,
        inputs.windows,
        items=inputs.items,
        tokenizer=inputs.tokenizer,
        start_id=inputs.start_id,
        batch=batch,
        prefill=prefill,
        refill=not draining,
        slices=inputs.slices,
        noise=noise,
    )
    stamp, rates = provenance.stamp(inputs.device), dict[str, dict[str, Any]]()
    for generated in made:
        rates.setdefault(generated.policy, {}).update(generated.as_fields())
    documents: list[dict[str, Any]] = [
        {**row.as_row(inputs.name), **rates.get(row.policy, {}), **stamp} for row in rows
    ]
    title = f"{inputs.name}, batch {batch}: {rows[0].tokens:,} tokens, {len(inputs.windows)} windows"
    title += f", {rows[0].items} items" if rows[0].items else ""
    console = Console(width=max(120, Console().width))
    console.print(quality_table(rows, title))
    console.print(verdict_table(rows))
    if made:
        console.print(generated_table(made))
    if json_file is not None:
        json_file.write_text(json.dumps(documents, indent=1) + "\n", encoding="utf-8")
    if results is not None:
        provenance.append_rows(results, documents)
    sys.stdout.write(json.dumps({"rows": documents}) + "\n")
