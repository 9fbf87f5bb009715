"""Command `moebudget calibrate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moebudget.cli.app import STATISTICS, DeviceOption, DtypeOption, ModelArgument, app
from moebudget.cli.inputs import require_folder


@app.command("calibrate", rich_help_panel=STATISTICS)
def calibrate_command(
    model: ModelArgument,
    data: Annotated[
        str,
        typer.Option(
            help="Text to calibrate on: a text file, .jsonl with the field `text`, a folder (files may be .xz), or a "
            "hub data set."
        ),
    ] = "HuggingFaceFW/fineweb-edu",
    output: Annotated[Path, typer.Option("-o", "--output", help="Statistics file to write.")] = Path(
        "stats.safetensors"
    ),
    tokens: Annotated[
        int, typer.Option(min=1000, help="Tokens to read, including those held out for the reported R² and energy.")
    ] = 3_000_000,
    length: Annotated[int, typer.Option(min=16, help="Tokens per sequence.")] = 2048,
    rows: Annotated[int, typer.Option(min=1, help="Sequences per forward pass.")] = 8,
    budget: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Experts per layer at which the ridge strength is chosen. Default: 5/4 of the routes per token.",
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Rows per decode step at which the ridge strength is chosen.")
    ] = 16,
    layers_per_pass: Annotated[
        int | None,
        typer.Option(min=1, help="Layers per pass over the text. Default: as many as fit in 60 % of the free memory."),
    ] = None,
    min_document: Annotated[int, typer.Option(min=1, help="Leave out documents with fewer tokens than this.")] = 128,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            "--for", help="Collect the statistics of these policies, such as sere,exfold. Default: those of base."
        ),
    ] = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Calibrate a model on text: write the statistics that policies read, and report the predictor's held-out R².

    An interrupted run continues with the next group of layers if you call it again with the same arguments.
    """
    from moebudget.calibrate import calibrate, load_corpus
    from moebudget.calibrate.run import DEFAULT_NEEDS
    from moebudget.core.types import ALLOCATED, PLACEMENT, SKETCHED
    from moebudget.engines.transformers.loading import default_device, default_dtype, load_model, vocabulary
    from moebudget.methods.registry import parse_many

    needs = frozenset().union(*(p.needs for p in parse_many(policies or [])))
    collected = needs - PLACEMENT - ALLOCATED - SKETCHED
    if policies and not collected:
        raise ValueError(f"--for {','.join(policies)}: none of these policies needs statistics")
    require_folder(output)
    device = default_device() if device is None else device
    loaded, tokenizer = load_model(model, device=device, dtype=default_dtype(device) if dtype is None else dtype)
    corpus = load_corpus(
        data, tokenizer, vocabulary(loaded), length=length, max_tokens=tokens, min_document=min_document
    )
    partial = output.with_name(output.name + ".groups")
    stats = calibrate(
        loaded, corpus, model_id=model, needs=collected or DEFAULT_NEEDS, budget=budget, batch=batch, rows=rows,
        group=layers_per_pass, resume=partial,
    )  # fmt: skip
    stats.save(output)
    Console(stderr=True).print(f"wrote {output}")
    if needs & ALLOCATED:
        Console(stderr=True).print(f"spread and price also need: moebudget allocate {model} --stats {output} ...")
    if needs & SKETCHED:
        Console(stderr=True).print(f"fill=sketch also needs: moebudget sketch {model} --stats {output} ...")
    sys.stdout.write(json.dumps({"output": str(output), **stats.info}) + "\n")
