"""The command line: `moebudget demo`, `calibrate`, `allocate`, `eval`, `compare`, `tune`, `report` and more."""

from __future__ import annotations

import os

from rich.console import Console

# Importing a module registers its commands, in this order.
from moebudget.cli import (
    allocate,
    analyse,
    bench,
    calibrate,
    compare,
    diagnose,
    evaluate,
    lm_eval,
    report,
    show,
    sketch,
    tune,
)  # fmt: skip
from moebudget.cli.app import app

__all__ = [
    "allocate", "analyse", "app", "bench", "calibrate", "compare", "diagnose", "evaluate", "lm_eval", "main", "report",
    "show", "sketch", "tune",
]  # fmt: skip


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
