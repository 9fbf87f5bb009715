"""Decode speed in vLLM, offline: native and budgeted steps in one engine, the baseline without the plugin in another.

The time of a step is linear in the experts fetched, t = a + b * fetched. Random routers spread tokens evenly and fetch
more than trained ones (82 of 128 at 16 rows for Qwen3-30B-A3B's sizes, where the trained model fetches 48.8), so the
line is also read at the native union of a trained model. With expert parallelism a step waits for the rank that
fetches most, so its time is not linear in the sum over the ranks.
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moebudget.bench.engine import Plan, Timing, Turn, decode
from moebudget.bench.line import fit
from moebudget.bench.process import apart
from moebudget.bench.sizes import UNIONS, moe_facts, random_stats, read_config
from moebudget.core import provenance
from moebudget.core.policy import Policy
from moebudget.core.types import PLACEMENT
from moebudget.engines.transformers.loading import MissingExtraError
from moebudget.methods.registry import parse

BUDGETS, BATCHES = (16, 10, 24, 32, 48, 64), (16,)
WIDE = 0.1  # a larger spread of the repeats gets a remark
Budgets = Sequence[int] | Mapping[int, Sequence[int]]  # a list for the first batch size (others get two), or by batch


def ramp(budget: int, layers: int, experts: int) -> tuple[int, ...]:
    """Budgets that rise over the layers from about 0.5 to 1.5 times `budget`, which is their mean.

    No budget exceeds the number of experts; a larger `budget` is cut to it.
    """
    mean = min(budget, experts)
    reach = min(mean / 2, mean - 1, experts - mean)
    steps = np.linspace(mean - reach, mean + reach, layers).cumsum().round().astype(int)
    return tuple(int(m) for m in np.diff(steps, prepend=0))


def rows_of(
    plan: Plan, name: str, policy: str, timings: Sequence[Timing], baseline: Sequence[Timing], union: float | None
) -> Iterator[dict[str, Any]]:
    """Rows for benchmarks/results/decode.jsonl: one per setting, one line per batch size, and the uneven budgets."""
    shared = {
        "model": name, "weights": "random" if plan.random else "trained", "policy": policy,
        "tp": dict(plan.engine).get("tensor_parallel_size", 1), "ep": timings[0].ranks, "in_process": plan.in_process,
    }  # fmt: skip
    for batch in plan.batches:
        even = [t for t in timings if t.batch == batch and not t.budgets]
        plain = next((t for t in baseline if t.batch == batch), None)
        native = max(even, key=lambda t: t.budget or 0)
        references = {
            "native_tpot_ms": native.tpot_ms, "native_spread": native.spread,
            "baseline_tpot_ms": plain and plain.tpot_ms, "baseline_spread": plain and plain.spread,
            # Greedy decoding with equal weights and prompts: equal tokens mean equal work.
            "baseline_same_tokens": plain and bool(plain.digest) and plain.digest == native.digest,
        }  # fmt: skip
        for t in even:
            moved = (t.fullest or t.fetched or 0) * t.expert_bytes * t.layers  # bytes read by one GPU
            yield {
                "bench": "decode", "engine": "vllm", **shared, "B": batch, "M": t.budget, "fetched": t.fetched,
                "most_in_one_layer": t.most, "native_union": native.native_union, "tpot_ms": t.tpot_ms,
                **references, "tpots_ms": list(t.tpots), "spread": t.spread, "digest": t.digest,
                "speedup": native.tpot_ms / t.tpot_ms,
                "e2e_tok_s": t.tokens_per_s, "native_e2e_tok_s": native.tokens_per_s, "path": t.path,
                "layers": t.layers, "expert_bytes": t.expert_bytes, "gb_s": moved / t.tpot_ms / 1e6,
                "prompt": plan.prompt, "tokens": plan.tokens, "fetched_by_layer": list(t.by_layer),
                "fetched_per_rank": list(t.by_rank), "max_fetched_per_rank": t.fullest,
            }  # fmt: skip
        if native.ranks > 1 or len({t.fetched for t in even}) < 3:  # a single row fetches the same at every budget
            continue
        line = fit([(t.fetched or 0, t.tpot_ms) for t in even], least=3)
        at = native.native_union if union is None or batch != plan.batches[0] else union
        speedups = {str(t.budget): line.at(at) / line.at(min(t.budget or 0, at)) for t in even if at}
        yield {
            "bench": "decode_fit", "engine": "vllm", **shared, "B": batch, "a_ms": line.a, "b_ms": line.b,
            "r2": line.r2, "native_union": native.native_union, "at_union": at, "speedup_at_union": speedups,
        }  # fmt: skip
        for t in (t for t in timings if t.batch == batch and t.budgets):
            yield {
                "bench": "decode_uneven", "engine": "vllm", **shared, "B": batch, "M": t.budget, "fetched": t.fetched,
                "budgets": list(t.budgets), "tpot_ms": t.tpot_ms, "line_ms": line.at(t.fetched or 0),
                "native_tpot_ms": native.tpot_ms, "fetched_by_layer": list(t.by_layer),
            }  # fmt: skip


def remarks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Sentences: the cost of the plugin itself at each batch size, and a warning if repeats differ."""
    for r in {row["B"]: row for row in rows if row["baseline_tpot_ms"] is not None}.values():
        cost = 100 * (r["native_tpot_ms"] / r["baseline_tpot_ms"] - 1)
        if r["baseline_same_tokens"]:
            note = "both decoded the same tokens"
        else:
            note = "they decoded different tokens, so part of the difference is due to different experts"
            note += "" if r["in_process"] else "; use --in-process so that requests arrive at the same steps"
        yield (
            f"B={r['B']}: {r['baseline_tpot_ms']:.2f} ms for the baseline without the plugin; the plugin with native "
            f"routing: {cost:+.1f} % ({note})"
        )
    for r in rows:
        if r["spread"] is not None and r["spread"] > WIDE:
            yield (
                f"B={r['B']}, budget {r['M']}: repeats differ by {100 * r['spread']:.0f} %; another program ran, or a "
                "kernel was compiled in between: run again"
            )


def _run_engine(arguments: tuple[Any, ...]) -> list[Timing]:
    """`decode` in a separate process; if it fails, the engines that wait for it are released."""
    turn: Turn | None = arguments[-1]
    with nullcontext() if turn is None else turn.or_abort():
        return apart(decode, *arguments)


@contextmanager
def _model(name: str, needs: frozenset[str], stats: str | None) -> Iterator[tuple[str, bool, str | None]]:
    """A folder for vLLM, whether its weights are random, and the statistics file (made up for random weights)."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(name)
        if Path(name).is_dir():
            if stats is None and needs:
                raise ValueError(
                    f"{name} has trained weights, and a policy reads {', '.join(sorted(needs))}: give statistics"
                )
            yield name, False, stats
            return
        Path(folder, "config.json").write_text(json.dumps(config))
        if stats is None and needs:
            random_stats(config, needs).save(Path(folder, "stats.safetensors"))
            stats = str(Path(folder, "stats.safetensors"))
        yield folder, True, stats


def _by_batch(budgets: Budgets, batches: Sequence[int]) -> dict[int, Sequence[int]]:
    """The budgets of each batch size; of a plain list the first batch size gets all, the others two."""
    if isinstance(budgets, Mapping):
        return {batch: budgets[batch] for batch in batches}
    return {batch: budgets if batch == batches[0] else budgets[:2] for batch in batches}


def _check_ranks(rules: Sequence[Policy], uneven: Sequence[int], engine: Mapping[str, Any]) -> None:
    """Raise ValueError for more ranks than GPUs, or if the ranks do not suit the budgets or the policies."""
    gpus = math.prod(engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    if torch.cuda.is_available() and gpus > torch.cuda.device_count():
        raise ValueError(
            f"the engine's arguments ask for {gpus} GPUs (tensor_parallel_size="
            f"{engine.get('tensor_parallel_size', 1)}), and {torch.cuda.device_count()} are visible"
        )
    parallel = engine.get("enable_expert_parallel", False) and gpus > 1
    if parallel and uneven:
        raise ValueError(
            f"uneven={list(uneven)} is compared with a line in the fetched experts, which expert parallelism does not "
            "have"
        )
    for rule in rules:
        if rule.needs_placement and not parallel:
            raise ValueError(
                f"policy {rule.name!r} reads which device holds an expert: give the engine tensor_parallel_size=2 or "
                "more and enable_expert_parallel=True"
            )


def run_decode(
    name: str,
    policy: str = "base:budget=16",
    budgets: Budgets = BUDGETS,
    batches: Sequence[int] = BATCHES,
    **options: Any,
) -> list[dict[str, Any]]:
    """The rows of one policy; options as in `run_policies`."""
    return run_policies(name, {policy: budgets}, batches, **options)


def run_models(names: Sequence[str], *, together: bool = False, **options: Any) -> Iterator[list[dict[str, Any]]]:
    """The rows of each model, one model after another; options as in `run_decode`.

    With `together` the engines of all models start at once and take turns, so that a slow moment of the machine
    affects all of them; this needs memory for all and `kv_cache_memory_bytes` among the arguments of the engine.
    """
    if not together:
        yield from (run_decode(name, **options) for name in names)
        return

    def run(name: str, turn: Turn) -> list[dict[str, Any]]:
        with turn.or_abort():
            return run_decode(name, turn=turn, **options)

    engines = len(names) * (2 if options.get("baseline", True) else 1)
    with multiprocessing.get_context("spawn").Manager() as manager, ThreadPoolExecutor(len(names)) as threads:
        turn = Turn.of(manager, engines)
        yield from (job.result() for job in [threads.submit(run, name, turn) for name in names])


def run_policies(
    name: str,
    policies: Mapping[str, Budgets],
    batches: Sequence[int] = BATCHES,
    *,
    prompt: int = 128,
    tokens: int = 384,
    repeats: int = 3,
    stats: str | None = None,
    union: float | None = None,
    baseline: bool = True,
    uneven: Sequence[int] = (),
    turn: Turn | None = None,
    in_process: bool = False,
    **engine: Any,
) -> list[dict[str, Any]]:
    """Time a model of `sizes.SIZES` or of a config.json with random weights, or a checkpoint folder. Returns the rows.

    Each policy gets one engine with its budgets, plus the number of experts, which is native routing. `baseline` first
    starts another engine, without the plugin. With `turn` all start at once and take turns, which needs memory for all
    and `kv_cache_memory_bytes` among the arguments of the engine. `union` is the trained model's, at the first batch
    size. `uneven`: average budgets at which budgets that differ between the layers are timed too, at the first batch
    size, to test whether a step's time depends on their sum alone. `in_process`: vLLM's core runs in the engine's
    process, so that all requests of a batch arrive before its first step and native steps hold the same rows as the
    baseline's. `engine` holds arguments of vLLM's LLM, such as tensor_parallel_size=2 and enable_expert_parallel=True.

    Raises ValueError for a policy without a budget, a number below 1, more ranks than GPUs, or a checkpoint without
    the statistics that a policy reads, FileNotFoundError for an unknown model, MissingExtraError without vLLM.
    """
    rules = {policy: parse(policy) for policy in policies}
    for policy, rule in rules.items():
        if rule.budget is None:
            raise ValueError(
                f"policy {policy!r} has no budget to sweep; use one with a budget, such as base:budget=16"
            )
    if not batches or min(batches) < 1:
        raise ValueError(f"batch sizes {list(batches)} must be a list of at least one whole number of at least 1")
    settings = {policy: _by_batch(budgets, batches) for policy, budgets in policies.items()}
    for policy, by_batch in settings.items():
        for budget in (*(b for budgets in by_batch.values() for b in budgets), *uneven):
            rules[policy].checked_budget(budget)
    _check_ranks(list(rules.values()), uneven, engine)
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("bench decode drives vLLM, which is not installed: pip install 'moebudget[vllm]'")
    union = UNIONS.get(name) if union is None else union
    needs = frozenset[str]().union(*(rule.needs for rule in rules.values())) - PLACEMENT  # vLLM provides the placement
    with _model(name, needs, stats) as (folder, random, file):
        config = json.loads(Path(folder, "config.json").read_text())
        plan = Plan(folder, random, tuple(batches), prompt, tokens, repeats, tuple(engine.items()), in_process)
        facts = moe_facts(config)
        engines: list[tuple[Any, ...]] = [(plan, None, None, {}, turn)] if baseline else []
        for policy, by_batch in settings.items():
            timed_at: dict[int, list[int | tuple[int, ...]]] = {
                batch: list(dict.fromkeys((facts.experts, *budgets))) for batch, budgets in by_batch.items()
            }
            timed_at[plan.batches[0]] += [ramp(budget, len(facts.layers), facts.experts) for budget in uneven]
            engines.append((plan, policy, file, timed_at, turn))
        with ThreadPoolExecutor(1 if turn is None else len(engines)) as threads:
            timed = list(threads.map(_run_engine, engines))
    plain, budgeted = (timed[0], timed[1:]) if baseline else ([], timed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stamp = {"gpu": provenance.device_name(device), **provenance.stamp(device)}
    return [
        {**row, **stamp}
        for policy, timings in zip(policies, budgeted, strict=True)
        for row in rows_of(plan, Path(name).name, policy, timings, plain, union)
    ]
