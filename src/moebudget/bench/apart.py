"""A function in a process of its own, which ends with its answer and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

T = TypeVar("T")


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a fresh process, so that a GPU's memory is free again afterwards.

    The process leaves without its interpreter's farewell, and what it started is killed: an engine of several GPUs
    could wait there for ever after its workers had ended. Raises what the function raised, from an error with its
    traceback there, and RuntimeError if the process died.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_answer, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        answer = _received(ours, process)
    finally:
        code = _end(process)
    if answer is None:
        raise RuntimeError(f"{function.__name__}: its process ended with exit code {code}; its last words stand above")
    value, error, where = answer
    if error is not None:
        raise error from RuntimeError(where)
    return value  # type: ignore[no-any-return]


def _received(ours: Connection, process: BaseProcess) -> Any:
    """The answer; None if the process died. Its own children may hold the pipe open, so the pipe alone cannot tell."""
    while not ours.poll(1.0):
        if not process.is_alive():
            return None
    with suppress(EOFError):
        return ours.recv()
    return None


def _end(process: BaseProcess) -> int | None:
    """Kill the process and all that it started; the exit code it had before, if it had ended by itself."""
    process.join(0.5)
    code = process.exitcode
    assert process.pid is not None  # it was started
    with suppress(ProcessLookupError):  # nothing is left of its group
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return code


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # a process group of its own
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
