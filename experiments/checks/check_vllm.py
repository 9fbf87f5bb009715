"""Check on a machine with vLLM that the plugin caps fetched experts: bf16, fp8, LoRA, ranks; CUDA graphs and eager.

python -m experiments.checks.check_vllm --workers 8
python -m experiments.checks.check_vllm --case ep2 --mode graph

Each case and mode runs two engines on one checkpoint (a tiny random one, the demo model, or four random layers of
Qwen3-30B-A3B's sizes): one with the plugin, and the baseline without it. With graphs, a twin of the baseline shows how
far two equal engines decode alike. Every row that their kernels run is recorded on the device and compared; nothing is
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

from moebudget.core import provenance
from tests.engines.vllm.checkpoints import BALANCE, DEMO, QWEN3, RANK, WIDE, write_wide, write_with_stats

ROOT = Path(__file__).resolve().parents[2]

BUDGET = 8
# At most six requests run at once, so the last prompts are read while others decode; steps of 64 tokens split prompts.
PROMPTS = [[(7 * i + j * j) % 500 + 3 for j in range(5 + 5 * i)] for i in range(9)]
TOKENS = [12 + i for i in range(9)]
MODES = ("graph", "eager")
Phase = dict[str, Any]
RUNNING: set[int] = set()  # process groups of engines


@dataclass(frozen=True, slots=True)
class Case:
    """Arguments of a case's engines, and the budget that must hold."""

    engine: dict[str, Any] = field(default_factory=dict)
    template: str = "base:budget={all}"  # of the policy string
    budget: int = BUDGET
    counts: str = "all"  # the budget bounds experts of "all" ranks, of each "rank", or of all before "level" adds any
    debug: bool = False
    experts_by: str = r"\w+"  # pattern of the experts' method in the plugin's log
    gpus: int = 1
    adapter: bool = False
    checkpoint: str = "wide"
    on_cpu: bool = True  # whether vLLM's CPU build can run it

    @property
    def sizes(self) -> dict[str, Any]:
        return CHECKPOINTS[self.checkpoint]

    @property
    def experts(self) -> int:
        return int(self.sizes["num_experts"])

    @property
    def copies(self) -> int:
        """Copies of experts in all, vLLM's physical experts."""
        return self.experts + int(self.engine.get("eplb_config", {}).get("num_redundant_experts", 0))

    @property
    def policy(self) -> str:
        """The policy string, with a budget that leaves nothing out."""
        return self.template.format(all=self.experts)


CHECKPOINTS: dict[str, dict[str, Any]] = {"wide": WIDE, "demo": DEMO, "qwen3": QWEN3}
FLOAT32 = {"dtype": "float32"}
TP = {"tensor_parallel_size": 2}
EP = {**TP, "enable_expert_parallel": True}
CASES = {
    "bf16": Case(),
    # fp8 with one scale for all rows of a step, padding included; the same without padding; and a scale per row.
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
    """Requests of the prompts; every second one with the adapter, if there is one."""
    return [
        {"prompt": prompt, "tokens": tokens, **({"adapter": str(adapter)} if adapter and i % 2 else {})}
        for i, (prompt, tokens) in enumerate(zip(PROMPTS, TOKENS, strict=True))
    ]


def plan(case: Case, mode: str, folder: Path, gpu: bool) -> dict[str, dict[str, Any]]:
    """Jobs of drive.py: the baseline, its twin if models are compiled, and the capped engine."""
    prompts = requests(folder / "adapter" if case.adapter else None)
    memory = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**28} if gpu else {}
    engine = {"model": str(folder / case.checkpoint), "enforce_eager": mode == "eager", **memory, **case.engine}
    config = {"policy": case.policy, "stats": str(folder / f"{case.checkpoint}.safetensors"), "debug": case.debug}
    baseline = [
        {"requests": prompts},
        *([{"requests": requests(None)}] if case.adapter else []),
        {"requests": prompts},
    ]
    capped = [{"requests": prompts}, {"set": {"budget": case.budget}, "requests": prompts}]
    capped.append({"set": {"enabled": False}, "requests": prompts})
    return {
        "baseline": {"engine": engine, "phases": baseline, "record": True},
        **({"twin": {"engine": engine, "phases": baseline[:1], "record": True}} if mode == "graph" else {}),
        "capped": {
            "engine": {**engine, "additional_config": {"moebudget": config}}, "phases": capped, "record": True,
        },
    }  # fmt: skip


def start(name: str, job: dict[str, Any], folder: Path, env: dict[str, str], limit: int) -> dict[str, Any]:
    """Run one engine in a separate process group -> its answer with the log, or {"error": reason, "log": ...}."""
    jobs, answers, log = (folder / f"{name}.{end}" for end in ("jobs.json", "answers.json", "log"))
    jobs.write_text(json.dumps([job]))
    command = [sys.executable, "-m", "tests.engines.vllm.drive", str(jobs), str(answers)]
    variables = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # requests arrive in one order, so two engines make equal steps
        "TORCHINDUCTOR_DETERMINISTIC": "1",  # the fastest kernel on a busy GPU must not decide the order of sums
        "VLLM_CACHE_ROOT": str(folder / f"{name}.cache"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **env,
    }  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=out, stderr=out, start_new_session=True)
        RUNNING.add(process.pid)
        try:
            code: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
        with contextlib.suppress(ProcessLookupError):  # the whole group has ended
            os.killpg(process.pid, signal.SIGKILL)  # with its workers
        RUNNING.discard(process.pid)
    text = log.read_text(errors="replace")
    if code != 0 or not answers.is_file():
        return {"error": f"exit code {code}", "log": text}
    [answer] = json.loads(answers.read_text())
    return {**answer, "log": text}


def stop(number: int, _: object) -> None:
    """Kill all engines when this script is stopped."""
    for group in list(RUNNING):
        with contextlib.suppress(ProcessLookupError):  # the group has just ended
            os.killpg(group, signal.SIGKILL)
    os._exit(128 + number)


def unions(phase: Phase, which: str) -> dict[tuple[int, int], set[int]]:
    """(step, layer) -> union over its decode rows of the experts that were "run", or of the "native" ones.

    "copies" are EPLB's copies of the experts that were run; without EPLB, the experts themselves.
    """
    sets: dict[tuple[int, int], set[int]] = defaultdict(set)
    row_ids = [row[4] for row in phase["rows"]] if which == "run" else phase[which]
    for (step, layer, request, position, _), ids in zip(phase["rows"], row_ids, strict=True):
        if position >= len(PROMPTS[request]):
            sets[step, layer].update(ids)
    return sets


def changed(phase: Phase, prefill: bool) -> int:
    """Rows that did not run their native experts, summed over layers."""
    return sum(
        run != native and (position < len(PROMPTS[request])) == prefill
        for (_, _, request, position, run), native in zip(phase["rows"], phase["native"], strict=True)
    )


def alike(a: Phase, b: Phase) -> int:
    """Number of requests with equal tokens."""
    return sum(x == y for x, y in zip(a["tokens"], b["tokens"], strict=True))


def check_native(baseline: Phase, controls: Sequence[Phase], phase: Phase, label: str) -> Iterator[str]:
    """Faults of a phase that must not change anything, against the baseline.

    `controls` are a second run of the baseline, and its twin. If their tokens differ, tokens of a third engine prove
    nothing. In fp8, vLLM may scale a step's rows by their common maximum, which includes the padding of a captured
    batch: leftovers in memory. Also, every engine compiles separately.
    """
    if all(alike(baseline, control) == len(PROMPTS) for control in controls):
        for request, (expected, tokens) in enumerate(zip(baseline["tokens"], phase["tokens"], strict=True)):
            if tokens != expected:
                pairs = enumerate(zip(expected, tokens, strict=True))
                position = next(i for i, (a, b) in pairs if a != b)
                yield f"{label}: request {request} has another token than the baseline, first at {position}"
        if phase["rows"] != baseline["rows"]:
            yield f"{label}: other rows or experts were run than in the baseline"
    if changed(phase, prefill=True) or changed(phase, prefill=False):
        yield f"{label}: rows ran other experts than the native ones"


def loads(case: Case, copies: set[int]) -> list[int]:
    """Number of copies on each of two ranks in vLLM's linear placement."""
    first = sum(copy < case.copies // 2 for copy in copies)
    return [first, len(copies) - first]


def keeps_budget(case: Case, run: set[int], native: set[int]) -> bool:
    """Whether a step fetched exactly as many experts as the case's budget allows."""
    if case.counts == "rank":
        return loads(case, run) == [min(case.budget, load) for load in loads(case, native)]
    if case.counts == "level":  # each rank is filled up to the fullest, which the budget over all ranks bounds
        most = max(loads(case, run))
        filled = loads(case, run) == [min(most, load) for load in loads(case, native)]
        return filled and len(run) >= min(case.budget, len(native)) and most <= case.budget
    return len(run) == min(case.budget, len(native))


def check_capped(case: Case, phase: Phase) -> Iterator[str]:
    """Faults of the phase at the case's budget: of the experts that were run, and of every rank's counters."""
    run, native, copies = (unions(phase, which) for which in ("run", "native", "copies"))
    label = f"budget {case.budget}"
    broken = [key for key in run if not keeps_budget(case, run[key], native[key])]
    if broken:
        first = broken[0], loads(case, run[broken[0]]), loads(case, native[broken[0]])
        yield f"{label}: {len(broken)} of {len(run)} layers and steps break the budget, first {first}"
    if not any(len(run[key]) < len(native[key]) for key in run):
        yield f"{label}: no step's native union exceeds it, so the check proves nothing"
    if not changed(phase, prefill=False):
        yield f"{label}: no decode row was changed"
    if changed(phase, prefill=True):
        yield f"{label}: {changed(phase, prefill=True)} prefill rows were changed"
    decode = sum(position >= len(PROMPTS[request]) for _, _, request, position, _ in phase["rows"])
    expected = {
        "steps": len(run), "rows": decode, "fetched": sum(map(len, run.values())),
        "native_union": sum(map(len, native.values())),
    }  # fmt: skip
    for rank, (before, after) in enumerate(zip(phase["before"], phase["states"], strict=True)):
        counted = {name: round(after["counters"][name] - before["counters"][name]) for name in expected}
        if counted != expected:
            yield f"rank {rank} counted {counted}, the record has {expected}"
        if case.engine.get("enable_expert_parallel"):
            then, now = before["expert_parallel"], after["expert_parallel"]
            by_rank = [round(b - a) for a, b in zip(then["fetched"], now["fetched"], strict=True)]
            most = round(now["fetched_most"] - then["fetched_most"])
            step_loads = [loads(case, union) for union in copies.values()]
            recorded = [sum(column) for column in zip(*step_loads, strict=True)]
            slowest = sum(map(max, step_loads))
            if (by_rank, most) != (recorded, slowest):
                yield f"rank {rank} counted {by_rank}, {most} by rank, the record has {recorded}, {slowest}"


def check_ranks(case: Case, phases: list[Phase]) -> Iterator[str]:
    """Faults of ranks: they run different experts, count differently or, in debug mode, skip a comparison."""
    if not all(phase["ranks_run_alike"] for phase in phases):
        yield "ranks run different experts"
    states = phases[-1]["states"]
    if any(state["per_layer"] != states[0]["per_layer"] for state in states):
        yield "ranks count differently"
    for state in states if case.debug else ():
        if state["debug"]["different"] or state["debug"]["compared"] < state["counters"]["steps"]:
            yield f"ranks compared {state['debug']} of {state['counters']['steps']:.0f} layers and steps"


def check_returned(phase: Phase) -> Iterator[str]:
    """Faults of vLLM's report of executed experts per token, against the record."""
    returned = {
        (request, position, layer): sorted(ids)
        for request, tokens in enumerate(phase["returned"])
        for position, layers in enumerate(tokens)
        for layer, ids in enumerate(layers)
    }
    recorded = {(request, position, layer): ids for _, layer, request, position, ids in phase["rows"]}
    if returned != recorded:
        differing = sum(recorded.get(key) != ids for key, ids in returned.items())
        yield f"vLLM returns {len(returned)} routed rows, {differing} unlike the {len(recorded)} recorded"


def controls_of(answers: dict[str, dict[str, Any]]) -> list[Phase]:
    """A second run of the baseline's requests: in the same engine, and in its twin."""
    return [answers["baseline"]["phases"][-1], *(answers["twin"]["phases"] if "twin" in answers else [])]


def judge(case: Case, mode: str, answers: dict[str, dict[str, Any]], gpu: bool) -> list[str]:
    """Faults of a case and mode."""
    for name, answer in answers.items():
        if "error" in answer:
            return [f"the {name} engine did not run: {answer['error']}"]
    baseline, capped = answers["baseline"], answers["capped"]
    unrestricted, restricted, off = capped["phases"]
    first = baseline["phases"][0]
    wrong = [
        *check_native(first, controls_of(answers), unrestricted, f"budget {case.experts}"),
        *check_native(first, controls_of(answers), off, "switched off"),
        *check_capped(case, restricted),
        *check_ranks(case, [*capped["phases"]]),
    ]
    then, now = off["before"][0]["counters"], off["states"][0]["counters"]
    moved = {name: (then[name], now[name]) for name in now if now[name] != then[name]}
    if moved:
        wrong.append(f"switched off: these counters moved: {moved}")
    if case.adapter:
        without = baseline["phases"][1]["tokens"]
        same = [i for i in range(1, len(without), 2) if without[i] == first["tokens"][i]]
        wrong += [f"the adapter does not change the tokens of requests {same}"] if same else []
    if case.engine.get("enable_return_routed_experts"):
        wrong += check_returned(restricted)
    path = "kernel" if gpu else "torch (cpu)"
    if any(not state["path"].startswith(path) for state in restricted["states"]) or f"; {path}" not in capped["log"]:
        wrong.append(f"the path is {restricted['states'][0]['path']!r} or another in the log, not {path!r}")
    if not re.search(rf"experts by {case.experts_by},", capped["log"]):
        wrong.append(f"the log does not say 'experts by {case.experts_by}'")
    if gpu and mode == "graph" and not re.search(r"Capturing CUDA graphs \(.*FULL\)", capped["log"]):
        wrong.append("the log does not say that full CUDA graphs were captured")
    return wrong


def facts(case: Case, answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Fields of the row: measurements at the case's budget, and how far tokens can be compared."""
    if any("error" in answer for answer in answers.values()):
        return {}
    first, capped = answers["baseline"]["phases"][0], answers["capped"]
    twice = [alike(first, control) for control in controls_of(answers)]
    phase = capped["phases"][1]
    sets, copies = unions(phase, "run").values(), unions(phase, "copies").values()
    run, native = list(map(len, sets)), list(map(len, unions(phase, "native").values()))
    method = re.search(r"experts by (\w+)", capped["log"])
    return {
        "path": phase["states"][0]["path"], "experts_by": method[1] if method else "", "ranks": len(phase["states"]),
        "steps_and_layers": len(run), "fetched": sum(run) / len(run), "most": max(run),
        "native_union": sum(native) / len(native), "native_most": max(native),
        "fullest_half": sum(max(loads(case, union)) for union in copies) / len(run),
        "half_idle": sum(not min(loads(case, union)) for union in copies), "copies": case.copies,
        "debug": phase["states"][0]["debug"], "requests": len(PROMPTS),
        "same_with_plugin": alike(first, capped["phases"][0]),
        "same_asked_twice": twice[0], "same_in_a_twin": twice[1] if twice[1:] else None,
    }  # fmt: skip


def on_one(case: Case, capped: dict[str, Any], single: Future[dict[str, Any]] | None) -> dict[str, Any]:
    """Number of requests for which two unrestricted GPUs give the tokens of one GPU without the plugin.

    In bfloat16 not all need to, with or without the plugin: sums over ranks are rounded in another order.
    """
    if case.gpus == 1 or single is None or "error" in capped or "error" in single.result():
        return {}
    return {"same_as_one_gpu": alike(capped["phases"][0], single.result()["phases"][0])}


def one_gpu(case: Case) -> str:
    """The case of one GPU with the same checkpoint and number formats."""
    engine = {key: value for key, value in case.engine.items() if key not in {**EP, **BALANCE}}
    singles = ((name, c) for name, c in CASES.items() if c.gpus == 1 and c.checkpoint == case.checkpoint)
    return next(name for name, single in singles if single.engine == engine)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument(
        "--case", nargs="+", choices=list(CASES), help="cases to run; default: all that the machine's GPUs allow"
    )
    ap.add_argument("--mode", nargs="+", choices=MODES, help="default: both; without a GPU, only eager")
    ap.add_argument("--workers", type=int, default=8, help="engines that run at the same time")
    ap.add_argument("--limit", type=int, default=400, help="seconds after which an engine is stopped")
    ap.add_argument(
        "--keep", type=Path, help="folder in which to keep the checkpoints and the engines' logs and answers"
    )
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/vllm_check.jsonl")
    a = ap.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    count = torch.cuda.device_count()
    names = a.case or [name for name, case in CASES.items() if (case.gpus <= count if count else case.on_cpu)]
    modes = a.mode or (MODES if count else ("eager",))
    if "graph" in modes and not count:
        raise SystemExit("graph: the rows of a compiled model cannot be recorded on a CPU; use --mode eager")
    short = [name for name in names if (CASES[name].gpus > count if count else not CASES[name].on_cpu)]
    if short:
        needed = ", ".join(f"{name} ({CASES[name].gpus})" for name in short)
        raise SystemExit(f"these cases need more GPUs than this machine has ({count}): {needed}")
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
    """Run the cases, print a line and write a row for each. Returns the number of wrong ones."""
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
            faults = judge(case, mode, answers, gpus > 0)
            single = started.get((one_gpu(case), mode), {}).get("baseline")
            fields = facts(case, answers) | on_one(case, answers["capped"], single)
            wrong += bool(faults)
            rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in fields.items()}
            print(f"{name} {mode}: {'; '.join(['WRONG', *faults]) if faults else f'ok {rounded}'}", flush=True)
            for answer in answers.values():
                if "error" in answer:
                    print(*answer["log"].splitlines()[-40:], sep="\n", flush=True)
            row = {
                "bench": "vllm_check", "case": name, "mode": mode, "ok": not faults, "wrong": faults,
                "checkpoint": case.checkpoint, "experts": case.experts, "top_k": case.sizes["num_experts_per_tok"],
                "layers": case.sizes["num_hidden_layers"], "policy": case.policy, "budget": case.budget,
                **fields, **stamp,
            }  # fmt: skip
            provenance.append_rows(results, [row])
    return wrong


if __name__ == "__main__":
    main()
