"""Command `moebudget compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from moebudget.cli.app import QUALITY, BatchOption, DeviceOption, DtypeOption, LengthOption, ResultsOption, app
from moebudget.cli.inputs import (
    AnyModel,
    DataOption,
    ItemsOption,
    OptionalStats,
    OutOption,
    SlicesOption,
    TasksOption,
    note,
    read_inputs,
)

SpeedOption = Annotated[
    float | None, typer.Option(help="Target: a decode step this many times faster than native; needs --timing.")
]
TpotOption = Annotated[
    float | None, typer.Option(help="Target: at most this many milliseconds per decode step; needs --timing.")
]
TimingOption = Annotated[
    Path | None,
    typer.Option(help="Step times at this batch size: rows of `diagnose --results` or `bench decode --results`."),
]


@app.command("compare", rich_help_panel=QUALITY)
def compare_command(
    model: AnyModel,
    policies: Annotated[
        list[str],
        typer.Option(
            help="Policies, separated by commas or by repeating the option. A policy with a free number, such as base "
            "or base:fill=geometric, is set to the target; base:budget=12 stays as it is."
        ),
    ],
    experts: Annotated[
        float | None, typer.Option(help="Target: this many experts fetched per layer per step.")
    ] = None,
    speedup: SpeedOption = None,
    tpot: TpotOption = None,
    timing: TimingOption = None,
    data: DataOption = None,
    slices: SlicesOption = None,
    stats: OptionalStats = None,
    tasks: TasksOption = None,
    items: ItemsOption = 24,
    batch: BatchOption = 16,
    windows: Annotated[int, typer.Option(min=2, help="Most windows of text, including those of the search.")] = 64,
    length: LengthOption = 256,
    out: OutOption = Path("out"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: ResultsOption = None,
) -> None:
    """Compare policies at equal fetched experts or equal step time, together with native routing and plain top-k.

    Give exactly one target: --experts, --speedup or --tpot.
    """
    from moebudget.core import provenance
    from moebudget.core.policy import Policy
    from moebudget.evaluate.compare import compare, distinct, methods_of, unmatched
    from moebudget.evaluate.quality import quality_table
    from moebudget.evaluate.text import evaluate_text
    from moebudget.evaluate.verdicts import verdict_table
    from moebudget.methods.native import native
    from moebudget.methods.registry import split_many
    from moebudget.tune.target import read_target

    target = read_target(experts=experts, speedup=speedup, tpot=tpot, timing=timing)
    strings = split_many(policies)
    inputs = read_inputs(
        model, data=data, stats=stats, tasks=tasks, demo_items=items, windows=windows, length=length, out=out,
        device=device, dtype=dtype, slices=slices,
    )  # fmt: skip
    target.prepare(inputs.facts, batch)
    samples = [
        m if isinstance(m, Policy) else m[0].policy(m[0].low) for m in methods_of(strings, inputs.facts, 1).values()
    ]
    for policy in samples:
        inputs.require(policy.name, policy.needs)
    search = max(1, min(batch, len(inputs.windows) // 3))
    loaded = inputs.load(samples)
    (of_native,) = evaluate_text(loaded, [native()], inputs.stats, inputs.windows[-search:], batch=batch, quiet=True)
    count = target.experts_at(of_native.counters.native_union)
    if isinstance(count, str):
        raise ValueError(count)
    note(target.said(count))
    rows = compare(
        loaded, methods_of(strings, inputs.facts, count), inputs.stats, inputs.windows, [count], search=search,
        items=inputs.items, tokenizer=inputs.tokenizer, start_id=inputs.start_id, batch=batch, noise=True,
        retained_windows=16, slices=inputs.slices[:-search], say=note,
    )  # fmt: skip
    stamp = provenance.stamp(inputs.device)
    documents = [{**r.as_row(inputs.name, "compare"), **target.times(r.quality.fetched), **stamp} for r in rows]
    console, shown = Console(width=max(120, Console().width)), distinct(rows)
    title = f"{inputs.name}, batch {batch}, matched at {count:.1f} experts: {shown[0].tokens:,} tokens"
    title += f", {len(inputs.windows) - search} windows" + (f", {shown[0].items} items" if shown[0].items else "")
    console.print(quality_table(shown, title))
    console.print(verdict_table(shown))
    for line in [*unmatched(rows), *target.sentences(shown)]:
        console.print(line, soft_wrap=True, highlight=False)
    if results is not None:
        provenance.append_rows(results, documents)
    sys.stdout.write(json.dumps({"rows": documents}) + "\n")
