"""Row kinds: which rows vote, which keep the native routes, and which are padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moebudget.core.types import RowKind
from moebudget.engines.vllm import row_kinds as module
from moebudget.engines.vllm.row_kinds import StepRows, check_extra_args, decode_requests, opts_out, row_kinds


def array(*values: Any) -> Any:
    return np.array(values)


def test_rows_take_the_kind_of_their_request_and_the_rest_is_padding() -> None:
    kind, request = row_kinds(array(1, 3, 2), array(True, False, True), 8)
    assert kind.tolist() == [RowKind.DECODE, *[RowKind.NATIVE] * 3, *[RowKind.DECODE] * 2, *[RowKind.PAD] * 2]
    assert request.tolist() == [0, 1, 1, 1, 2, 2, -1, -1]


def test_more_tokens_than_rows_are_refused() -> None:
    assert row_kinds(array(4, 4), array(True, True), 8)[0].tolist() == [RowKind.DECODE] * 8
    with pytest.raises(ValueError, match="9 tokens in a step exceed the 8 rows"):
        row_kinds(array(4, 5), array(True, True), 8)


@pytest.mark.parametrize(
    ("case", "computed", "prompt", "scheduled", "drafts", "votes"),
    [
        ("decode", 10, 10, 1, 0, True),
        ("decode with three drafts", 12, 10, 4, 3, True),
        ("whole prompt", 0, 10, 10, 0, False),
        ("last token of a prompt read in pieces", 9, 10, 1, 0, False),
        ("prompt of one token", 0, 1, 1, 0, False),
        ("generated text read again after preemption", 10, 10, 7, 0, False),
    ],
)
def test_requests_past_their_prompt_decode(
    case: str, computed: int, prompt: int, scheduled: int, drafts: int, votes: bool
) -> None:
    decode = decode_requests(array(computed), array(prompt), array(scheduled), array(drafts))
    assert decode.tolist() == [votes], case


def test_step_overwrites_the_rows_of_the_last_in_place() -> None:
    step_rows = StepRows(6, "cpu")
    kind = step_rows.kind
    step_rows.describe(["a", "b"], array(4, 2), array(False, True))
    step_rows.describe(["a"], array(2), array(True))
    assert step_rows.kind is kind  # graphs hold its address
    assert kind.tolist() == [RowKind.DECODE] * 2 + [RowKind.PAD] * 4
    step_rows.reset()
    assert kind.tolist() == [RowKind.NATIVE] * 6


def test_all_rows_are_native_while_switched_off() -> None:
    step_rows = StepRows(4, "cpu")
    step_rows.enabled = False
    step_rows.describe(["a"], array(2), array(True))
    assert step_rows.kind.tolist() == [RowKind.NATIVE] * 4
    assert step_rows.idle


def test_only_steps_without_a_vote_are_idle_and_dummy_steps_never() -> None:
    step_rows = StepRows(4, "cpu")
    for votes in (False, True):
        step_rows.describe(["a"], array(2), array(votes))
        assert step_rows.idle is not votes
    step_rows.describe(["a"], array(2), array(False))
    step_rows.reset()
    assert not step_rows.idle


def test_request_that_opts_out_keeps_native_routes_while_it_runs() -> None:
    step_rows = StepRows(4, "cpu")
    opt_out, opt_in = (SimpleNamespace(extra_args={"moebudget": value}) for value in (False, True))
    step_rows.note_requests({"a": opt_in, "b": opt_out}, {"a", "b"})
    step_rows.describe(["a", "b"], array(1, 2), array(True, True))
    assert step_rows.kind.tolist() == [RowKind.DECODE, RowKind.NATIVE, RowKind.NATIVE, RowKind.PAD]
    step_rows.note_requests({"b": opt_in}, {"a", "b"})  # a new request of the same name
    assert not step_rows.opted_out
    step_rows.note_requests({"b": opt_out}, {"b"})
    step_rows.note_requests({}, {"a"})
    assert not step_rows.opted_out


@pytest.mark.parametrize("extra", [None, {}, {"other": False}, {"moebudget": True}])
def test_request_without_an_opt_out_is_capped(extra: object) -> None:
    assert not opts_out(SimpleNamespace(extra_args=extra))
    assert not opts_out(None)
    check_extra_args(extra)


@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_opt_out_is_read_as_the_server_passes_it(value: object) -> None:
    check_extra_args({"moebudget": value})
    assert opts_out(SimpleNamespace(extra_args={"moebudget": value}))


@pytest.mark.parametrize("value", [2, None, "off", []])
def test_wrong_opt_out_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"extra_args\['moebudget'\]=.* must be false"):
        check_extra_args({"moebudget": value})


def test_rows_of_an_earlier_longer_step_become_padding() -> None:
    step_rows = StepRows(16, "cpu", wide=4)
    assert step_rows.kind.tolist() == [RowKind.NATIVE] * 16
    for lengths, votes in ((array(1, 1, 1), array(True, True, True)), (array(1, 1), array(True, False))):
        step_rows.describe(["a", "b", "c"], lengths, votes)
        assert step_rows.voting is None
    assert step_rows.kind.tolist() == [RowKind.DECODE, RowKind.NATIVE, *[RowKind.PAD] * 14]
    assert step_rows.request.tolist() == [0, 1, *[-1] * 14]


def test_wide_step_lists_the_rows_that_vote() -> None:
    step_rows = StepRows(16, "cpu", wide=4)
    step_rows.describe(["a", "b", "c"], array(1, 6, 1), array(True, False, True))
    assert step_rows.voting is not None
    assert step_rows.voting.tolist() == [0, 7]
    step_rows.reset()
    assert step_rows.voting.tolist() == []


def test_rows_are_copied_only_if_the_step_differs_or_follows_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    step_rows, sent = StepRows(8, "cpu"), []
    send = module._send
    monkeypatch.setattr(module, "_send", lambda values, target: (sent.append(len(values)), send(values, target)))
    steps = [
        (["a", "b"], array(1, 1), array(True, True), True),
        (["a", "b"], array(1, 1), array(True, True), False),
        (["a", "b"], array(1, 1), array(True, False), True),
        (["a"], array(2), array(True), True),  # the same rows, of one request
        (["a"], array(1), array(True), True),
        (None, None, None, True),
        (["a"], array(1), array(True), True),
    ]
    for requests, lengths, votes, copies in steps:
        before = len(sent)
        if requests is None:
            step_rows.reset()
            continue
        step_rows.describe(requests, lengths, votes)
        kind, request = row_kinds(lengths, votes, 8)
        assert (step_rows.kind.tolist(), step_rows.request.tolist()) == (kind.tolist(), request.tolist())
        assert (len(sent) > before) == copies
    step_rows.by_request = False
    step_rows.describe(["a", "b"], array(1, 1), array(True, True))
    assert step_rows.kind.tolist() == [RowKind.DECODE] * 2 + [RowKind.PAD] * 6
    assert len(sent) == 11
