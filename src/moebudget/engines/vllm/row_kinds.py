"""Row kinds of the coming step: padding, decode rows that vote, and rows that keep the native routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moebudget.core.types import RowKind

OPT_OUT = "moebudget"  # SamplingParams(extra_args={"moebudget": False})

Ints = npt.NDArray[np.integer[Any]]
Bools = npt.NDArray[np.bool_]


def row_kinds(lengths: Ints, votes: Bools, size: int) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
    """Tokens [R] and whether its rows vote [R], per request -> RowKind int8 and request int64 of each row, [size].

    Rows after the last token are padding, of request -1. ValueError if the tokens exceed the rows.
    """
    total = int(lengths.sum())
    if total > size:
        raise ValueError(f"{total} tokens in a step exceed the {size} rows that have a row kind")
    kind = np.full(size, RowKind.PAD, dtype=np.int8)
    request = np.full(size, -1, dtype=np.int64)
    kind[:total] = np.repeat(np.where(votes, RowKind.DECODE, RowKind.NATIVE).astype(np.int8), lengths)
    request[:total] = np.repeat(np.arange(len(lengths)), lengths)
    return kind, request


def decode_requests(computed: Ints, prompt: Ints, scheduled: Ints, drafts: Ints) -> Bools:
    """[R]: requests past their prompt that feed one sampled token and its drafts. All arguments are [R]."""
    decode: Bools = (computed >= prompt) & (scheduled == 1 + drafts)
    return decode


def opts_out(sampling_params: object) -> bool:
    """Whether a request's `extra_args` ask for the native routes."""
    extra = getattr(sampling_params, "extra_args", None)
    return isinstance(extra, Mapping) and extra.get(OPT_OUT, True) == 0


def check_extra_args(extra: object) -> None:
    """ValueError for an `extra_args` whose "moebudget" is not a boolean; vLLM's server turns false into 0."""
    value = extra.get(OPT_OUT, True) if isinstance(extra, Mapping) else True
    if not isinstance(value, int | float) or value not in (0, 1):
        raise ValueError(
            f"extra_args[{OPT_OUT!r}]={value!r} must be false (this request keeps the native routes) or true"
        )


class StepRows:
    """Persistent device tensors that describe the rows of the coming step; every captured graph reads them.

    `kind` [size] int8 RowKind and `request` [size] int64. A step of more than `wide` rows, which no graph holds, also
    gets `voting`, the indices of the rows that vote. A step like the one before is not copied again, and `request` is
    copied only if `by_request`.
    """

    def __init__(self, size: int, device: torch.device | str, wide: int | None = None) -> None:
        self.wide = size if wide is None else wide
        self.filled = size  # rows from here on are padding
        self.voting: torch.Tensor | None = None
        self.by_request = True  # whether the policy reads requests
        self.sent: tuple[npt.NDArray[Any], ...] = ()  # lengths and votes of the step described last
        with torch.inference_mode(False):
            self.kind = torch.full((size,), RowKind.NATIVE, dtype=torch.int8, device=device)
            self.request = torch.full((size,), -1, dtype=torch.int64, device=device)
        self.enabled = True
        self.idle = False  # the host knows that no row of the coming step votes
        self.opted_out: set[str] = set()

    def describe(self, requests: Sequence[str], lengths: Ints, votes: Bools) -> None:
        """Describe the coming step: request ids [R], tokens [R], and whether each request decodes [R].

        While off, every row keeps the native routes, padding included, so that vLLM runs bit for bit as without us.
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
        kind, request = row_kinds(lengths, votes, len(self.kind))
        until = max(total, self.filled)
        _send(kind[:until], self.kind[:until])
        if self.by_request:
            _send(request[:until], self.request[:until])
        self.sent = (lengths.copy(), votes.copy())
        self.filled, self.voting = total, None
        if total > self.wide:
            index = np.flatnonzero(kind == RowKind.DECODE)
            self.voting = torch.empty(len(index), dtype=torch.int64, device=self.kind.device)
            _send(index, self.voting)

    def reset(self) -> None:
        """Let every row keep the native routes: for dummy batches and captures, in which the policy still runs."""
        self.idle, self.filled, self.sent = False, len(self.kind), ()
        self.voting = torch.empty(0, dtype=torch.int64, device=self.kind.device)
        self.kind.fill_(RowKind.NATIVE)
        self.request.fill_(-1)

    def note_requests(self, new: Mapping[str, object], running: Sequence[str] | set[str]) -> None:
        """Remember which new requests (id -> sampling parameters) opt out; forget requests that no longer run."""
        self.opted_out = {name for name in self.opted_out if name in running and name not in new}
        self.opted_out |= {name for name, params in new.items() if opts_out(params)}


def _send(values: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Copy to the device on the current stream, from fresh pinned memory that no later step overwrites."""
    source = torch.from_numpy(values)
    if target.is_cuda:
        target.copy_(source.pin_memory(), non_blocking=True)
    else:
        target.copy_(source)
