"""experiments/checks/check_vllm.py reports the faults in made-up answers of engines, and none in sound ones."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebudget.methods.registry import parse

SCRIPT = Path(__file__).parents[3] / "experiments/checks/check_vllm.py"
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def script() -> Any:
    path = list(sys.path)
    spec = spec_from_file_location("check_vllm", SCRIPT)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["check_vllm"] = module  # dataclasses look it up
    assert spec.loader is not None
    spec.loader.exec_module(module)
    sys.path[:] = path
    yield module
    del sys.modules["check_vllm"]


def make_phase(script: Any, case: Any, capped: bool) -> Answer:
    """Ten steps of two layers and five requests, the last of which is reading its prompt."""
    rng = np.random.default_rng(0)
    rows, native, counts = [], [], dict.fromkeys(("steps", "rows", "fetched", "native_union"), 0)
    ranks = np.zeros(3)
    for step in range(10):
        for layer in range(2):
            ids = [sorted(rng.permutation(case.experts)[:4].tolist()) for _ in range(5)]
            union = sorted({u for routes in ids[:4] for u in routes})
            active = union
            if capped and case.counts == "rank":
                active = [*[u for u in union if u < 16][: case.budget], *[u for u in union if u >= 16][: case.budget]]
            elif capped:
                active = union[: case.budget]
            for request, routes in enumerate(ids):
                run = routes if request == 4 or set(routes) <= set(active) else active[:]
                position = len(script.PROMPTS[request]) - 10 + step if request == 4 else 100 + step
                rows.append([step, layer, request, position, run])
                native.append(routes)
            counts["steps"] += 1
            counts["rows"] += 4
            counts["fetched"] += len(active)
            counts["native_union"] += len(union)
            ranks += [*script.loads(case, set(active)), max(script.loads(case, set(active)))]
    zero = {"counters": dict.fromkeys(counts, 0), "per_layer": [], "path": "kernel", "debug": None}
    zero["expert_parallel"] = {"fetched": [0, 0], "fetched_most": 0}
    state = {**zero, "counters": counts, "expert_parallel": {"fetched": list(ranks[:2]), "fetched_most": ranks[2]}}
    if case.debug:
        state["debug"] = {"compared": counts["steps"], "different": 0}
    return {
        "tokens": [[1]] * len(script.PROMPTS), "rows": rows, "native": native, "copies": [row[-1] for row in rows],
        "ranks_run_alike": True,
        "before": [copy.deepcopy(zero) for _ in range(case.gpus)],
        "states": [copy.deepcopy(state) for _ in range(case.gpus)],
    }  # fmt: skip


def sound(script: Any, name: str) -> dict[str, Answer]:
    case = script.CASES[name]
    unrestricted, off = make_phase(script, case, False), make_phase(script, case, False)
    off["before"] = copy.deepcopy(off["states"])
    capped = make_phase(script, case, True)
    for state in capped["states"]:
        state["path"] = "kernel"
    method = "Fp8OnlineMoEMethod" if name == "fp8" else "UnquantizedFusedMoEMethod"
    log = f"x; kernel path, experts by {method}, 1 bytes\nCapturing CUDA graphs (decode, FULL): 100%"
    baseline = [make_phase(script, case, False) for _ in range(3)]
    return {
        "baseline": {"phases": baseline[:2], "log": ""}, "twin": {"phases": baseline[2:], "log": ""},
        "capped": {"phases": [unrestricted, capped, off], "log": log},
    }  # fmt: skip


CASES = ("bf16", "fp8", "tp2", "ep2", "ep2_rank")


@pytest.mark.parametrize("name", CASES)
def test_sound_engine_has_no_faults(script: Any, name: str) -> None:
    assert script.judge(script.CASES[name], "graph", sound(script, name), True) == []


def more_experts(phase: Answer) -> None:
    phase["rows"][0][4] = list(range(14))


def changed_prefill(phase: Answer) -> None:
    phase["rows"][4][4] = [0, 1, 2, 3] if phase["rows"][4][4] != [0, 1, 2, 3] else [0, 1, 2, 4]


def other_token(phase: Answer) -> None:
    phase["tokens"] = [[2], *phase["tokens"][1:]]


def miscounted(phase: Answer) -> None:
    phase["states"][-1]["counters"]["fetched"] += 1


def miscounted_rank(phase: Answer) -> None:
    phase["states"][-1]["expert_parallel"]["fetched_most"] += 1


def other_path(phase: Answer) -> None:
    phase["states"][0]["path"] = "torch (cuda)"


def apart(phase: Answer) -> None:
    phase["ranks_run_alike"] = False


def never_compared(phase: Answer) -> None:
    phase["states"][0]["debug"]["compared"] = 3


@pytest.mark.parametrize(
    ("name", "phase", "spoil", "message"),
    [
        ("bf16", 1, more_experts, "budget 8: 1 of 20 layers and steps break the budget"),
        ("ep2_rank", 1, more_experts, "budget 3: 1 of 20 layers and steps break the budget"),
        ("bf16", 1, changed_prefill, "budget 8: 1 prefill rows were changed"),
        ("bf16", 0, other_token, "budget 32: request 0 has another token than the baseline, first at 0"),
        ("bf16", 0, changed_prefill, "budget 32: rows ran other experts than the native ones"),
        ("bf16", 2, other_token, "switched off: request 0 has another token"),
        ("bf16", 2, miscounted, "switched off: these counters moved: {'fetched'"),
        ("tp2", 1, miscounted, "rank 1 counted"),
        ("ep2", 1, miscounted_rank, "rank 1 counted"),
        ("bf16", 1, other_path, "the path is 'torch (cuda)'"),
        ("ep2_rank", 1, other_path, "the path is 'torch (cuda)'"),
        ("ep2", 1, apart, "ranks run different experts"),
        ("ep2_rank", 2, never_compared, "ranks compared"),
    ],
)
def test_wrong_engine_is_reported(
    script: Any, name: str, phase: int, spoil: Callable[[Answer], None], message: str
) -> None:
    answers = sound(script, name)
    spoil(answers["capped"]["phases"][phase])
    assert any(message in wrong for wrong in script.judge(script.CASES[name], "graph", answers, True))


@pytest.mark.parametrize(("engine", "phase"), [("baseline", 1), ("twin", 0)])
def test_tokens_are_compared_only_with_a_baseline_that_repeats_itself(script: Any, engine: str, phase: int) -> None:
    case, answers = script.CASES["bf16"], sound(script, "bf16")
    other_token(answers["capped"]["phases"][0])
    assert len(script.judge(case, "graph", answers, True)) == 1
    other_token(answers[engine]["phases"][phase])
    assert script.judge(case, "graph", answers, True) == []
    fields = script.facts(case, answers)
    assert (fields["same_with_plugin"], fields["same_asked_twice"] + fields["same_in_a_twin"]) == (8, 17)
    changed_prefill(answers["capped"]["phases"][0])
    [wrong] = script.judge(case, "graph", answers, True)
    assert wrong == "budget 32: rows ran other experts than the native ones"


def test_every_case_has_a_policy_with_a_budget(script: Any) -> None:
    for case in script.CASES.values():
        assert parse(case.policy).budget


def test_engine_that_does_not_start_or_captures_nothing_is_reported(script: Any) -> None:
    answers, case = sound(script, "bf16"), script.CASES["bf16"]
    for name in answers:
        failed = {**answers, name: {"error": "no memory", "log": ""}}
        assert script.judge(case, "graph", failed, True) == [f"the {name} engine did not run: no memory"]
        assert script.facts(case, failed) == {}
    log = answers["capped"]["log"]
    answers["capped"]["log"] = log.replace("FULL", "PIECEWISE")
    assert script.judge(case, "graph", answers, True) == ["the log does not say that full CUDA graphs were captured"]
    del answers["twin"]
    assert script.judge(case, "eager", answers, True) == []


def test_cases_of_two_gpus_are_compared_with_one_gpu_of_the_same_model(script: Any) -> None:
    single_of = {name: script.one_gpu(case) for name, case in script.CASES.items() if case.gpus > 1}
    for name, single_name in single_of.items():
        single, several = script.CASES[single_name], script.CASES[name]
        assert (single.checkpoint, single.engine.get("dtype")) == (several.checkpoint, several.engine.get("dtype"))
        assert single.gpus == 1
    assert (single_of["ep2_rank"], single_of["ep2_copies"]) == ("bf16", "float32")
