"""Command line: `moebudget demo`, `diagnose`, `calibrate`, `eval`, `compare`, `tune`, `bench`, `report` and more."""

from __future__ import annotations

import os

from rich.console import Console

# Importing a module registers its commands; `moebudget --help` lists them in this order.
# isort: off
from moebudget.cli import (
    show,
    diagnose,
    calibrate,
    allocate,
    sketch,
    evaluate,
    compare,
    tune,
    lm_eval,
    analyse,
    bench,
    report,
)
from moebudget.cli.app import app
# isort: on

__all__ = [
    "allocate", "analyse", "app", "bench", "calibrate", "compare", "diagnose", "evaluate", "lm_eval", "main", "report",
    "show", "sketch", "tune",
]  # fmt: skip


def _user_errors() -> tuple[type[BaseException], ...]:
    """Errors that a user can fix. Imported only after something was raised, so that `--help` stays fast."""
    from moebudget.core.types import MissingStatisticError
    from moebudget.engines.transformers.loading import MissingExtraError
    from moebudget.evaluate.text import InactivePolicyError

    known = (ValueError, FileNotFoundError, MissingStatisticError, MissingExtraError, InactivePolicyError, MemoryError)
    return () if os.environ.get("MOEBUDGET_TRACEBACK") else known


def main() -> None:
    """Entry point. Errors that a user can fix are one line and exit code 2; MOEBUDGET_TRACEBACK=1 shows tracebacks."""
    try:
        app()
    except Exception as error:
        if not isinstance(error, _user_errors()):
            raise
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from None
