"""A function in a process of its own, which ends with its answer and takes nothing down."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a fresh process, so that a GPU's memory is free again afterwards.

    The process leaves without its interpreter's farewell: an engine of several GPUs could wait there for ever after
    its workers had ended. Raises what the function raised, from an error with its traceback there, and RuntimeError if
    the process died.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        value, error, where = ours.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"{function.__name__}: its process ended with exit code {process.exitcode}") from None
    process.join()
    if error is not None:
        raise error from RuntimeError(where)
    return value  # type: ignore[no-any-return]


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    value, error, where = None, None, ""
    try:
        value = function(*arguments)
    except Exception as raised:
        error, where = _portable(raised), traceback.format_exc()
    pipe.send((value, error, where))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error, or its text if it cannot travel."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
