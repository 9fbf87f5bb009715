"""The command line: `moebudget demo`, `calibrate`, `eval`, `policies`, `stats`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Fewer distinct experts a Mixture-of-Experts decode batch, chosen so that the output changes least.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[str, typer.Argument(help="A transformers checkpoint: a folder or a hub name.")]
DeviceOption = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's); default: float32 on a CPU, else auto."),
]


@app.command()
def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under a minute: fewer tokens and items, wide intervals.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the plot, the rows and the statistics.")] = Path("out"),
    tokens: Annotated[int | None, typer.Option(min=1000, help="Calibration tokens.")] = None,
    windows: Annotated[int | None, typer.Option(min=1, help="Windows of 256 held-out tokens.")] = None,
    items: Annotated[int | None, typer.Option(min=1, help="Items of each of the nine tasks.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Policies instead of the demo's own.")] = None,
    stats: Annotated[Path | None, typer.Option(help="Use these statistics, do not calibrate.")] = None,
    device: DeviceOption = None,
    results: Annotated[Path | None, typer.Option(help="Also append the rows to this .jsonl file.")] = None,
) -> None:
    """Calibrate the small real model in the package, cap its experts by six rules, show what each costs."""
    from dataclasses import replace

    from moebudget.demo.run import FULL, POLICIES, QUICK, run_demo

    size = QUICK if quick else FULL
    given = {k: v for k, v in (("tokens", tokens), ("windows", windows), ("items", items)) if v is not None}
    policies = POLICIES if not policy else ("dense", *(p for p in policy if p != "dense"))
    run_demo(replace(size, **given), out, policies=policies, device=device, stats=stats, results=results)


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
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Fit the energy predictor and the mean statistics of every expert on text, held-out R2 and energy reported.

    An interrupted run goes on with the next group of layers when called again with the same arguments.
    """
    from moebudget.calibrate import calibrate, load_corpus
    from moebudget.integrations.loading import default_device, default_dtype, load_model, vocabulary

    if not output.parent.is_dir():
        raise FileNotFoundError(f"the folder {output.parent} for {output.name} does not exist; make it first")
    device = default_device() if device is None else device
    loaded, tokenizer = load_model(model, device=device, dtype=default_dtype(device) if dtype is None else dtype)
    corpus = load_corpus(
        data, tokenizer, vocabulary(loaded), length=length, max_tokens=tokens, min_document=min_document
    )
    partial = output.with_name(output.name + ".groups")
    stats = calibrate(
        loaded, corpus, model_id=model, budget=budget, batch=batch, rows=rows, group=layers_per_pass, resume=partial
    )
    stats.save(output)
    Console(stderr=True).print(f"wrote {output}")
    sys.stdout.write(json.dumps({"output": str(output), **stats.info}) + "\n")


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
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here too.")] = None,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """Loss, agreement, task accuracy and fetched experts of policies in decode mode, on the same batches."""
    from moebudget import provenance
    from moebudget.calibrate.data import pack, tokenize
    from moebudget.demo.tasks import load_items
    from moebudget.evaluate.report import evaluate, load_windows, quality_table
    from moebudget.integrations.loading import default_device, default_dtype, load_model, vocabulary
    from moebudget.presets import parse
    from moebudget.stats import load_stats, require_stats

    parsed = [parse(text) for text in policy]
    known = None if stats is None else load_stats(stats)
    for p in parsed:
        require_stats(p.name, p.needs, known)
    items = [] if tasks is None else load_items(tasks)
    device = default_device() if device is None else device
    dtype = default_dtype(device) if dtype is None else dtype
    loaded, tokenizer = load_model(model, device=device, dtype=dtype, stats=known)
    need = windows * (length + 1)
    documents, _ = tokenize(data, tokenizer, vocabulary(loaded), max_tokens=4 * need, min_document=2)
    packed = pack(documents, length + 1, tokenizer.eos_token_id)
    rows = evaluate(
        loaded,
        parsed,
        known,
        load_windows(packed.ids, packed.mask, windows),
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


@app.command()
def policies() -> None:
    """List the policies that --policy understands."""
    import inspect

    from moebudget.presets import PRESETS

    table = Table(title="policy = name:field=value,...")
    table.add_column("policy", no_wrap=True)
    table.add_column("rule")
    table.add_column("statistics", no_wrap=True)
    for name, make in PRESETS.items():
        parameters = inspect.signature(make).parameters
        required = [n for n, p in parameters.items() if p.default is p.empty]
        optional = [f"{n}={p.default}" for n, p in parameters.items() if p.default is not p.empty]
        spelling = name + (":" + ",".join(f"{n}=.." for n in required) if required else "")
        needs = make(**dict.fromkeys(required, 8)).needs
        doc = (inspect.getdoc(make) or "").splitlines()[0]
        rule = doc + (f" [dim]({', '.join(optional)})[/dim]" if optional else "")
        table.add_row(spelling, rule, "yes" if needs else "no")
    Console(width=max(100, Console().width)).print(table)


@app.command("stats")
def stats_command(file: Annotated[Path, typer.Argument(help="Statistics made by `moebudget calibrate`.")]) -> None:
    """Show what a statistics file holds, as JSON."""
    from moebudget.stats import describe, load_stats

    sys.stdout.write(json.dumps(describe(load_stats(file)), indent=1) + "\n")


def _user_errors() -> tuple[type[BaseException], ...]:
    """What a user can mend. Evaluated only when something was raised, so that `--help` loads nothing."""
    from moebudget.evaluate.text import InactivePolicyError
    from moebudget.integrations.loading import MissingExtraError
    from moebudget.types import MissingStatisticError

    known = (ValueError, FileNotFoundError, MissingStatisticError, MissingExtraError, InactivePolicyError, MemoryError)
    return () if os.environ.get("MOEBUDGET_TRACEBACK") else known


def main() -> None:
    """Entry point: what a user can mend is one line and exit code 2; MOEBUDGET_TRACEBACK=1 shows the traceback."""
    try:
        app()
    except Exception as error:
        if not isinstance(error, _user_errors()):
            raise
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
