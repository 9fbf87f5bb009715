"""Functions in processes of their own, and how they end."""

from __future__ import annotations

import atexit
import os
import signal
import time

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


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


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


def test_a_process_that_dies_is_waited_for() -> None:
    with pytest.raises(RuntimeError, match="dies: its process ended with exit code -9"):
        apart(dies)
