"""`moebudget calibrate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moebudget.cli.app import DeviceOption, DtypeOption, ModelArgument, app
from moebudget.cli.inputs import require_folder


@app.command("calibrate")
def calibrate_command(
    model: ModelArgument,
    data: Annotated[
        str, typer.Option(help="Text file, .jsonl with a field text, folder (any as .xz), or hub data set.")
    ] = "HuggingFaceFW/fineweb-edu",
    output: Annotated[Path, typer.Option("-o", "--output", help="The statistics to write.")] = Path(
        "stats.safetensors"
    ),
    tokens: Annotated[
        int, typer.Option(min=1000, help="Stop reading after this many tokens, held-out ones included.")
    ] = 3_000_000,
    length: Annotated[int, typer.Option(min=16, help="Tokens a sequence.")] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in one forward pass.")] = 8,
    budget: Annotated[
        int | None,
        typer.Option(min=1, help="Experts at which alpha is chosen; default: 5/4 of the model's top-k."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step at which alpha is chosen.")] = 16,
    layers_per_pass: Annotated[
        int | None,
        typer.Option(min=1, help="Layers a pass over the text; default: what fits in 60 % of the free memory."),
    ] = None,
    min_document: Annotated[int, typer.Option(min=1, help="Leave out documents shorter than this, in tokens.")] = 128,
    policies: Annotated[
        list[str] | None,
        typer.Option("--for", help="Collect what these policies need, as sere,exfold; default: base."),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Fit the energy predictor and collect what other policies need, on text; held-out R2 and energy reported.

    An interrupted run goes on with the next group of layers when called again with the same arguments.
    """
    from moebudget.calibrate import calibrate, load_corpus
    from moebudget.calibrate.run import DEFAULT_NEEDS
    from moebudget.integrations.loading import default_device, default_dtype, load_model, vocabulary
    from moebudget.presets import parse_many
    from moebudget.types import ALLOCATED, PLACEMENT, SKETCHED

    asked = parse_many(policies or [])
    needs = frozenset().union(*(p.needs for p in asked))
    wanted = needs - PLACEMENT - ALLOCATED - SKETCHED
    if policies and not wanted:
        raise ValueError(f"--for {','.join(policies)}: none of these policies needs statistics")
    require_folder(output)
    device = default_device() if device is None else device
    loaded, tokenizer = load_model(model, device=device, dtype=default_dtype(device) if dtype is None else dtype)
    corpus = load_corpus(
        data, tokenizer, vocabulary(loaded), length=length, max_tokens=tokens, min_document=min_document
    )
    partial = output.with_name(output.name + ".groups")
    stats = calibrate(
        loaded, corpus, model_id=model, needs=wanted or DEFAULT_NEEDS, budget=budget, batch=batch, rows=rows,
        group=layers_per_pass, resume=partial,
    )  # fmt: skip
    stats.save(output)
    Console(stderr=True).print(f"wrote {output}")
    if needs & ALLOCATED:
        Console(stderr=True).print(f"for spread and price go on with: moebudget allocate {model} --stats {output} ...")
    if needs & SKETCHED:
        Console(stderr=True).print(f"for sketch go on with: moebudget sketch {model} --stats {output} ...")
    sys.stdout.write(json.dumps({"output": str(output), **stats.info}) + "\n")
