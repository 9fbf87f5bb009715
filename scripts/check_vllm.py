#!/usr/bin/env python3
"""Prove on a machine with vLLM that the plugin caps what is executed: bf16, fp8, LoRA, ranks; CUDA graphs and eager.

python scripts/check_vllm.py --workers 8
python scripts/check_vllm.py --case ep2 --mode graph

A case and mode is two engines with one checkpoint (a tiny random one, the embedded model, or four random layers of
Qwen3-30B-A3B's sizes), one of them with the plugin kept out, and in graphs a twin of that one, which says how far two
equal engines decode alike at all. Every row that their kernels run is recorded on the device and compared; nothing is
timed. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
from tests.integrations.vllm.checkpoints import BALANCE, DEMO, QWEN3, RANK, WIDE, write_wide, write_with_stats

from moebudget import provenance

BUDGET = 8
# At most six run at once, so that the last prompts are read while others decode; and in steps of 64 tokens, in pieces.
PROMPTS = [[(7 * i + j * j) % 500 + 3 for j in range(5 + 5 * i)] for i in range(9)]
TOKENS = [12 + i for i in range(9)]
MODES = ("graph", "eager")
Phase = dict[str, Any]
RUNNING: set[int] = set()  # process groups of engines


@dataclass(frozen=True, slots=True)
class Case:
    """What the two engines of a case are started with. `rule` may have a budget a rank ("rank") or level ranks."""

    engine: dict[str, Any] = field(default_factory=dict)
    rule: str = "base:budget={all}"
    budget: int = BUDGET
    counts: str = "all"  # what the budget bounds: experts of "all" ranks, of each "rank", or of all before "level"
    debug: bool = False
    experts_by: str = r"\w+"  # what the plugin's log must call the experts' method, a pattern
    gpus: int = 1
    adapter: bool = False
    checkpoint: str = "wide"
    on_cpu: bool = True  # vLLM's CPU build can run it

    @property
    def sizes(self) -> dict[str, Any]:
        return CHECKPOINTS[self.checkpoint]

    @property
    def experts(self) -> int:
        return int(self.sizes["num_experts"])

    @property
    def copies(self) -> int:
        """The experts' copies, vLLM's physical experts."""
        return self.experts + int(self.engine.get("eplb_config", {}).get("num_redundant_experts", 0))

    @property
    def policy(self) -> str:
        """With a budget that leaves nothing out."""
        return self.rule.format(all=self.experts)


CHECKPOINTS: dict[str, dict[str, Any]] = {"wide": WIDE, "demo": DEMO, "qwen3": QWEN3}
FLOAT32 = {"dtype": "float32"}
TP = {"tensor_parallel_size": 2}
EP = {**TP, "enable_expert_parallel": True}
CASES = {
    "bf16": Case(),
    # One scale for all rows of a step, padding included; the same without padding; and a scale for every row.
    "fp8": Case({"quantization": "fp8"}, experts_by="Fp8.*", on_cpu=False),
    "fp8_every_size": Case(
        {"quantization": "fp8", "compilation_config": {"cudagraph_capture_sizes": [1, 2, 3, 4, 5, 6]}},
        experts_by="Fp8.*",
        on_cpu=False,
    ),
    "fp8_channel": Case({"quantization": "fp8_per_channel"}, experts_by="Fp8.*", on_cpu=False),
    "lora": Case({"enable_lora": True, "max_lora_rank": RANK}, adapter=True, on_cpu=False),
    "returned": Case({"enable_return_routed_experts": True}, on_cpu=False),
    "tp2": Case(TP, debug=True, gpus=2),
    "ep2": Case(EP, gpus=2),
    "ep2_rank": Case(EP, "base_ep:budget={all}", 3, "rank", debug=True, gpus=2),
    "ep2_level": Case(EP, "base:budget={all},level=yes", BUDGET, "level", debug=True, gpus=2),
    "ep2_copies": Case({**EP, **BALANCE, **FLOAT32}, debug=True, gpus=2),
}
for checkpoint, budget in (("wide", BUDGET), ("demo", 12), ("qwen3", 16)):
    for kind, more in (("", {}), ("tp2_", TP), ("ep2_", EP)):
        name = f"{'' if checkpoint == 'wide' else f'{checkpoint}_'}{kind}float32"
        ranks, on_cpu = 2 if more else 1, checkpoint != "qwen3"
        CASES[name] = Case({**more, **FLOAT32}, budget=budget, gpus=ranks, checkpoint=checkpoint, on_cpu=on_cpu)


def requests(adapter: Path | None) -> list[dict[str, Any]]:
    """Every second one with the adapter, if there is one."""
    return [
        {"prompt": prompt, "tokens": tokens, **({"adapter": str(adapter)} if adapter and i % 2 else {})}
        for i, (prompt, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True))
    ]


def plan(case: Case, mode: str, folder: Path, gpu: bool) -> dict[str, dict[str, Any]]:
    """Jobs (drive.py): the engine without the plugin, its twin if they are compiled, and the capped one."""
    asked = requests(folder / "adapter" if case.adapter else None)
    memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28} if gpu else {}
    engine = {"model": str(folder / case.checkpoint), "enforce_eager": mode == "eager", **memory, **case.engine}
    config = {"policy": case.policy, "stats": str(folder / f"{case.checkpoint}.safetensors"), "debug": case.debug}
    plain = [{"requests": asked}, *([{"requests": requests(None)}] if case.adapter else []), {"requests": asked}]
    capped = [{"requests": asked}, {"set": {"budget": case.budget}, "requests": asked}]
    capped.append({"set": {"enabled": False}, "requests": asked})
    return {
        "plain": {"engine": engine, "phases": plain, "record": True},
        **({"twin": {"engine": engine, "phases": plain[:1], "record": True}} if mode == "graph" else {}),
        "capped": {
            "engine": {**engine, "additional_config": {"moebudget": config}}, "phases": capped, "record": True,
        },
    }  # fmt: skip


def start(name: str, job: dict[str, Any], folder: Path, env: dict[str, str], limit: int) -> dict[str, Any]:
    """One engine in a process group of its own -> its answer with the log, or {"error": why, "log": ...}."""
    asked, answered, log = (folder / f"{name}.{end}" for end in ("jobs.json", "answers.json", "log"))
    asked.write_text(json.dumps([job]))
    command = [sys.executable, "-m", "tests.integrations.vllm.drive", str(asked), str(answered)]
    own = {
        **os.environ, "PYTHONPATH": os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # requests arrive in one order, so that two engines make equal steps
        "TORCHINDUCTOR_DETERMINISTIC": "1",  # nor may what was faster on a busy GPU decide in which order they add
        "VLLM_CACHE_ROOT": str(folder / f"{name}.cache"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **env,
    }  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=own, stdout=out, stderr=out, start_new_session=True)
        RUNNING.add(process.pid)
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
        with contextlib.suppress(ProcessLookupError):  # nothing is left of its group
            os.killpg(process.pid, signal.SIGKILL)  # its workers, too
        RUNNING.discard(process.pid)
    text = log.read_text(errors="replace")
    if code != 0 or not answered.is_file():
        return {"error": f"exit code {code}", "log": text}
    [answer] = json.loads(answered.read_text())
    return {**answer, "log": text}


def stop(number: int, _: object) -> None:
    """Leave no engine behind when this script is stopped."""
    for group in list(RUNNING):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(group, signal.SIGKILL)
    os._exit(128 + number)


def unions(phase: Phase, which: str) -> dict[tuple[int, int], set[int]]:
    """(step, layer) -> experts of its decode rows: "run" is what was executed, "own" what the router returned.

    "copies" are those of EPLB, of the experts that were executed; without it they are these.
    """
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    ids = [row[4] for row in phase["rows"]] if which == "run" else phase[which]
    for (step, layer, request, position, _), some in zip(phase["rows"], ids, strict=True):
        if position >= len(PROMPTS[request]):
            found[step, layer].update(some)
    return found


def changed(phase: Phase, prefill: bool) -> int:
    """Rows times layers that ran other experts than the router returned."""
    return sum(
        run != own and (position < len(PROMPTS[request])) == prefill
        for (_, _, request, position, run), own in zip(phase["rows"], phase["own"], strict=True)
    )


def alike(a: Phase, b: Phase) -> int:
    """Requests with equal tokens."""
    return sum(x == y for x, y in zip(a["tokens"], b["tokens"], strict=True))


def check_dense(plain: Phase, controls: Sequence[Phase], phase: Phase, what: str) -> Iterator[str]:
    """A capped engine that must not change anything, against the engine without the plugin.

    `controls` are that engine asked again, and a twin of it. If these decode other tokens, those of a third prove
    nothing: vLLM may scale a step's rows in fp8 by their common maximum, to which the padding of a captured batch
    belongs, and that holds what was left in memory; and each engine compiles for itself.
    """
    if all(alike(plain, control) == len(PROMPTS) for control in controls):
        for request, (a, b) in enumerate(zip(plain["tokens"], phase["tokens"], strict=True)):
            if a != b:
                position = next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1])
                yield f"{what}: request {request} has another token than without the plugin, first at {position}"
        if phase["rows"] != plain["rows"]:
            yield f"{what}: other rows or experts were run than without the plugin"
    if changed(phase, prefill=True) or changed(phase, prefill=False):
        yield f"{what}: rows ran other experts than the router returned"


def loads(case: Case, copies: set[int]) -> list[int]:
    """Copies of experts on each of two ranks, as vLLM's linear placement has them."""
    first = sum(copy < case.copies // 2 for copy in copies)
    return [first, len(copies) - first]


def kept(case: Case, run: set[int], own: set[int]) -> bool:
    """Whether a step fetched as many experts as the case's budget says."""
    if case.counts == "rank":
        return loads(case, run) == [min(case.budget, load) for load in loads(case, own)]
    if case.counts == "level":  # at no rank's cost: each up to the fullest, which the budget of all bounds
        most = max(loads(case, run))
        full = loads(case, run) == [min(most, load) for load in loads(case, own)]
        return full and len(run) >= min(case.budget, len(own)) and most <= case.budget
    return len(run) == min(case.budget, len(own))


def check_capped(case: Case, phase: Phase) -> Iterator[str]:
    """The phase at the case's budget: what was executed, and whether every rank's counters say the same."""
    run, own, copies = (unions(phase, which) for which in ("run", "own", "copies"))
    what = f"budget {case.budget}"
    wrong = [(key, loads(case, run[key]), loads(case, own[key])) for key in run if not kept(case, run[key], own[key])]
    if wrong:
        yield f"{what}: {len(wrong)} of {len(run)} layers and steps run other numbers, first {wrong[0]}"
    if not any(len(run[key]) < len(own[key]) for key in run):
        yield f"{what}: no step's own union exceeds it, so nothing is proven"
    if not changed(phase, prefill=False):
        yield f"{what}: no decode row was changed"
    if changed(phase, prefill=True):
        yield f"{what}: {changed(phase, prefill=True)} prefill rows were changed"
    decode = sum(position >= len(PROMPTS[request]) for _, _, request, position, _ in phase["rows"])
    expected = {
        "steps": len(run), "rows": decode, "fetched": sum(map(len, run.values())),
        "native_union": sum(map(len, own.values())),
    }  # fmt: skip
    for rank, (before, after) in enumerate(zip(phase["before"], phase["states"], strict=True)):
        counted = {name: round(after["counters"][name] - before["counters"][name]) for name in expected}
        if counted != expected:
            yield f"rank {rank} counted {counted}, recorded were {expected}"
        if case.engine.get("enable_expert_parallel"):
            then, now = before["expert_parallel"], after["expert_parallel"]
            by_rank = [round(b - a) for a, b in zip(then["fetched"], now["fetched"], strict=True)]
            most = round(now["fetched_most"] - then["fetched_most"])
            recorded = [sum(column) for column in zip(*(loads(case, some) for some in copies.values()), strict=True)]
            slowest = sum(max(loads(case, some)) for some in copies.values())
            if (by_rank, most) != (recorded, slowest):
                yield f"rank {rank} counted {by_rank}, {most} by rank, recorded were {recorded}, {slowest}"


def check_ranks(case: Case, phases: list[Phase]) -> Iterator[str]:
    """Ranks run the same experts and count the same; debugging, they have compared every layer and step."""
    if not all(phase["ranks_run_alike"] for phase in phases):
        yield "ranks run different experts"
    states = phases[-1]["states"]
    if any(state["per_layer"] != states[0]["per_layer"] for state in states):
        yield "ranks count differently"
    for state in states if case.debug else ():
        if state["debug"]["different"] or state["debug"]["compared"] < state["counters"]["steps"]:
            yield f"ranks compared {state['debug']} in {state['counters']['steps']:.0f} layers and steps"


def check_returned(phase: Phase) -> Iterator[str]:
    """vLLM's own report of what was executed, token by token, against the record."""
    found = {
        (request, position, layer): sorted(ids)
        for request, tokens in enumerate(phase["returned"])
        for position, layers in enumerate(tokens)
        for layer, ids in enumerate(layers)
    }
    recorded = {(request, position, layer): ids for _, layer, request, position, ids in phase["rows"]}
    if found != recorded:
        other = sum(recorded.get(key) != ids for key, ids in found.items())
        yield f"vLLM returns {len(found)} routed rows, {other} of them unlike the {len(recorded)} recorded"


def controls_of(answers: dict[str, dict[str, Any]]) -> list[Phase]:
    """The same requests without the plugin once more: in the same engine, and in its twin."""
    return [answers["plain"]["phases"][-1], *(answers["twin"]["phases"] if "twin" in answers else [])]


def judge(case: Case, mode: str, answers: dict[str, dict[str, Any]], gpu: bool) -> list[str]:
    """Everything that is wrong."""
    for name, answer in answers.items():
        if "error" in answer:
            return [f"the {name} engine did not run: {answer['error']}"]
    plain, capped = answers["plain"], answers["capped"]
    everything, six, off = capped["phases"]
    first = plain["phases"][0]
    wrong = [
        *check_dense(first, controls_of(answers), everything, f"budget {case.experts}"),
        *check_dense(first, controls_of(answers), off, "switched off"),
        *check_capped(case, six),
        *check_ranks(case, [*capped["phases"]]),
    ]
    then, now = off["before"][0]["counters"], off["states"][0]["counters"]
    moved = {name: (then[name], now[name]) for name in now if now[name] != then[name]}
    if moved:
        wrong.append(f"switched off: these were counted on: {moved}")
    if case.adapter:
        bare = plain["phases"][1]["tokens"]
        same = [i for i in range(1, len(bare), 2) if bare[i] == first["tokens"][i]]
        wrong += [f"the adapter does not change the tokens of requests {same}"] if same else []
    if case.engine.get("enable_return_routed_experts"):
        wrong += check_returned(six)
    path = "kernel" if gpu else "torch (cpu)"
    if any(not state["path"].startswith(path) for state in six["states"]) or f"; {path}" not in capped["log"]:
        wrong.append(f"the path is {six['states'][0]['path']!r} or another in the log, not {path!r}")
    if not re.search(rf"experts by {case.experts_by},", capped["log"]):
        wrong.append(f"the log does not say 'experts by {case.experts_by}'")
    if gpu and mode == "graph" and not re.search(r"Capturing CUDA graphs \(.*FULL\)", capped["log"]):
        wrong.append("the log does not say that full CUDA graphs were captured")
    return wrong


def facts(case: Case, answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What was seen at the case's budget, for the row, and how far tokens can be compared at all."""
    if any("error" in answer for answer in answers.values()):
        return {}
    first, capped = answers["plain"]["phases"][0], answers["capped"]
    twice = [alike(first, control) for control in controls_of(answers)]
    phase = capped["phases"][1]
    sets, copies = unions(phase, "run").values(), unions(phase, "copies").values()
    run, own = list(map(len, sets)), list(map(len, unions(phase, "own").values()))
    method = re.search(r"experts by (\w+)", capped["log"])
    return {
        "path": phase["states"][0]["path"], "experts_by": method[1] if method else "", "ranks": len(phase["states"]),
        "steps_and_layers": len(run), "fetched": sum(run) / len(run), "most": max(run),
        "native_union": sum(own) / len(own), "native_most": max(own),
        "fullest_half": sum(max(loads(case, some)) for some in copies) / len(run),
        "half_idle": sum(not min(loads(case, some)) for some in copies), "copies": case.copies,
        "debug": phase["states"][0]["debug"], "requests": len(PROMPTS),
        "same_with_plugin": alike(first, capped["phases"][0]),
        "same_asked_twice": twice[0], "same_in_a_twin": twice[1] if twice[1:] else None,
    }  # fmt: skip


def on_one(case: Case, capped: dict[str, Any], single: Future[dict[str, Any]] | None) -> dict[str, Any]:
    """How many requests of two GPUs without a limit have the tokens of one GPU without the plugin.

    In bfloat16 not all need to, with the plugin as without: sums over ranks are rounded in another order.
    """
    if case.gpus == 1 or single is None or "error" in capped or "error" in single.result():
        return {}
    return {"same_as_one_gpu": alike(capped["phases"][0], single.result()["phases"][0])}


def one_gpu(case: Case) -> str:
    """The case of one GPU with the same checkpoint and numbers."""
    engine = {key: value for key, value in case.engine.items() if key not in {**EP, **BALANCE}}
    alone = (other for other in CASES.items() if other[1].gpus == 1 and other[1].checkpoint == case.checkpoint)
    return next(name for name, other in alone if other.engine == engine)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--case", nargs="+", choices=list(CASES), help="default: all that the machine's GPUs allow")
    ap.add_argument("--mode", nargs="+", choices=MODES, help="default: both, without a GPU eager alone")
    ap.add_argument("--workers", type=int, default=8, help="engines that run side by side")
    ap.add_argument("--limit", type=int, default=400, help="seconds until an engine is stopped")
    ap.add_argument("--keep", type=Path, help="folder for the checkpoint and the engines' logs and answers")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/vllm_check.jsonl")
    a = ap.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    count = torch.cuda.device_count()
    names = a.case or [name for name, case in CASES.items() if (case.gpus <= count if count else case.on_cpu)]
    modes = a.mode or (MODES if count else ("eager",))
    if "graph" in modes and not count:
        raise SystemExit("graph: a compiled model on a CPU leaves no record of what it runs; use --mode eager")
    short = [name for name in names if (CASES[name].gpus > count if count else not CASES[name].on_cpu)]
    if short:
        needed = ", ".join(f"{name} ({CASES[name].gpus})" for name in short)
        raise SystemExit(f"these cases need more GPUs than the {count} of this machine: {needed}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = a.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        write_wide(folder)
        for checkpoint in {CASES[name].checkpoint for name in names} - {"wide"}:
            write_with_stats(checkpoint, folder, "cuda" if count else "cpu")
        wrong = check(names, modes, folder, a.workers, a.limit, count, a.results)
    sys.exit(bool(wrong))


def check(
    names: list[str], modes: Sequence[str], folder: Path, workers: int, limit: int, gpus: int, results: Path
) -> int:
    """Run the cases, print a line and write a row for each. Returns how many are wrong."""
    wrong = 0
    with ThreadPoolExecutor(workers) as pool:
        started: dict[tuple[str, str], dict[str, Future[dict[str, Any]]]] = defaultdict(dict)
        for number, (mode, name) in enumerate((mode, name) for mode in modes for name in names):
            case = CASES[name]
            env = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus and case.gpus == 1 else {}
            env |= {} if gpus else {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            for which, job in plan(case, mode, folder, gpus > 0).items():
                off = {"MOEBUDGET_DISABLE": "1"} if which != "capped" else {}
                label = f"{name}-{mode}-{which}"
                started[name, mode][which] = pool.submit(start, label, job, folder, {**env, **off}, limit)
        stamp = provenance.stamp("cuda" if gpus else "cpu")
        for mode, name in ((mode, name) for mode in modes for name in names):
            case, answers = CASES[name], {which: job.result() for which, job in started[name, mode].items()}
            found = judge(case, mode, answers, gpus > 0)
            single = started.get((one_gpu(case), mode), {}).get("plain")
            seen = facts(case, answers) | on_one(case, answers["capped"], single)
            wrong += bool(found)
            shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in seen.items()}
            print(f"{name} {mode}: {'; '.join(['WRONG', *found]) if found else f'ok {shown}'}", flush=True)
            for answer in answers.values():
                if "error" in answer:
                    print(*answer["log"].splitlines()[-40:], sep="\n", flush=True)
            row = {
                "bench": "vllm_check", "case": name, "mode": mode, "ok": not found, "wrong": found,
                "checkpoint": case.checkpoint, "experts": case.experts, "top_k": case.sizes["num_experts_per_tok"],
                "layers": case.sizes["num_hidden_layers"], "policy": case.policy, "budget": case.budget,
                **seen, **stamp,
            }  # fmt: skip
            provenance.append_rows(results, [row])
    return wrong


if __name__ == "__main__":
    main()
