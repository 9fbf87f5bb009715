"""Calls in a separate process, and how the process ends."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moebudget.bench.process import apart


class Stubborn(Exception):
    """Cannot be unpickled: its arguments are not those of `__init__`."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} {number}")


def waits_at_the_end(number: int) -> int:
    atexit.register(time.sleep, 600)
    return number + 1


def fails(text: str) -> None:
    raise LookupError(text)


def fails_unpicklable() -> None:
    raise Stubborn(3, "number")


def dies(child: bool) -> None:
    if child and os.fork() == 0:
        time.sleep(600)  # with the pipe open
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    path = Path(f"/proc/{pid}/stat")
    return path.is_file() and path.read_text().split()[2] != "Z"


def test_answer_does_not_wait_for_the_interpreters_shutdown() -> None:
    before = time.monotonic()
    assert apart(waits_at_the_end, 1) == 2
    assert time.monotonic() - before < 60


def test_error_arrives_with_its_traceback() -> None:
    with pytest.raises(LookupError, match="nothing here") as caught:
        apart(fails, "nothing here")
    assert "in fails" in str(caught.value.__cause__)


def test_error_that_cannot_be_pickled_arrives_as_text() -> None:
    with pytest.raises(RuntimeError, match="Stubborn: number 3") as caught:
        apart(fails_unpicklable)
    assert "in fails_unpicklable" in str(caught.value.__cause__)


@pytest.mark.parametrize("child", [False, True])
def test_process_that_dies_is_reported(child: bool) -> None:
    with pytest.raises(RuntimeError, match="dies: its process ended with exit code -9"):
        apart(dies, child)


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs /proc")
def test_children_of_the_process_are_killed() -> None:
    child = apart(leaves_a_child)
    for _ in range(100):
        if not alive(child):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} still runs")
