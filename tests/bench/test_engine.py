"""Engines that are timed side by side, with a fake vLLM."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from moebudget.bench.engine import Plan, Timing, Turn, decode

PLAN = Plan("m", False, (4, 2), prompt=3, tokens=5, repeats=3)


class FakeLLM:
    """The part of vLLM's LLM that `decode` calls: request r decodes r, r + 1, ...; `made` holds all engines."""

    made: ClassVar[list[FakeLLM]] = []
    busy: ClassVar[list[tuple[str, int]]] = []  # which engine ran, and how many tokens per request
    running = 0
    overlap = False
    drifts = False  # every generation decodes different tokens
    ranks = 1
    fails = ""

    def __init__(self, model: str, **_: Any) -> None:
        self.name, self.calls, self.budget = model, 0, 0
        self.steps: list[int] = []  # the budget of each decode step
        self.down: list[int] = []
        FakeLLM.made.append(self)
        config = SimpleNamespace(get_vocab_size=lambda: 100)
        core = SimpleNamespace(shutdown=lambda: self.down.append(len(FakeLLM.busy)))
        self.llm_engine = SimpleNamespace(model_config=config, engine_core=core)

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        FakeLLM.running += 1
        time.sleep(0.001)
        FakeLLM.overlap |= FakeLLM.running > 1
        FakeLLM.running -= 1
        FakeLLM.busy.append((self.name, params.max_tokens))
        if FakeLLM.fails == self.name and len(FakeLLM.busy) > 8:
            raise RuntimeError("out of memory")
        self.calls += 1
        for _ in range(params.max_tokens - 1):
            self.steps.append(self.budget)
        shift = self.calls if FakeLLM.drifts else 0
        ids = [[r + t + shift for t in range(params.max_tokens)] for r in range(len(prompts))]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tuple(row))]) for row in ids]

    def collective_rpc(self, name: str, args: tuple[int, ...] = ()) -> list[Any]:
        if name == "moebudget_set":
            self.budget = args[0]
            return []
        # Two layers: in the first, experts alternate between the ranks; in the second, the last rank has all but one.
        held = [[(b + 1) // 2, b // 2] for b in self.steps], [[1, b - 1] for b in self.steps]
        layers = [[sum(column) for column in zip(*steps, strict=True)] or [0, 0] for steps in held]
        parts: dict[str, Any] = {
            "ranks": 2, "fetched": [sum(column) for column in zip(*layers, strict=True)],
            "fetched_most": sum(max(step) for steps in held for step in steps),
        }  # fmt: skip
        counted = [{"steps": len(self.steps), "fetched": sum(layer), "native_union": 9.0} for layer in layers]
        state = {"per_layer": counted, "path": "torch", "fetched_bytes_per_expert": 8}
        return [{**state, "expert_parallel": parts if FakeLLM.ranks > 1 else None}]


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=lambda **kwargs: SimpleNamespace(**kwargs))
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name, value in (
        ("made", []),
        ("busy", []),
        ("overlap", False),
        ("drifts", False),
        ("ranks", 1),
        ("fails", ""),
    ):
        monkeypatch.setattr(FakeLLM, name, value)


def side_by_side(plans: Sequence[Plan]) -> list[list[Timing] | BaseException]:
    turn = Turn(threading.Barrier(len(plans)), threading.Condition(), [])

    def run(plan: Plan) -> list[Timing] | BaseException:
        try:
            return decode(plan, None, None, {}, turn)
        except RuntimeError as error:
            turn.started.abort()
            return error

    with ThreadPoolExecutor(len(plans)) as threads:
        return list(threads.map(run, plans))


def test_engines_run_one_at_a_time_and_alternate() -> None:
    results = side_by_side([replace(PLAN, model=name) for name in "abc"])
    assert not FakeLLM.overlap
    assert all(len(timings) == 2 for timings in results if isinstance(timings, list))
    turns = [name for name, tokens in FakeLLM.busy if tokens == 1]
    rounds = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert len(rounds) == len(PLAN.batches) * PLAN.repeats
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)
    assert [len(set(each)) for each in zip(*rounds, strict=True)] == [1, 1, 1]  # always in the same order
    # No engine is shut down while another is timed.
    assert {at for engine in FakeLLM.made for at in engine.down} == {len(FakeLLM.busy)}


def test_engines_with_different_amounts_of_work_all_finish() -> None:
    results = side_by_side([PLAN, replace(PLAN, model="b", batches=(4,), repeats=1)])
    assert [len(timings) for timings in results if isinstance(timings, list)] == [2, 1]


def test_failure_of_one_engine_keeps_the_times_of_the_other() -> None:
    FakeLLM.fails = "b"
    timings, error = side_by_side([replace(PLAN, model=name) for name in "ab"])
    assert isinstance(timings, list)
    assert len(timings) == 2
    assert str(error) == "out of memory"
    assert all(engine.down for engine in FakeLLM.made)


def test_digest_is_of_all_tokens_and_empty_if_repeats_differ() -> None:
    tokens = [[r + t for t in range(6)] for r in range(4)]
    expected = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
    four, two = decode(PLAN, None, None, {})
    assert four.digest == expected != two.digest
    assert len(four.tpots) == PLAN.repeats
    FakeLLM.drifts = True
    assert [t.digest for t in decode(PLAN, None, None, {})] == ["", ""]


def test_fullest_rank_is_taken_per_layer_and_step() -> None:
    """In the first layer the ranks differ by at most one expert, in the second the last rank has nearly all."""
    FakeLLM.ranks = 2
    plan = replace(PLAN, batches=(4,))
    six, five = decode(plan, "base:budget=6", None, {4: [6, 5]})
    assert (six.ranks, five.ranks) == (2, 2)
    assert six.by_rank == pytest.approx(((3 + 1) / 2, (3 + 5) / 2))
    assert five.by_rank == pytest.approx(((3 + 1) / 2, (2 + 4) / 2))
    assert (six.fullest, five.fullest) == pytest.approx(((3 + 5) / 2, (3 + 4) / 2))
    assert (six.fetched, five.fetched) == (6, 5)
    assert six.by_layer == (6, 6)


def test_single_rank_has_no_numbers_of_ranks() -> None:
    [timing] = decode(replace(PLAN, batches=(4,)), "base:budget=6", None, {4: [6]})
    assert (timing.ranks, timing.by_rank, timing.fullest, timing.fetched) == (1, (), None, 6)
