"""`moebudget tune`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moebudget.cli.app import DeviceOption, DtypeOption, app
from moebudget.cli.compare import SpeedOption, TimingOption, TpotOption
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


@app.command("tune")
def tune_command(
    model: AnyModel,
    experts: Annotated[float | None, typer.Option(help="Target: at most this many fetched experts a layer.")] = None,
    speedup: SpeedOption = None,
    tpot: TpotOption = None,
    max_loss_increase: Annotated[
        float | None, typer.Option(help="Target: nats a token above the unchanged model, at most, at 95 %.")
    ] = None,
    max_task_drop: Annotated[
        float | None, typer.Option(help="Target: points of task accuracy below the unchanged model, at most, at 95 %.")
    ] = None,
    timing: TimingOption = None,
    policies: Annotated[
        list[str] | None,
        typer.Option(help="To search, separated by commas; default: base, base:fill=half, spread if allocated, oea."),
    ] = None,
    data: DataOption = None,
    slices: SlicesOption = None,
    stats: StatsOption = None,
    tasks: TasksOption = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows a decode step, as served.")] = 16,
    windows: Annotated[int, typer.Option(min=2, help="Windows of text: 40 % search, the others confirm.")] = 80,
    length: Annotated[int, typer.Option(min=4, help="Predicted tokens a window.")] = 256,
    items: ItemsOption = 48,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The config; default OUT/tuned.json.")] = None,
    rows: Annotated[
        Path | None, typer.Option(help="Rows measured before, read and appended to; default OUT/tune.jsonl.")
    ] = None,
    out: OutOption = Path("out"),
    device: DeviceOption = None,
    dtype: DtypeOption = None,
) -> None:
    """Find the policy and budget for one target; write a config for `attach` and vLLM. Exit code 1: there is none."""
    from moebudget import provenance
    from moebudget.presets import split_many
    from moebudget.tune.run import Bench, split, tune, write_config
    from moebudget.tune.search import defaults, families_of
    from moebudget.tune.target import read_target, require_samples

    target = read_target(
        experts=experts, speedup=speedup, tpot=tpot, loss=max_loss_increase, task=max_task_drop, timing=timing
    )
    if target.kind == "task" and tasks is None and model != "demo":
        raise ValueError("--max-task-drop needs task items: --tasks items.jsonl")
    per_task = items if target.kind == "task" else 0
    given = read_inputs(
        model, data=data, stats=stats, tasks=tasks, demo_items=per_task, windows=windows, length=length, out=out,
        device=device, dtype=dtype, slices=slices,
    )  # fmt: skip
    target.prepare(given.facts, batch)
    spelled = split_many(policies) if policies else defaults(given.held, given.facts)
    some = [f.policy(f.high) for f in families_of(spelled, given.facts)]
    for policy in some:
        given.require(policy.name, policy.needs)
    search, check = split(given.windows, given.items, given.slices)
    require_samples(target, len(search.windows), len(check.windows), [i.task for i in check.items])
    output, rows = out / "tuned.json" if output is None else output, out / "tune.jsonl" if rows is None else rows
    loaded = given.load(some)
    bench = Bench(
        loaded, given.name, given.tokenizer, given.start_id, given.stats, given.stats_file if given.stats else None,
        given.device, given.dtype, batch, rows,
    )  # fmt: skip
    found = tune(bench, target, spelled, search, check, note)
    console = Console(width=max(110, Console().width), highlight=False, soft_wrap=True)
    console.print(_table(found, given.name, batch, len(search.windows), len(check.windows)))
    console.print(f"{found.measured} settings measured now, rows in {rows}")
    answer: dict[str, Any] = {"policy": None, "reason": found.answer.reason, "config": None}
    confirmed = found.answer.confirmed
    if found.answer.policy is None or confirmed is None:
        console.print(f"[bold]no operating point[/bold]: {found.answer.reason}; no config is written")
    else:
        stamp = provenance.stamp(given.device)
        write_config(output, found, target, given.stats_file, {**target.evidence(), **stamp})
        answer = {"policy": found.answer.policy.name, "reason": "", "config": str(output)}
        console.print(f"[bold]{found.answer.policy}[/bold]: {target.judged(confirmed, found.confirming)}")
        for name, gap in confirmed.get("slices", {}).items():
            console.print(f"  {name}: {_interval(gap, 'nll', 3)} nats a token, {gap['nll_n']} windows")
        console.print(
            f'wrote {output}: vllm serve MODEL --additional-config "$(cat {output})", or '
            f"attach(model, json.load(open({str(output)!r})))"
        )
    sys.stdout.write(json.dumps({**answer, "rows": [*found.searched, *found.confirming]}) + "\n")
    if found.answer.policy is None:
        raise typer.Exit(1)


def _table(found: Any, name: str, batch: int, searched: int, confirming: int) -> Table:
    """Every setting that was looked at, on the samples of the search and then of the confirmation."""
    table = Table(
        title=f"{name}, batch {batch}: {searched} windows to search on, {confirming} others to confirm",
        caption="loss and tasks against the unchanged model, \\[low, high] paired bootstrap, 95 %",
    )
    table.add_column("policy", no_wrap=True)
    for column in ("samples", "experts", "nats a token above dense", "points of tasks lost"):
        table.add_column(column, justify="right", no_wrap=True)
    for part, rows in (("search", found.searched), ("confirm", found.confirming)):
        for row in rows:
            cells = [_interval(row, "nll", 3), _interval(row, "task", 1)]
            table.add_row(row["policy"], part, f"{row['fetched']:.1f}", *cells)
    return table


def _interval(row: dict[str, Any], field: str, digits: int) -> str:
    mean, low, high = (row[f"{field}_delta{end}"] for end in ("", "_low", "_high"))
    interval = "" if low is None else f" [{low:+.{digits}f}, {high:+.{digits}f}]"
    return "" if mean is None else f"{mean:+.{digits}f}{interval}"
