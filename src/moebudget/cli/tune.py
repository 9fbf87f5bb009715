"""Command `moebudget tune`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import QUALITY, BatchOption, DeviceOption, DtypeOption, LengthOption, app
from moebudget.cli.compare import SpeedOption, TimingOption, TpotOption
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


@app.command("tune", rich_help_panel=QUALITY)
def tune_command(
    model: AnyModel,
    experts: Annotated[
        float | None, typer.Option(help="Target: at most this many experts fetched per layer per step.")
    ] = None,
    speedup: SpeedOption = None,
    tpot: TpotOption = None,
    max_loss_increase: Annotated[
        float | None,
        typer.Option(
            help="Target: loss increase over native of at most this many nats per token, with 95 % confidence."
        ),
    ] = None,
    max_task_drop: Annotated[
        float | None,
        typer.Option(help="Target: task accuracy at most this many points below native, with 95 % confidence."),
    ] = None,
    timing: TimingOption = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(
            help="Policies to search, separated by commas. Default: base:fill=geometric, base, spread if the "
            "statistics hold an allocation, and oea."
        ),
    ] = None,
    data: DataOption = None,
    slices: SlicesOption = None,
    stats: OptionalStats = None,
    tasks: TasksOption = None,
    batch: BatchOption = 16,
    windows: Annotated[
        int, typer.Option(min=2, help="Windows of text; 40 % are for the search, the others confirm.")
    ] = 80,
    length: LengthOption = 256,
    items: ItemsOption = 48,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Config file to write. Default: OUT/tuned.json.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option(help="File of measured rows, read and appended to. Default: OUT/tune.jsonl.")
    ] = None,
    out: OutOption = Path("out"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Find the policy and budget that meet a target, and write a config for `attach` and vLLM.

    Give exactly one target: --experts, --speedup, --tpot, --max-loss-increase or --max-task-drop. If no setting meets
    it, the exit code is 1.
    """
    from moebudget.core import provenance
    from moebudget.methods.registry import split_many
    from moebudget.tune.run import Bench, split, tune, write_config
    from moebudget.tune.search import defaults, sweeps_of
    from moebudget.tune.target import read_target, require_samples

    target = read_target(
        experts=experts, speedup=speedup, tpot=tpot, loss=max_loss_increase, task=max_task_drop, timing=timing
    )
    if target.kind == "task" and tasks is None and model != "demo":
        raise ValueError("--max-task-drop needs task items: use --tasks items.jsonl")
    per_task = items if target.kind == "task" else 0
    inputs = read_inputs(
        model, data=data, stats=stats, tasks=tasks, demo_items=per_task, windows=windows, length=length, out=out,
        device=device, dtype=dtype, slices=slices,
    )  # fmt: skip
    target.prepare(inputs.facts, batch)
    strings = split_many(policies) if policies else defaults(inputs.held, inputs.facts)
    samples = [sweep.policy(sweep.high) for sweep in sweeps_of(strings, inputs.facts)]
    for policy in samples:
        inputs.require(policy.name, policy.needs)
    search, check = split(inputs.windows, inputs.items, inputs.slices)
    require_samples(target, len(search.windows), len(check.windows), [i.task for i in check.items])
    output, rows = out / "tuned.json" if output is None else output, out / "tune.jsonl" if rows is None else rows
    loaded = inputs.load(samples)
    bench = Bench(
        loaded, inputs.name, inputs.tokenizer, inputs.start_id, inputs.stats,
        inputs.stats_file if inputs.stats else None, inputs.device, inputs.dtype, batch, rows,
    )  # fmt: skip
    tuned = tune(bench, target, strings, search, check, note)
    console = Console(width=max(110, Console().width), highlight=False, soft_wrap=True)
    console.print(_table(tuned, inputs.name, batch, len(search.windows), len(check.windows)))
    console.print(f"{tuned.measured} settings measured in this run; their rows are in {rows}")
    answer: dict[str, Any] = {"policy": None, "reason": tuned.answer.reason, "config": None}
    confirmed = tuned.answer.confirmed
    if tuned.answer.policy is None or confirmed is None:
        console.print(f"[bold]no setting meets the target[/bold]: {tuned.answer.reason}; no config was written")
    else:
        stamp = provenance.stamp(inputs.device)
        write_config(output, tuned, target, inputs.stats_file, {**target.evidence(), **stamp})
        answer = {"policy": tuned.answer.policy.name, "reason": "", "config": str(output)}
        console.print(f"[bold]{tuned.answer.policy}[/bold]: {target.judged(confirmed, tuned.confirming)}")
        for name, gap in confirmed.get("slices", {}).items():
            console.print(f"  {name}: {_interval(gap, 'nll', 3)} nats per token, {gap['nll_n']} windows")
        console.print(
            f'wrote {output}: vllm serve MODEL --additional-config "$(cat {output})", or '
            f"attach(model, json.load(open({str(output)!r})))"
        )
    sys.stdout.write(json.dumps({**answer, "rows": [*tuned.searched, *tuned.confirming]}) + "\n")
    if tuned.answer.policy is None:
        raise typer.Exit(1)


def _table(tuned: Any, name: str, batch: int, searched: int, confirming: int) -> Table:
    """Every setting evaluated, first on the samples of the search, then on those that confirm."""
    table = Table(
        title=f"{name}, batch {batch}: {searched} windows to search on, {confirming} others to confirm",
        caption="loss increase in nats per token, lost task accuracy in points, both over native; \\[low, high] "
        "paired bootstrap, 95 %",
    )
    table.add_column("policy", no_wrap=True)
    for column in ("samples", "experts fetched", "loss increase", "task accuracy lost"):
        table.add_column(column, justify="right", no_wrap=True)
    for part, rows in (("search", tuned.searched), ("confirm", tuned.confirming)):
        for row in rows:
            cells = [_interval(row, "nll", 3), _interval(row, "task", 1)]
            table.add_row(row["policy"], part, f"{row['fetched']:.1f}", *cells)
    return table


def _interval(row: dict[str, Any], field: str, digits: int) -> str:
    mean, low, high = (row[f"{field}_delta{end}"] for end in ("", "_low", "_high"))
    interval = "" if low is None else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return "" if mean is None else f"{mean:+.{digits}f}{interval}"
