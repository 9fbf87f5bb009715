"""Typer application, and the arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Panels of `moebudget --help`, in the order in which their first commands are registered.
START, STATISTICS, QUALITY, SPEED = "Start here", "Make statistics", "Measure quality", "Measure speed, draw reports"

app = typer.Typer(
    help="Decode Mixture-of-Experts models faster: fetch fewer distinct experts per step, chosen so that the output "
    "changes least.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[str, typer.Argument(help="Transformers checkpoint: a folder or a hub name.")]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="Device of the model: cpu, cuda or cuda:1. Default: a GPU if there is one, else cpu."),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help="Type of the weights: float32, bfloat16, float16 or auto (the checkpoint's). Default: float32 on a CPU, "
        "else auto."
    ),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Rows per decode step.")]
LengthOption = Annotated[int, typer.Option(min=4, help="Predicted tokens per window of text.")]
StatsOption = Annotated[Path, typer.Option(help="Statistics file written by `moebudget calibrate`.")]
ResultsOption = Annotated[Path | None, typer.Option(help="Append the rows to this .jsonl file. Default: do not.")]
