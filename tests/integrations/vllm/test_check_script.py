"""scripts/check_vllm.py finds what is wrong in made-up answers of engines, and nothing in sound ones."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebudget.presets import parse

SCRIPT = Path(__file__).parents[3] / "scripts" / "check_vllm.py"
Answer = dict[str, Any]


@pytest.fixture(scope="module")
def script() -> Any:
    path = list(sys.path)
    spec = spec_from_file_location("check_vllm", SCRIPT)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules["check_vllm"] = module  # dataclasses look for it
    assert spec.loader is not None
    spec.loader.exec_module(module)
    sys.path[:] = path
    yield module
    del sys.modules["check_vllm"]


def made_phase(script: Any, case: Any, capped: bool) -> Answer:
    """Ten steps of two layers and five requests, the last of them reading its prompt."""
    rng = np.random.default_rng(0)
    rows, own, counts = [], [], dict.fromkeys(("steps", "rows", "fetched", "native_union"), 0)
    ranks = np.zeros(3)
    for step in range(10):
        for layer in range(2):
            ids = [sorted(rng.permutation(script.EXPERTS)[:4].tolist()) for _ in range(5)]
            union = sorted({u for some in ids[:4] for u in some})
            kept = union
            if capped and case.counts == "rank":
                kept = [*[u for u in union if u < 16][: case.budget], *[u for u in union if u >= 16][: case.budget]]
            elif capped:
                kept = union[: case.budget]
            for request, some in enumerate(ids):
                run = some if request == 4 or set(some) <= set(kept) else kept[:]
                position = len(script.PROMPTS[request]) - 10 + step if request == 4 else 100 + step
                rows.append([step, layer, request, position, run])
                own.append(some)
            counts["steps"] += 1
            counts["rows"] += 4
            counts["fetched"] += len(kept)
            counts["native_union"] += len(union)
            ranks += [*script.loads(set(kept)), max(script.loads(set(kept)))]
    zero = {"counters": dict.fromkeys(counts, 0), "per_layer": [], "path": "kernel", "debug": None}
    zero["expert_parallel"] = {"fetched": [0, 0], "fetched_most": 0}
    state = {**zero, "counters": counts, "expert_parallel": {"fetched": list(ranks[:2]), "fetched_most": ranks[2]}}
    if case.debug:
        state["debug"] = {"compared": counts["steps"], "different": 0}
    return {
        "tokens": [[1]] * len(script.PROMPTS), "rows": rows, "own": own, "ranks_run_alike": True,
        "before": [copy.deepcopy(zero) for _ in range(case.gpus)],
        "states": [copy.deepcopy(state) for _ in range(case.gpus)],
    }  # fmt: skip


def sound(script: Any, name: str) -> tuple[Answer, Answer]:
    case = script.CASES[name]
    dense, off = made_phase(script, case, False), made_phase(script, case, False)
    off["before"] = copy.deepcopy(off["states"])
    capped = made_phase(script, case, True)
    for state in capped["states"]:
        state["path"] = "kernel"
    method = "Fp8OnlineMoEMethod" if name == "fp8" else "UnquantizedFusedMoEMethod"
    log = f"x; kernel path, experts by {method}, 1 bytes\nCapturing CUDA graphs (decode, FULL): 100%"
    return {"phases": [made_phase(script, case, False)], "log": ""}, {"phases": [dense, capped, off], "log": log}


CASES = ("bf16", "fp8", "tp2", "ep2", "ep2_rank")


@pytest.mark.parametrize("name", CASES)
def test_sound_engine_is_wrong(script: Any, name: str) -> None:
    assert script.judge(script.CASES[name], "graph", *sound(script, name), True) == []


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
    ("name", "where", "spoil", "says"),
    [
        ("bf16", 1, more_experts, "budget 8: 1 of 20 layers and steps run other numbers"),
        ("ep2_rank", 1, more_experts, "budget 3: 1 of 20 layers and steps run other numbers"),
        ("bf16", 1, changed_prefill, "budget 8: 1 prefill rows were changed"),
        ("bf16", 0, other_token, "budget 32: 1 of 9 requests have other tokens"),
        ("bf16", 0, changed_prefill, "budget 32: rows ran other experts than the router returned"),
        ("bf16", 2, other_token, "switched off: 1 of 9 requests have other tokens"),
        ("bf16", 2, miscounted, "switched off: these were counted on: {'fetched'"),
        ("tp2", 1, miscounted, "rank 1 counted"),
        ("ep2", 1, miscounted_rank, "rank 1 counted"),
        ("bf16", 1, other_path, "the path is 'torch (cuda)'"),
        ("ep2_rank", 1, other_path, "the path is 'torch (cuda)'"),
        ("ep2", 1, apart, "ranks run different experts"),
        ("ep2_rank", 2, never_compared, "ranks compared"),
    ],
)
def test_wrong_engine_passes(script: Any, name: str, where: int, spoil: Callable[[Answer], None], says: str) -> None:
    plain, capped = sound(script, name)
    spoil(capped["phases"][where])
    assert any(says in wrong for wrong in script.judge(script.CASES[name], "graph", plain, capped, True))


def test_a_case_has_settings_that_an_engine_refuses(script: Any) -> None:
    for case in script.CASES.values():
        assert parse(case.policy).budget


def test_engine_that_did_not_start_or_captured_nothing_passes(script: Any) -> None:
    plain, capped = sound(script, "bf16")
    case = script.CASES["bf16"]
    assert script.judge(case, "graph", plain, {"error": "no memory", "log": ""}, True) == [
        "the engine with the plugin did not run: no memory"
    ]
    capped["log"] = capped["log"].replace("FULL", "PIECEWISE")
    assert script.judge(case, "graph", plain, capped, True) == [
        "the log does not say that full CUDA graphs were captured"
    ]
    assert script.judge(case, "eager", plain, capped, True) == []
