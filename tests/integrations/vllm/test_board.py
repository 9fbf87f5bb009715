"""Row classes: who votes, who keeps the model's routes, what is padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moebudget.integrations.vllm import board as board_module
from moebudget.integrations.vllm.board import (
    KEEPS,
    PADDING,
    VOTES,
    Board,
    check_extra_args,
    classify,
    decoding,
    opts_out,
)


def array(*values: Any) -> Any:
    return np.array(values)


def test_rows_are_shifted_or_padding_votes() -> None:
    rows, request = classify(array(1, 3, 2), array(True, False, True), 8)
    assert rows.tolist() == [VOTES, *[KEEPS] * 3, *[VOTES] * 2, *[PADDING] * 2]
    assert request.tolist() == [0, 1, 1, 1, 2, 2, -1, -1]


def test_more_tokens_than_rows_are_cut() -> None:
    assert classify(array(4, 4), array(True, True), 8)[0].tolist() == [VOTES] * 8
    with pytest.raises(ValueError, match="9 tokens in a step exceed the 8 rows"):
        classify(array(4, 5), array(True, True), 8)


@pytest.mark.parametrize(
    ("what", "computed", "prompt", "scheduled", "drafts", "votes"),
    [
        ("decode", 10, 10, 1, 0, True),
        ("decode with three drafts", 12, 10, 4, 3, True),
        ("whole prompt", 0, 10, 10, 0, False),
        ("last token of a prompt read in pieces", 9, 10, 1, 0, False),
        ("prompt of one token", 0, 1, 1, 0, False),
        ("generated text read again after preemption", 10, 10, 7, 0, False),
    ],
)
def test_prefill_is_taken_for_decode(
    what: str, computed: int, prompt: int, scheduled: int, drafts: int, votes: bool
) -> None:
    found = decoding(array(computed), array(prompt), array(scheduled), array(drafts))
    assert found.tolist() == [votes], what


def test_step_leaves_rows_of_the_last_one() -> None:
    board = Board(6, "cpu")
    rows = board.rows
    board.fill(["a", "b"], array(4, 2), array(False, True))
    board.fill(["a"], array(2), array(True))
    assert board.rows is rows  # graphs hold its address
    assert rows.tolist() == [VOTES] * 2 + [PADDING] * 4
    board.reset()
    assert rows.tolist() == [KEEPS] * 6


def test_switched_off_board_touches_a_row() -> None:
    board = Board(4, "cpu")
    board.enabled = False
    board.fill(["a"], array(2), array(True))
    assert board.rows.tolist() == [KEEPS] * 4
    assert board.idle


def test_step_with_a_vote_is_idle_or_a_dummy_is() -> None:
    board = Board(4, "cpu")
    for votes in (False, True):
        board.fill(["a"], array(2), array(votes))
        assert board.idle is not votes
    board.fill(["a"], array(2), array(False))
    board.reset()
    assert not board.idle


def test_request_that_opts_out_votes() -> None:
    board = Board(4, "cpu")
    out, inside = SimpleNamespace(extra_args={"moebudget": False}), SimpleNamespace(extra_args={"moebudget": True})
    board.note_requests({"a": inside, "b": out}, {"a", "b"})
    board.fill(["a", "b"], array(1, 2), array(True, True))
    assert board.rows.tolist() == [VOTES, KEEPS, KEEPS, PADDING]
    board.note_requests({"b": inside}, {"a", "b"})  # the name comes again
    assert not board.opted_out
    board.note_requests({"b": out}, {"b"})
    board.note_requests({}, {"a"})
    assert not board.opted_out


@pytest.mark.parametrize("extra", [None, {}, {"other": False}, {"moebudget": True}])
def test_request_without_a_wish_opts_out(extra: object) -> None:
    assert not opts_out(SimpleNamespace(extra_args=extra))
    assert not opts_out(None)
    check_extra_args(extra)


@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_wish_as_the_server_reads_it_is_ignored(value: object) -> None:
    check_extra_args({"moebudget": value})
    assert opts_out(SimpleNamespace(extra_args={"moebudget": value}))


@pytest.mark.parametrize("value", [2, None, "off", []])
def test_misspelt_wish_is_ignored(value: object) -> None:
    with pytest.raises(ValueError, match=r"extra_args\['moebudget'\]=.* must be false"):
        check_extra_args({"moebudget": value})


def test_rows_of_an_earlier_longer_step_vote_again() -> None:
    board = Board(16, "cpu", wide=4)
    assert board.rows.tolist() == [KEEPS] * 16
    for lengths, votes in ((array(1, 1, 1), array(True, True, True)), (array(1, 1), array(True, False))):
        board.fill(["a", "b", "c"], lengths, votes)
        assert board.voting is None
    assert board.rows.tolist() == [VOTES, KEEPS, *[PADDING] * 14]
    assert board.request.tolist() == [0, 1, *[-1] * 14]


def test_wide_step_hides_which_rows_vote() -> None:
    board = Board(16, "cpu", wide=4)
    board.fill(["a", "b", "c"], array(1, 6, 1), array(True, False, True))
    assert board.voting is not None
    assert board.voting.tolist() == [0, 7]
    board.reset()
    assert board.voting.tolist() == []


def test_step_like_the_last_is_copied_again_or_one_after_a_reset_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    board, sent = Board(8, "cpu"), []
    send = board_module._send
    monkeypatch.setattr(board_module, "_send", lambda values, target: (sent.append(len(values)), send(values, target)))
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
            board.reset()
            continue
        board.fill(requests, lengths, votes)
        rows, request = classify(lengths, votes, 8)
        assert (board.rows.tolist(), board.request.tolist()) == (rows.tolist(), request.tolist())
        assert (len(sent) > before) == copies
    board.by_request = False
    board.fill(["a", "b"], array(1, 1), array(True, True))
    assert board.rows.tolist() == [VOTES] * 2 + [PADDING] * 6
    assert len(sent) == 11
