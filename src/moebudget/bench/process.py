"""Function call in a separate process, which is killed with its children after it has answered."""

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
    """Run `function(*arguments)` in a fresh process, so that a GPU's memory is free again afterwards.

    The process skips its interpreter's shutdown, and its children are killed: at shutdown an engine on several GPUs
    could wait forever for workers that have already ended. Raises what the function raised, chained to an error that
    holds the traceback of the other process, and RuntimeError if the process died.
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
        raise RuntimeError(f"{function.__name__}: its process ended with exit code {code}; see its output above")
    value, error, trace = answer
    if error is not None:
        raise error from RuntimeError(trace)
    return value  # type: ignore[no-any-return]


def _received(ours: Connection, process: BaseProcess) -> Any:
    """The answer; None if the process died. Its children may hold the pipe open, so an open pipe proves nothing."""
    while not ours.poll(1.0):
        if not process.is_alive():
            return None
    with suppress(EOFError):
        return ours.recv()
    return None


def _end(process: BaseProcess) -> int | None:
    """Kill the process and its children; return its exit code if it had ended by itself."""
    process.join(0.5)
    code = process.exitcode
    assert process.pid is not None  # it was started
    with suppress(ProcessLookupError):  # its group is already gone
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return code


def _answer(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()  # a new process group, so that the children can be killed with it
    value, error, trace = None, None, ""
    try:
        value = function(*arguments)
    except Exception as raised:
        error, trace = _portable(raised), traceback.format_exc()
    pipe.send((value, error, trace))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _portable(error: Exception) -> Exception:
    """The error, or a RuntimeError with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
