"""The application and the options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

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
