"""Decode steps of vLLM itself, on the CPU: tokens and recorded experts, for four kinds of routers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.engines.vllm.checkpoints import BALANCE, EXPERTS, LAYERS, TOP_K
from tests.engines.vllm.conftest import Drive

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
MODELS = ("qwen3", "qwen2", "deepseek", "glm4")
BUDGETS = [2, 4, 6]
# At most six requests run at once, so the last prompts are read while others decode; steps of 64 tokens split prompts.
PROMPTS = [[(7 * i + j * j) % 250 + 3 for j in range(5 + 5 * i)] for i in range(8)]
REQUESTS = [{"prompt": prompt, "tokens": 12 + i} for i, prompt in enumerate(PROMPTS)]
ONE_OPTS_OUT = [{**r, "extra_args": {"moebudget": False}} if i == 2 else r for i, r in enumerate(REQUESTS)]
REPETITIVE = [{"prompt": [5, 6, 7, 8] * (2 + i), "tokens": 24} for i in range(6)]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

over_models = pytest.mark.parametrize("model", MODELS)


def job(model: Path, config: dict[str, Any] | None, phases: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    extra = {} if config is None else {"additional_config": {"moebudget": config}}
    return {"engine": {"model": str(model), **extra, **engine}, "phases": phases, "record": True}


@pytest.fixture(scope="module")
def baseline(checkpoints: Path, drive: Drive) -> dict[str, Any]:
    """One phase per model without the plugin: the kill switch is set, so not even a hook is installed."""
    jobs = [job(checkpoints / model, None, [{"requests": REQUESTS}]) for model in MODELS]
    answers = drive(jobs, env={"MOEBUDGET_DISABLE": "1"})
    return {model: answer["phases"][0] for model, answer in zip(MODELS, answers, strict=True)}


@pytest.fixture(scope="module")
def capped(checkpoints: Path, drive: Drive) -> dict[str, Any]:
    """One engine per model and one with speculative decoding; the phases by name."""
    first = {"everything": {"requests": REQUESTS}, "six": {"set": {"budget": 6}, "requests": REQUESTS}}
    qwen3_phases = {
        "list": {"set": {"budget": BUDGETS}, "requests": REQUESTS},
        "off": {"set": {"enabled": False}, "requests": REQUESTS},
        "opted": {"set": {"enabled": True, "budget": 3}, "requests": ONE_OPTS_OUT},
        "short": {"set": {"budget": [3, 4]}, "requests": []},
        "zero": {"set": {"budget": 0}, "requests": []},
    }
    plans = {model: {**first, **(qwen3_phases if model == "qwen3" else {})} for model in MODELS}
    config = {"policy": f"squared:budget={EXPERTS}"}
    jobs = [job(checkpoints / model, config, list(plan.values())) for model, plan in plans.items()]
    plans["ngram"] = {"six": {"requests": REPETITIVE}}
    stats = {"policy": "base:budget=6", "stats": str(checkpoints / "stats.safetensors")}
    jobs.append(job(checkpoints / "qwen3", stats, list(plans["ngram"].values()), speculative_config=SPECULATIVE))
    answers = drive(jobs)
    assert not [answer["error"] for answer in answers if "error" in answer]
    return {
        name: dict(zip(plan, answer["phases"], strict=True))
        for (name, plan), answer in zip(plans.items(), answers, strict=True)
    }


def by_row(phase: dict[str, Any]) -> dict[tuple[int, int, int], list[int]]:
    """(request, position, layer) -> ids."""
    return {(request, position, layer): ids for _, layer, request, position, ids in phase["rows"]}


def decoded(phase: dict[str, Any], requests: list[dict[str, Any]]) -> dict[tuple[int, int], list[Any]]:
    """(step, layer) -> (request, ids) of its decode rows: those at or past the end of their prompt."""
    rows = defaultdict(list)
    for step, layer, request, position, ids in phase["rows"]:
        if position >= len(requests[request]["prompt"]):
            rows[step, layer].append((request, ids))
    return rows


def most_fetched(phase: dict[str, Any], requests: list[dict[str, Any]], layer: int | None = None) -> int:
    """Most experts fetched by the decode rows of any step, in one layer or in all."""
    steps = decoded(phase, requests)
    unions = [len(set().union(*(ids for _, ids in rows))) for (_, la), rows in steps.items() if layer in (None, la)]
    return max(unions)


def unions(phase: dict[str, Any]) -> list[set[int]]:
    """Experts fetched by the decode rows of every step and layer."""
    return [set().union(*(ids for _, ids in rows)) for rows in decoded(phase, REQUESTS).values()]


def loads_of(unions: list[set[int]], count: int) -> list[list[int]]:
    """Sizes of each union's parts on two ranks that hold `count` experts or copies in equal blocks."""
    return [[sum(expert // (count // 2) == rank for expert in union) for rank in range(2)] for union in unions]


def check_rank_counters(phase: dict[str, Any], loads: list[list[int]]) -> None:
    """Assert that both ranks have counted these loads and made the same choices."""
    for before, after in zip(phase["before"], phase["states"], strict=True):
        before_ranks, after_ranks = before["expert_parallel"], after["expert_parallel"]
        assert after_ranks["ranks"] == 2
        counted = [b - a for a, b in zip(before_ranks["fetched"], after_ranks["fetched"], strict=True)]
        assert counted == [sum(column) for column in zip(*loads, strict=True)]
        assert after_ranks["fetched_most"] - before_ranks["fetched_most"] == sum(map(max, loads))
        assert after["debug"]["different"] == 0


@over_models
def test_budget_of_all_experts_keeps_tokens_and_routes(
    model: str, baseline: dict[str, Any], capped: dict[str, Any]
) -> None:
    assert capped[model]["everything"]["tokens"] == baseline[model]["tokens"]
    assert capped[model]["everything"]["rows"] == baseline[model]["rows"]


@over_models
def test_decode_steps_stay_within_the_budget(model: str, baseline: dict[str, Any], capped: dict[str, Any]) -> None:
    assert most_fetched(baseline[model], REQUESTS) > 6
    assert most_fetched(capped[model]["six"], REQUESTS) == 6


@over_models
def test_prefill_rows_keep_native_routes_in_mixed_steps(
    model: str, baseline: dict[str, Any], capped: dict[str, Any]
) -> None:
    expected, ids = by_row(baseline[model]), by_row(capped[model]["six"])
    prefill = [key for key in expected if key[1] < len(PROMPTS[key[0]])]
    assert {key: ids[key] for key in prefill} == {key: expected[key] for key in prefill}
    steps = defaultdict(set)
    for step, _, request, position, _ in capped[model]["six"]["rows"]:
        steps[step].add(position >= len(PROMPTS[request]))
    assert sum(len(kinds) == 2 for kinds in steps.values()) >= 2


@over_models
def test_counters_agree_with_recorded_rows(model: str, capped: dict[str, Any]) -> None:
    phase = capped[model]["six"]
    steps = decoded(phase, REQUESTS)
    [before], [after] = phase["before"], phase["states"]
    change = {name: after["counters"][name] - before["counters"][name] for name in ("steps", "rows", "fetched")}
    unions = sum(len(set().union(*(ids for _, ids in rows))) for rows in steps.values())
    assert change == {"steps": len(steps), "rows": sum(map(len, steps.values())), "fetched": unions}


def test_list_of_budgets_holds_per_layer(capped: dict[str, Any]) -> None:
    phase = capped["qwen3"]["list"]
    assert [most_fetched(phase, REQUESTS, layer) for layer in range(LAYERS)] == BUDGETS
    assert phase["states"][0]["budgets"] == BUDGETS


def test_switching_off_restores_native_routing(baseline: dict[str, Any], capped: dict[str, Any]) -> None:
    phase = capped["qwen3"]["off"]
    assert phase["tokens"] == baseline["qwen3"]["tokens"]
    assert phase["rows"] == baseline["qwen3"]["rows"]
    assert phase["states"][0]["counters"] == phase["before"][0]["counters"]


def test_request_that_opts_out_keeps_native_routes(baseline: dict[str, Any], capped: dict[str, Any]) -> None:
    phase = capped["qwen3"]["opted"]
    expected, ids = by_row(baseline["qwen3"]), by_row(phase)
    opted_out = [key for key in expected if key[0] == 2]
    assert {key: ids[key] for key in opted_out} == {key: expected[key] for key in opted_out}
    assert phase["tokens"][2] == baseline["qwen3"]["tokens"][2]
    steps = decoded(phase, REQUESTS).values()
    unions = [len(set().union(*(ids for request, ids in rows if request != 2), [])) for rows in steps]
    assert max(unions) == 3


def test_wrong_budgets_over_rpc_are_refused(capped: dict[str, Any]) -> None:
    short, zero = capped["qwen3"]["short"], capped["qwen3"]["zero"]
    assert "2 budgets were given and the model has 3 Mixture-of-Experts layers" in short["error"]
    assert "budget=0 must be a whole number of at least 1" in zero["error"]
    assert short["states"][0]["budgets"] == zero["states"][0]["budgets"] == [3, 3, 3]


def test_draft_tokens_stay_within_the_budget(capped: dict[str, Any]) -> None:
    phase = capped["ngram"]["six"]
    assert phase["states"][0]["policy"] == "base:budget=6"  # so the statistics' facts and router hash agree
    steps = decoded(phase, REPETITIVE)
    several = [rows for rows in steps.values() if len({request for request, _ in rows}) < len(rows)]
    assert len(several) > 10
    assert most_fetched(phase, REPETITIVE) == 6
    assert all(len(set(ids)) == TOP_K for rows in steps.values() for _, ids in rows)


def test_second_model_runner_is_capped_alike(checkpoints: Path, drive: Drive) -> None:
    phases = [{"requests": REQUESTS}, {"set": {"budget": 6}, "requests": ONE_OPTS_OUT}]
    config = {"policy": f"squared:budget={EXPERTS}"}
    jobs = [job(checkpoints / "qwen3", setting, plan) for setting, plan in ((None, phases[:1]), (config, phases))]
    baseline, answer = drive(jobs, env={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    [native], (everything, six) = baseline["phases"], answer["phases"]
    assert everything["tokens"] == native["tokens"]
    assert everything["rows"] == native["rows"]
    expected, ids = by_row(native), by_row(six)
    kept = [key for key in expected if key[1] < len(PROMPTS[key[0]]) or key[0] == 2]
    assert {key: ids[key] for key in kept} == {key: expected[key] for key in kept}
    steps = decoded(six, REQUESTS).values()
    assert max(len(set().union(*(ids for request, ids in rows if request != 2), [])) for rows in steps) == 6
    [before], [after] = six["before"], six["states"]
    votes = sum(request != 2 for rows in steps for request, _ in rows)
    assert after["counters"]["rows"] - before["counters"]["rows"] == votes


def test_compiled_model_keeps_the_budget(checkpoints: Path, drive: Drive) -> None:
    requests = {"requests": REQUESTS}
    phases = [requests, {"set": {"budget": 4}, **requests}, {"set": {"budget": EXPERTS}, **requests}]
    config = {"policy": f"squared:budget={EXPERTS}"}
    jobs = [
        {**job(checkpoints / "one_layer", setting, plan, enforce_eager=False), "record": False}
        for setting, plan in ((None, [requests]), (config, phases))
    ]
    baseline, compiled = drive(jobs)
    first, four, last = compiled["phases"]
    assert first["tokens"] == last["tokens"] == baseline["phases"][0]["tokens"]
    assert four["tokens"] != first["tokens"]
    [before], [after] = four["before"], four["states"]
    steps, fetched, native = (
        after["counters"][name] - before["counters"][name] for name in ("steps", "fetched", "native_union")
    )
    assert steps > 0
    assert fetched <= 4 * steps < native


def test_ranks_choose_alike_and_a_difference_stops_the_engine(checkpoints: Path, drive: Drive) -> None:
    requests = {"requests": REQUESTS}
    phases = [{"set": {"budget": 5}, **requests}, {"set": {"budget": [3, 4, 5]}, **requests}]
    config = {"policy": "base:budget=16", "stats": str(checkpoints / "stats.safetensors"), "debug": True}
    parallel = job(checkpoints / "qwen3", config, [*phases, {"spoil": [1, 2], **requests}], tensor_parallel_size=2)
    [answer] = drive([parallel], env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert "error" not in answer, answer
    *sound, spoiled = answer["phases"]
    for phase, most in zip(sound, (5, 5), strict=True):
        first, second = phase["states"]
        assert phase["ranks_run_alike"]
        assert most_fetched(phase, REQUESTS) == most
        assert first["per_layer"] == second["per_layer"]
        assert first["budgets"] == second["budgets"]
        assert first["counters"]["steps"] > 0
        assert first["debug"]["different"] == 0
        assert first["debug"]["compared"] >= first["counters"]["steps"]
        assert first["expert_parallel"] is None
    assert "ranks chose different experts in " in spoiled["error"]


def test_budget_per_rank_holds_and_fetched_experts_are_counted_per_rank(checkpoints: Path, drive: Drive) -> None:
    """Expert parallelism over two ranks with equal blocks of neighbouring experts, and a budget per rank."""
    requests = {"requests": REQUESTS}
    config = {"policy": "base_ep:budget=16", "stats": str(checkpoints / "stats.safetensors"), "debug": True}
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    plan = [requests, {"set": {"budget": 3}, **requests}]
    [answer] = drive([job(checkpoints / "qwen3", config, plan, **engine)], env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert "error" not in answer, answer
    everything, three = answer["phases"]
    assert everything["native"] == [row[-1] for row in everything["rows"]]
    loads = loads_of(unions(three), EXPERTS)
    assert [max(column) for column in zip(*loads, strict=True)] == [3, 3]
    check_rank_counters(three, loads)


def test_engine_runs_on_when_a_rank_has_no_expert_to_run(checkpoints: Path, drive: Drive) -> None:
    """One expert per step over two ranks, so one rank has none."""
    requests = {"requests": REQUESTS}
    config = {"policy": "base:budget=16", "stats": str(checkpoints / "stats.safetensors"), "debug": True}
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    plan = [requests, {"set": {"budget": 1}, **requests}, {"set": {"budget": 16}, **requests}]
    [answer] = drive([job(checkpoints / "qwen3", config, plan, **engine)], env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert "error" not in answer, answer
    everything, one, again = answer["phases"]
    assert {len(union) for union in unions(one)} == {1}
    assert again["tokens"] == everything["tokens"]
    loads = loads_of(unions(one), EXPERTS)
    assert {tuple(load) for load in loads} == {(0, 1), (1, 0)}
    check_rank_counters(one, loads)


def test_copies_of_experts_are_counted_and_the_budget_bounds_experts(checkpoints: Path, drive: Drive) -> None:
    """Expert load balancing: 16 experts in 18 copies on two ranks, which vLLM rearranges every few steps."""
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **BALANCE}
    config = {"policy": "base:budget=16", "stats": str(checkpoints / "stats.safetensors"), "debug": True}
    requests, env = {"requests": REQUESTS}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    plan = [requests, {"set": {"budget": 3}, **requests}]
    [baseline] = drive([job(checkpoints / "qwen3", None, [requests], **engine)], env={**env, "MOEBUDGET_DISABLE": "1"})
    [answer] = drive([job(checkpoints / "qwen3", config, plan, **engine)], env=env)
    assert "error" not in answer, answer
    [native], (everything, three) = baseline["phases"], answer["phases"]
    for name in ("tokens", "rows", "copies"):
        assert everything[name] == native[name]
    assert everything["native"] == [row[-1] for row in everything["rows"]]
    assert any(
        {c % EXPERTS for c in copies} != set(row[-1])
        for row, copies in zip(three["rows"], three["copies"], strict=True)
    )
    copies = [(*row[:4], ids) for row, ids in zip(three["rows"], three["copies"], strict=True)]
    fetched_copies = unions({"rows": copies})
    assert max(map(len, unions(three))) == 3
    assert max(map(len, fetched_copies)) > 3
    check_rank_counters(three, loads_of(fetched_copies, EXPERTS + 2))
    assert [state["experts"] for state in three["states"]] == [EXPERTS, EXPERTS]


def test_wrong_settings_stop_the_start(checkpoints: Path, drive: Drive) -> None:
    stats = str(checkpoints / "stats.safetensors")
    wrong = {
        "0 layers of this model go through": ("dense", {"policy": "squared:budget=4"}),
        "statistics are of another model: family is 'qwen3_moe'": (
            "qwen2",
            {"policy": "base:budget=4", "stats": stats},
        ),
        "2 budgets were given and the model has 3": ("qwen3", {"policy": "squared:budget=4", "budgets": [4, 4]}),
        "unknown key 'bugdets'": ("qwen3", {"policy": "squared:budget=4", "bugdets": [4]}),
        "and `stats` is missing": ("qwen3", {"policy": "base:budget=4"}),
        "k_max=6 exceeds the 4 experts per token": ("qwen3", {"policy": "oea:k0=1,k_max=6"}),
        "here one device holds them all": ("qwen3", {"policy": "xshare_ep:k0=1,m_device=2"}),
    }
    jobs = [job(checkpoints / model, config, [{"requests": []}]) for model, config in wrong.values()]
    answers = drive(jobs)
    assert {text: text in answer.get("error", "started") for text, answer in zip(wrong, answers, strict=True)} == (
        dict.fromkeys(wrong, True)
    )
