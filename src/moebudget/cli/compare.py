"""`moebudget compare`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

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
    note,
    read_inputs,
)

SpeedOption = Annotated[float | None, typer.Option(help="Times faster than the unchanged model; needs --timing.")]
TpotOption = Annotated[float | None, typer.Option(help="Milliseconds of a decode step; needs --timing.")]
TimingOption = Annotated[
    Path | None, typer.Option(help="Rows of `diagnose --results` or `bench decode --results` at this batch size.")
]


@app.command("compare")
def compare_command(
    model: AnyModel,
    policies: Annotated[
        list[str],
        typer.Option(
            help="Separated by commas, or repeated: base, base:fill=half, oea:k0=2 are matched; with all its numbers, "
            "as base:budget=12, a policy is taken as given."
        ),
    ],
    experts: Annotated[float | None, typer.Option(help="Match at this many fetched experts a layer.")] = None,
    speedup: SpeedOption = None,
    tpot: TpotOption = None,
    timing: TimingOption = None,
    data: DataOption = None,
    slices: SlicesOption = None,
    stats: StatsOption = None,
    tasks: TasksOption = None,
    items: ItemsOption = 24,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step, kept constant.")] = 16,
    windows: Annotated[int, typer.Option(min=2, help="Windows of text at most, the search's included.")] = 64,
    length: Annotated[int, typer.Option(min=4, help="Predicted tokens a window.")] = 256,
    out: OutOption = Path("out"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    results: Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file.")] = None,
) -> None:
    """Policies at the same measured number of fetched experts or step time, with dense and plain top-k."""
    from moebudget import provenance
    from moebudget.evaluate.compare import compare, distinct, methods_of, unmatched
    from moebudget.evaluate.report import quality_table
    from moebudget.evaluate.text import evaluate_text
    from moebudget.evaluate.verdicts import verdict_table
    from moebudget.policy import Policy
    from moebudget.presets import dense, split_many
    from moebudget.tune.target import read_target

    target = read_target(experts=experts, speedup=speedup, tpot=tpot, timing=timing)
    spelled = split_many(policies)
    given = read_inputs(
        model, data=data, stats=stats, tasks=tasks, demo_items=items, windows=windows, length=length, out=out,
        device=device, dtype=dtype, slices=slices,
    )  # fmt: skip
    target.prepare(given.facts, batch)
    some = [
        m if isinstance(m, Policy) else m[0].policy(m[0].low) for m in methods_of(spelled, given.facts, 1).values()
    ]
    for policy in some:
        given.require(policy.name, policy.needs)
    search = max(1, min(batch, len(given.windows) // 3))
    loaded = given.load(some)
    (native,) = evaluate_text(loaded, [dense()], given.stats, given.windows[-search:], batch=batch, quiet=True)
    count = target.experts_at(native.counters.native_union)
    if isinstance(count, str):
        raise ValueError(count)
    note(target.said(count))
    rows = compare(
        loaded, methods_of(spelled, given.facts, count), given.stats, given.windows, [count], search=search,
        items=given.items, tokenizer=given.tokenizer, start_id=given.start_id, batch=batch, noise=True,
        retained_windows=16, slices=given.slices[:-search], say=note,
    )  # fmt: skip
    stamp = provenance.stamp(given.device)
    documents = [{**r.as_row(given.name, "compare"), **target.times(r.quality.fetched), **stamp} for r in rows]
    console, shown = Console(width=max(110, Console().width)), distinct(rows)
    title = f"{given.name}, batch {batch}, matched at {count:.1f} experts: {shown[0].tokens:,} tokens"
    title += f", {len(given.windows) - search} windows" + (f", {shown[0].items} items" if shown[0].items else "")
    console.print(quality_table(shown, title))
    console.print(verdict_table(shown))
    for line in [*unmatched(rows), *target.sentences(shown)]:
        console.print(line, soft_wrap=True, highlight=False)
    if results is not None:
        provenance.append_rows(results, documents)
    sys.stdout.write(json.dumps({"rows": documents}) + "\n")
