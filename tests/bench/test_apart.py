"""Functions in processes of their own, and how they end."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moebudget.bench.apart import apart


class Stubborn(Exception):
    """Cannot be read back: its arguments are not those of `__init__`."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} {number}")


def waits_at_the_end(number: int) -> int:
    atexit.register(time.sleep, 600)
    return number + 1


def fails(text: str) -> None:
    raise LookupError(text)


def fails_untold() -> None:
    raise Stubborn(3, "number")


def dies(child: bool) -> None:
    if child and os.fork() == 0:
        time.sleep(600)  # with the pipe open
    os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_child() -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and is not collected does not."""
    path = Path(f"/proc/{pid}/stat")
    return path.is_file() and path.read_text().split()[2] != "Z"


def test_an_answer_waits_for_the_end_of_its_process() -> None:
    before = time.monotonic()
    assert apart(waits_at_the_end, 1) == 2
    assert time.monotonic() - before < 60


def test_an_error_arrives_without_where_it_was_raised() -> None:
    with pytest.raises(LookupError, match="nothing here") as caught:
        apart(fails, "nothing here")
    assert "in fails" in str(caught.value.__cause__)


def test_an_error_that_cannot_travel_is_lost() -> None:
    with pytest.raises(RuntimeError, match="Stubborn: number 3") as caught:
        apart(fails_untold)
    assert "in fails_untold" in str(caught.value.__cause__)


@pytest.mark.parametrize("child", [False, True])
def test_a_process_that_dies_is_waited_for(child: bool) -> None:
    with pytest.raises(RuntimeError, match="dies: its process ended with exit code -9"):
        apart(dies, child)


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs /proc")
def test_what_the_process_started_outlives_it() -> None:
    child = apart(leaves_a_child)
    for _ in range(100):
        if not alive(child):
            return
        time.sleep(0.1)
    raise AssertionError(f"process {child} still runs")
