"""vLLM itself, on the CPU: tokens, and experts as vLLM's own observer sees them, of four kinds of routers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.vllm.checkpoints import BALANCE, EXPERTS, LAYERS, TOP_K
from tests.integrations.vllm.conftest import Drive

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
MODELS = ("qwen3", "qwen2", "deepseek", "glm4")
LISTED = [2, 4, 6]
# At most six run at once, so that the last prompts are read while others decode; and in steps of 64 tokens, in pieces.
PROMPTS = [[(7 * i + j * j) % 250 + 3 for j in range(5 + 5 * i)] for i in range(8)]
REQUESTS = [{"prompt": prompt, "tokens": 12 + i} for i, prompt in enumerate(PROMPTS)]
OPTING_OUT = [{**r, "extra_args": {"moebudget": False}} if i == 2 else r for i, r in enumerate(REQUESTS)]
REPEATING = [{"prompt": [5, 6, 7, 8] * (2 + i), "tokens": 24} for i in range(6)]
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

over_models = pytest.mark.parametrize("model", MODELS)


def job(model: Path, config: dict[str, Any] | None, phases: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    extra = {} if config is None else {"additional_config": {"moebudget": config}}
    return {"engine": {"model": str(model), **extra, **engine}, "phases": phases, "record": True}


@pytest.fixture(scope="module")
def dense(checkpoints: Path, drive: Drive) -> dict[str, Any]:
    """Without the plugin: the kill switch is set, so that not even a hook is installed."""
    jobs = [job(checkpoints / model, None, [{"requests": REQUESTS}]) for model in MODELS]
    answers = drive(jobs, env={"MOEBUDGET_DISABLE": "1"})
    return {model: answer["phases"][0] for model, answer in zip(MODELS, answers, strict=True)}


@pytest.fixture(scope="module")
def capped(checkpoints: Path, drive: Drive) -> dict[str, Any]:
    """One engine a model and one that speculates; the phases by name."""
    first = {"everything": {"requests": REQUESTS}, "six": {"set": {"budget": 6}, "requests": REQUESTS}}
    more = {
        "list": {"set": {"budget": LISTED}, "requests": REQUESTS},
        "off": {"set": {"enabled": False}, "requests": REQUESTS},
        "opted": {"set": {"enabled": True, "budget": 3}, "requests": OPTING_OUT},
        "short": {"set": {"budget": [3, 4]}, "requests": []},
        "zero": {"set": {"budget": 0}, "requests": []},
    }
    plans = {model: {**first, **(more if model == "qwen3" else {})} for model in MODELS}
    config = {"policy": f"squared:budget={EXPERTS}"}
    jobs = [job(checkpoints / model, config, list(plan.values())) for model, plan in plans.items()]
    plans["ngram"] = {"six": {"requests": REPEATING}}
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
    """(step, layer) -> (request, ids) of its decode rows: those at or behind the end of their prompt."""
    found = defaultdict(list)
    for step, layer, request, position, ids in phase["rows"]:
        if position >= len(requests[request]["prompt"]):
            found[step, layer].append((request, ids))
    return found


def most_fetched(phase: dict[str, Any], requests: list[dict[str, Any]], layer: int | None = None) -> int:
    steps = decoded(phase, requests)
    unions = [len(set().union(*(ids for _, ids in rows))) for (_, la), rows in steps.items() if layer in (None, la)]
    return max(unions)


def unions(phase: dict[str, Any]) -> list[set[int]]:
    """The experts of the decode rows of every step and layer."""
    return [set().union(*(ids for _, ids in rows)) for rows in decoded(phase, REQUESTS).values()]


def loads_of(unions: list[set[int]], count: int) -> list[list[int]]:
    """How many of each union lie on each of two ranks, which hold neighbours of `count` in equal blocks."""
    return [[sum(one // (count // 2) == rank for one in union) for rank in range(2)] for union in unions]


def check_counted(phase: dict[str, Any], loads: list[list[int]]) -> None:
    """Both ranks have counted these loads, and have compared their choices."""
    for before, after in zip(phase["before"], phase["states"], strict=True):
        then, now = before["expert_parallel"], after["expert_parallel"]
        assert now["ranks"] == 2
        counted = [b - a for a, b in zip(then["fetched"], now["fetched"], strict=True)]
        assert counted == [sum(column) for column in zip(*loads, strict=True)]
        assert now["fetched_most"] - then["fetched_most"] == sum(map(max, loads))
        assert after["debug"]["different"] == 0


@over_models
def test_budget_of_all_experts_changes_a_token(model: str, dense: dict[str, Any], capped: dict[str, Any]) -> None:
    assert capped[model]["everything"]["tokens"] == dense[model]["tokens"]
    assert capped[model]["everything"]["rows"] == dense[model]["rows"]


@over_models
def test_decode_step_fetches_more_than_the_budget(model: str, dense: dict[str, Any], capped: dict[str, Any]) -> None:
    assert most_fetched(dense[model], REQUESTS) > 6
    assert most_fetched(capped[model]["six"], REQUESTS) == 6


@over_models
def test_prefill_row_of_a_mixed_step_is_changed(model: str, dense: dict[str, Any], capped: dict[str, Any]) -> None:
    expected, found = by_row(dense[model]), by_row(capped[model]["six"])
    prefill = [key for key in expected if key[1] < len(PROMPTS[key[0]])]
    assert {key: found[key] for key in prefill} == {key: expected[key] for key in prefill}
    steps = defaultdict(set)
    for step, _, request, position, _ in capped[model]["six"]["rows"]:
        steps[step].add(position >= len(PROMPTS[request]))
    assert sum(len(kinds) == 2 for kinds in steps.values()) >= 2


@over_models
def test_counters_disagree_with_the_observer(model: str, capped: dict[str, Any]) -> None:
    phase = capped[model]["six"]
    steps = decoded(phase, REQUESTS)
    [before], [after] = phase["before"], phase["states"]
    change = {name: after["counters"][name] - before["counters"][name] for name in ("steps", "rows", "fetched")}
    unions = sum(len(set().union(*(ids for _, ids in rows))) for rows in steps.values())
    assert change == {"steps": len(steps), "rows": sum(map(len, steps.values())), "fetched": unions}


def test_list_of_budgets_is_not_kept_a_layer(capped: dict[str, Any]) -> None:
    phase = capped["qwen3"]["list"]
    assert [most_fetched(phase, REQUESTS, layer) for layer in range(LAYERS)] == LISTED
    assert phase["states"][0]["budgets"] == LISTED


def test_switching_off_leaves_a_trace(dense: dict[str, Any], capped: dict[str, Any]) -> None:
    phase = capped["qwen3"]["off"]
    assert phase["tokens"] == dense["qwen3"]["tokens"]
    assert phase["rows"] == dense["qwen3"]["rows"]
    assert phase["states"][0]["counters"] == phase["before"][0]["counters"]


def test_request_that_opts_out_is_capped(dense: dict[str, Any], capped: dict[str, Any]) -> None:
    phase = capped["qwen3"]["opted"]
    expected, found = by_row(dense["qwen3"]), by_row(phase)
    own = [key for key in expected if key[0] == 2]
    assert {key: found[key] for key in own} == {key: expected[key] for key in own}
    assert phase["tokens"][2] == dense["qwen3"]["tokens"][2]
    steps = decoded(phase, REQUESTS).values()
    unions = [len(set().union(*(ids for request, ids in rows if request != 2), [])) for rows in steps]
    assert max(unions) == 3


def test_wrong_budget_over_rpc_is_taken(capped: dict[str, Any]) -> None:
    short, zero = capped["qwen3"]["short"], capped["qwen3"]["zero"]
    assert "2 budgets were given and the model has 3 Mixture-of-Experts layers" in short["error"]
    assert "budget=0 must be a whole number of at least 1" in zero["error"]
    assert short["states"][0]["budgets"] == zero["states"][0]["budgets"] == [3, 3, 3]


def test_rows_of_draft_tokens_escape_the_budget(capped: dict[str, Any]) -> None:
    phase = capped["ngram"]["six"]
    assert phase["states"][0]["policy"] == "base:budget=6"  # the statistics' facts and router hash agreed, too
    steps = decoded(phase, REPEATING)
    several = [rows for rows in steps.values() if len({request for request, _ in rows}) < len(rows)]
    assert len(several) > 10
    assert most_fetched(phase, REPEATING) == 6
    assert all(len(set(ids)) == TOP_K for rows in steps.values() for _, ids in rows)


def test_second_model_runner_is_capped_in_another_way(checkpoints: Path, drive: Drive) -> None:
    phases = [{"requests": REQUESTS}, {"set": {"budget": 6}, "requests": OPTING_OUT}]
    config = {"policy": f"squared:budget={EXPERTS}"}
    jobs = [job(checkpoints / "qwen3", wanted, plan) for wanted, plan in ((None, phases[:1]), (config, phases))]
    plain, answer = drive(jobs, env={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    [unchanged], (everything, six) = plain["phases"], answer["phases"]
    assert everything["tokens"] == unchanged["tokens"]
    assert everything["rows"] == unchanged["rows"]
    expected, found = by_row(unchanged), by_row(six)
    kept = [key for key in expected if key[1] < len(PROMPTS[key[0]]) or key[0] == 2]
    assert {key: found[key] for key in kept} == {key: expected[key] for key in kept}
    steps = decoded(six, REQUESTS).values()
    assert max(len(set().union(*(ids for request, ids in rows if request != 2), [])) for rows in steps) == 6
    [before], [after] = six["before"], six["states"]
    votes = sum(request != 2 for rows in steps for request, _ in rows)
    assert after["counters"]["rows"] - before["counters"]["rows"] == votes


def test_compiled_model_ignores_the_budget(checkpoints: Path, drive: Drive) -> None:
    requests = {"requests": REQUESTS}
    phases = [requests, {"set": {"budget": 4}, **requests}, {"set": {"budget": EXPERTS}, **requests}]
    config = {"policy": f"squared:budget={EXPERTS}"}
    jobs = [
        {**job(checkpoints / "one", wanted, plan, enforce_eager=False), "record": False}
        for wanted, plan in ((None, [requests]), (config, phases))
    ]
    plain, compiled = drive(jobs)
    first, four, last = compiled["phases"]
    assert first["tokens"] == last["tokens"] == plain["phases"][0]["tokens"]
    assert four["tokens"] != first["tokens"]
    [before], [after] = four["before"], four["states"]
    steps, fetched, native = (
        after["counters"][name] - before["counters"][name] for name in ("steps", "fetched", "native_union")
    )
    assert steps > 0
    assert fetched <= 4 * steps < native


def test_ranks_choose_different_experts(checkpoints: Path, drive: Drive) -> None:
    requests = {"requests": REQUESTS}
    phases = [{"set": {"budget": 5}, **requests}, {"set": {"budget": [3, 4, 5]}, **requests}]
    config = {"policy": "base:budget=16", "stats": str(checkpoints / "stats.safetensors"), "debug": True}
    parallel = job(checkpoints / "qwen3", config, [*phases, {"spoil": [1, 2], **requests}], tensor_parallel_size=2)
    [answer] = drive([parallel], env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert "error" not in answer, answer
    *sound, spoilt = answer["phases"]
    for phase, most in zip(sound, (5, 5), strict=True):
        one, other = phase["states"]
        assert phase["ranks_run_alike"]
        assert most_fetched(phase, REQUESTS) == most
        assert one["per_layer"] == other["per_layer"]
        assert one["budgets"] == other["budgets"]
        assert one["counters"]["steps"] > 0
        assert one["debug"]["different"] == 0
        assert one["debug"]["compared"] >= one["counters"]["steps"]
        assert one["expert_parallel"] is None
    assert "ranks chose different experts in " in spoilt["error"]


def test_rank_fetches_more_than_its_share_or_is_charged_for_others(checkpoints: Path, drive: Drive) -> None:
    """Expert parallelism over two ranks: neighbouring experts in equal blocks, a budget for each rank."""
    requests = {"requests": REQUESTS}
    config = {"policy": "base_ep:budget=16", "stats": str(checkpoints / "stats.safetensors"), "debug": True}
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    plan = [requests, {"set": {"budget": 3}, **requests}]
    [answer] = drive([job(checkpoints / "qwen3", config, plan, **engine)], env={"VLLM_CPU_OMP_THREADS_BIND": "nobind"})
    assert "error" not in answer, answer
    everything, three = answer["phases"]
    assert everything["own"] == [row[-1] for row in everything["rows"]]
    loads = loads_of(unions(three), EXPERTS)
    assert [max(column) for column in zip(*loads, strict=True)] == [3, 3]
    check_counted(three, loads)


def test_rank_with_nothing_to_run_stops_the_engine_or_spoils_what_follows(checkpoints: Path, drive: Drive) -> None:
    """One expert a step over two ranks: one of them has none."""
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
    check_counted(one, loads)


def test_copies_of_experts_are_not_counted_or_choose_for_themselves(checkpoints: Path, drive: Drive) -> None:
    """Expert load balancing: 16 experts in 18 copies on two ranks, which vLLM deals out anew every few steps."""
    engine = {"tensor_parallel_size": 2, "enable_expert_parallel": True, **BALANCE}
    config = {"policy": "base:budget=16", "stats": str(checkpoints / "stats.safetensors"), "debug": True}
    requests, env = {"requests": REQUESTS}, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    plan = [requests, {"set": {"budget": 3}, **requests}]
    [plain] = drive([job(checkpoints / "qwen3", None, [requests], **engine)], env={**env, "MOEBUDGET_DISABLE": "1"})
    [answer] = drive([job(checkpoints / "qwen3", config, plan, **engine)], env=env)
    assert "error" not in answer, answer
    [without], (everything, three) = plain["phases"], answer["phases"]
    for name in ("tokens", "rows", "copies"):
        assert everything[name] == without[name]
    assert everything["own"] == [row[-1] for row in everything["rows"]]
    assert any(
        {c % EXPERTS for c in copies} != set(row[-1])
        for row, copies in zip(three["rows"], three["copies"], strict=True)
    )
    copies = [(*row[:4], ids) for row, ids in zip(three["rows"], three["copies"], strict=True)]
    ran = unions({"rows": copies})
    assert max(map(len, unions(three))) == 3
    assert max(map(len, ran)) > 3
    check_counted(three, loads_of(ran, EXPERTS + 2))
    assert [state["experts"] for state in three["states"]] == [EXPERTS, EXPERTS]


def test_wrong_setting_reaches_serving(checkpoints: Path, drive: Drive) -> None:
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
        "k_max=6 exceeds the 4 experts a token": ("qwen3", {"policy": "oea:k0=1,k_max=6"}),
        "here every expert lies on one": ("qwen3", {"policy": "xshare_ep:k0=1,m_device=2"}),
    }
    jobs = [job(checkpoints / model, config, [{"requests": []}]) for model, config in wrong.values()]
    answers = drive(jobs)
    assert {text: text in answer.get("error", "started") for text, answer in zip(wrong, answers, strict=True)} == (
        dict.fromkeys(wrong, True)
    )
