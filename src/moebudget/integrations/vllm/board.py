"""What each row of the coming step is: padding, a decode row that votes, or a row that keeps the model's routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PADDING, VOTES, KEEPS = 0, 1, 2
OPT_OUT = "moebudget"  # SamplingParams(extra_args={"moebudget": False})

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]


def classify(lengths: Ints, votes: Bools, size: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
    """Tokens [R] and whether its rows vote [R], of each request -> class int8 and request int64 of each row, [size].

    Rows after the last token are padding, of request -1. ValueError if the tokens exceed the rows.
    """
    total = int(lengths.sum())
    if total > size:
        raise ValueError(f"{total} tokens in a step exceed the {size} rows that the row classes were made for")
    rows = np.zeros(size, dtype=np.int8)
    request = np.full(size, -1, dtype=np.int64)
    rows[:total] = np.repeat(np.where(votes, VOTES, KEEPS).astype(np.int8), lengths)
    request[:total] = np.repeat(np.arange(len(lengths)), lengths)
    return rows, request


def decoding(computed: Ints, prompt: Ints, scheduled: Ints, drafts: Ints) -> Bools:
    """[R]: requests whose prompt is read and that feed one sampled token and its drafts. All arguments are [R]."""
    votes: Bools = (computed >= prompt) & (scheduled == 1 + drafts)
    return votes


def opts_out(sampling_params: object) -> bool:
    """Whether a request's `extra_args` ask to keep the model's own routes."""
    extra = getattr(sampling_params, "extra_args", None)
    return isinstance(extra, Mapping) and extra.get(OPT_OUT, True) == 0


def check_extra_args(extra: object) -> None:
    """ValueError for an `extra_args` whose "moebudget" is no boolean; vLLM's server turns false into 0."""
    value = extra.get(OPT_OUT, True) if isinstance(extra, Mapping) else True
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ValueError(
            f"extra_args[{OPT_OUT!r}]={value!r} must be false (this request keeps the model's own experts) or true"
        )


class Board:
    """Persistent device tensors that every captured graph reads: `rows` [size] int8 and `request` [size] int64.

    A step of more than `wide` rows, which no graph holds, also gets `voting`, the indices of the rows that vote.
    Nothing is done while a step is described as the one before, and `request` is copied only if `by_request`.
    """

    def __init__(self, size: int, device: torch.device | str, wide: int | None = None) -> None:
        self.wide = size if wide is None else wide
        self.filled = size  # rows that may hold something else than padding
        self.voting: torch.Tensor | None = None
        self.by_request = True  # whether some policy looks at requests
        self.sent: tuple[npt.NDArray[Any], ...] = ()  # the lengths and votes of the step described last
        with torch.inference_mode(False):
            self.rows = torch.full((size,), KEEPS, dtype=torch.int8, device=device)
            self.request = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.enabled = True
        self.idle = False  # known on the host: no row of the coming step votes
        self.opted_out: set[str] = set()

    def fill(self, requests: Sequence[str], lengths: Ints, votes: Bools) -> None:
        """Describe the coming step: the requests' ids [R], tokens [R], and whether they decode [R].

        While off, every row keeps the model's routes, padding included, so that vLLM is bit for bit itself.
        """
        if not self.enabled:
            self.reset()
            self.idle = True
            return
        if self.opted_out:
            votes = votes & np.array([name not in self.opted_out for name in requests], dtype=bool)
        self.idle, total = not votes.any(), int(lengths.sum())
        if self.sent and total <= self.wide and all(map(np.array_equal, self.sent, (lengths, votes))):
            self.voting = None
            return
        rows, request = classify(lengths, votes, len(self.rows))
        until = max(total, self.filled)
        _send(rows[:until], self.rows[:until])
        if self.by_request:
            _send(request[:until], self.request[:until])
        self.sent = (lengths.copy(), votes.copy())
        self.filled, self.voting = total, None
        if total > self.wide:
            index = np.flatnonzero(rows == VOTES)
            self.voting = torch.empty(len(index), dtype=torch.int64, device=self.rows.device)
            _send(index, self.voting)

    def reset(self) -> None:
        """Every row keeps the model's routes: dummy batches and captures, which run the policy all the same."""
        self.idle, self.filled, self.sent = False, len(self.rows), ()
        self.voting = torch.empty(0, dtype=torch.int64, device=self.rows.device)
        self.rows.fill_(KEEPS)
        self.request.fill_(-1)

    def note_requests(self, new: Mapping[str, object], known: Sequence[str] | set[str]) -> None:
        """Remember which of the new requests (id -> sampling parameters) opt out; forget those no longer known."""
        self.opted_out = {name for name in self.opted_out if name in known and name not in new}
        self.opted_out |= {name for name, params in new.items() if opts_out(params)}


def _send(values: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Copy to the device on the current stream, from fresh pinned memory, so that no later step overwrites it."""
    source = torch.from_numpy(values)
    if target.is_cuda:
        target.copy_(source.pin_memory(), non_blocking=True)
    else:
        target.copy_(source)
