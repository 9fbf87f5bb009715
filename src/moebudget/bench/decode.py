"""Decode speed in vLLM, offline: dense and at several budgets in one engine, without the plugin in another.

The time of a step is a line in the experts fetched, t = a + b * fetched. Random routers spread tokens evenly and fetch
more than trained ones (82 of 128 at 16 rows for Qwen3-30B-A3B's sizes, where the trained model fetches 48.8), so the
line is also read at the native union of a trained model. With expert parallelism a step waits for the rank that
fetches most, so there is no line in their sum.
"""

from __future__ import annotations

import importlib.util
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moebudget import provenance
from moebudget.bench.apart import apart
from moebudget.bench.engine import Plan, Timing, Turn, decode
from moebudget.bench.line import fit
from moebudget.bench.sizes import UNIONS, moe_facts, random_stats, read_config
from moebudget.integrations.loading import MissingExtraError
from moebudget.policy import Policy
from moebudget.presets import parse
from moebudget.types import PLACEMENT

BUDGETS, BATCHES = (16, 10, 24, 32, 48, 64), (16,)
APART = 0.1  # repeats that lie further apart than this are remarked
Budgets = Sequence[int] | Mapping[int, Sequence[int]]  # of the first batch size, of which others get two, or of each


def ramp(budget: int, layers: int, experts: int) -> tuple[int, ...]:
    """Budgets of the layers that rise from about half of `budget` to half as much again and have it as their mean.

    None exceeds the number of experts; more than that on average cannot be had.
    """
    aim = min(budget, experts)
    reach = min(aim / 2, aim - 1, experts - aim)
    steps = np.linspace(aim - reach, aim + reach, layers).cumsum().round().astype(int)
    return tuple(int(m) for m in np.diff(steps, prepend=0))


def rows_of(
    plan: Plan, name: str, policy: str, found: Sequence[Timing], off: Sequence[Timing], union: float | None
) -> Iterator[dict[str, Any]]:
    """Rows for benchmarks/results/decode.jsonl: one a setting, one line a batch size, and uneven budgets beside it."""
    shared = {
        "model": name, "weights": "random" if plan.random else "trained", "policy": policy,
        "tp": dict(plan.engine).get("tensor_parallel_size", 1), "ep": found[0].ranks, "in_process": plan.in_process,
    }  # fmt: skip
    for batch in plan.batches:
        mine = [t for t in found if t.batch == batch and not t.budgets]
        without = next((t for t in off if t.batch == batch), None)
        dense = max(mine, key=lambda t: t.budget or 0)
        beside = {
            "dense_tpot_ms": dense.tpot_ms, "dense_spread": dense.spread,
            "off_tpot_ms": without and without.tpot_ms, "off_spread": without and without.spread,
            # Greedy decoding of equal weights and prompts: equal tokens are equal work.
            "off_same_tokens": without and bool(without.digest) and without.digest == dense.digest,
        }  # fmt: skip
        for t in mine:
            moved = (t.fullest or t.fetched or 0) * t.expert_bytes * t.layers  # by one GPU
            yield {
                "bench": "decode", "engine": "vllm", **shared, "B": batch, "M": t.budget, "fetched": t.fetched,
                "most_in_a_layer": t.most, "native_union": dense.native_union, "tpot_ms": t.tpot_ms,
                **beside, "tpots_ms": list(t.tpots), "spread": t.spread, "digest": t.digest,
                "speedup": dense.tpot_ms / t.tpot_ms,
                "e2e_tok_s": t.tokens_per_s, "dense_e2e_tok_s": dense.tokens_per_s, "path": t.path,
                "layers": t.layers, "expert_bytes": t.expert_bytes, "gb_s": moved / t.tpot_ms / 1e6,
                "prompt": plan.prompt, "tokens": plan.tokens, "fetched_by_layer": list(t.by_layer),
                "fetched_per_rank": list(t.by_rank), "max_fetched_per_rank": t.fullest,
            }  # fmt: skip
        if dense.ranks > 1 or len({t.fetched for t in mine}) < 3:  # one row fetches the same at all
            continue
        line = fit([(t.fetched or 0, t.tpot_ms) for t in mine], least=3)
        at = dense.native_union if union is None or batch != plan.batches[0] else union
        speedups = {str(t.budget): line.at(at) / line.at(min(t.budget or 0, at)) for t in mine if at}
        yield {
            "bench": "decode_fit", "engine": "vllm", **shared, "B": batch, "a_ms": line.a, "b_ms": line.b,
            "r2": line.r2, "native_union": dense.native_union, "at_union": at, "speedup_at_union": speedups,
        }  # fmt: skip
        for t in (t for t in found if t.batch == batch and t.budgets):
            yield {
                "bench": "decode_uneven", "engine": "vllm", **shared, "B": batch, "M": t.budget, "fetched": t.fetched,
                "budgets": list(t.budgets), "tpot_ms": t.tpot_ms, "line_ms": line.at(t.fetched or 0),
                "dense_tpot_ms": dense.tpot_ms, "fetched_by_layer": list(t.by_layer),
            }  # fmt: skip


def remarks(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the plugin itself costs at each batch size, and how far the times can be trusted."""
    for r in {row["B"]: row for row in rows if row["off_tpot_ms"] is not None}.values():
        more = 100 * (r["dense_tpot_ms"] / r["off_tpot_ms"] - 1)
        if r["off_same_tokens"]:
            what = "both decoded the same tokens"
        else:
            what = "they decoded other tokens, so other experts are part of it"
            what += "" if r["in_process"] else "; --in-process lets requests arrive alike"
        yield (
            f"B={r['B']}: {r['off_tpot_ms']:.2f} ms without the plugin; a budget that leaves nothing out costs "
            f"{more:+.1f} % ({what})"
        )
    for r in rows:
        if r["spread"] is not None and r["spread"] > APART:
            yield (
                f"B={r['B']}, budget {r['M']}: repeats lie {100 * r['spread']:.0f} % apart; something else ran, or a "
                "kernel was compiled meanwhile: run again"
            )


def _apart(arguments: tuple[Any, ...]) -> list[Timing]:
    """`decode` in a process of its own; the other engines do not wait for one that failed."""
    turn: Turn | None = arguments[-1]
    with nullcontext() if turn is None else turn.or_abort():
        return apart(decode, *arguments)


@contextmanager
def _model(name: str, needs: frozenset[str], stats: str | None) -> Iterator[tuple[str, bool, str | None]]:
    """A folder for vLLM, whether its weights are random, and statistics: given ones, or random as the weights are."""
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(name)
        if Path(name).is_dir():
            if stats is None and needs:
                raise ValueError(
                    f"{name} has trained weights, and a policy reads {', '.join(sorted(needs))}: give stats"
                )
            yield name, False, stats
            return
        Path(folder, "config.json").write_text(json.dumps(config))
        if stats is None and needs:
            random_stats(config, needs).save(Path(folder, "stats.safetensors"))
            stats = str(Path(folder, "stats.safetensors"))
        yield folder, True, stats


def _each(budgets: Budgets, batches: Sequence[int]) -> dict[int, Sequence[int]]:
    """The budgets of each batch size; of a plain list the first has all, the others two."""
    if isinstance(budgets, Mapping):
        return {batch: budgets[batch] for batch in batches}
    return {batch: budgets if batch == batches[0] else budgets[:2] for batch in batches}


def _check_ranks(rules: Sequence[Policy], uneven: Sequence[int], engine: Mapping[str, Any]) -> None:
    """ValueError for more ranks than GPUs, and for what the ranks cannot be asked."""
    gpus = math.prod(engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
    if torch.cuda.is_available() and gpus > torch.cuda.device_count():
        raise ValueError(
            f"the engine's arguments ask for {gpus} GPUs (tensor_parallel_size="
            f"{engine.get('tensor_parallel_size', 1)}), and {torch.cuda.device_count()} are visible"
        )
    spread = engine.get("enable_expert_parallel", False) and gpus > 1
    if spread and uneven:
        raise ValueError(f"uneven={list(uneven)} is held against a line in the experts; expert parallelism has none")
    for rule in rules:
        if rule.needs_placement and not spread:
            raise ValueError(
                f"policy {rule.name!r} looks at the devices of experts: give the engine tensor_parallel_size=2 or "
                "more and enable_expert_parallel=True"
            )


def run_decode(
    name: str,
    policy: str = "base:budget=16",
    budgets: Budgets = BUDGETS,
    batches: Sequence[int] = BATCHES,
    **more: Any,
) -> list[dict[str, Any]]:
    """The rows of one policy; the rest as in `run_policies`."""
    return run_policies(name, {policy: budgets}, batches, **more)


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
    off: bool = True,
    uneven: Sequence[int] = (),
    turn: Turn | None = None,
    in_process: bool = False,
    **engine: Any,
) -> list[dict[str, Any]]:
    """Time a model of `sizes.SIZES` or of a config.json with random weights, or a checkpoint folder. Returns the rows.

    An engine a policy, with its budgets. The number of experts is added to them: that is the dense model. `off` starts
    another engine first, without the plugin; with `turn` all at once, which needs memory for all and
    `kv_cache_memory_bytes` among the arguments of the engine. `union` belongs to the first batch size. `uneven`:
    averages at which budgets that differ between the layers are timed too, at the first batch size: does a step's time
    depend on their sum alone? `in_process`: vLLM's core runs in the engine's own process, so that the requests of a
    batch arrive before its first step and dense steps are made of the same rows as those of `off`. `engine` are
    arguments of vLLM's LLM, such as tensor_parallel_size=2 and enable_expert_parallel=True.

    Raises ValueError for a policy without a budget, a number below 1, more ranks than GPUs, or a checkpoint without
    the statistics that a policy reads, FileNotFoundError for a folder that is none, MissingExtraError without vLLM.
    """
    rules = {policy: parse(policy) for policy in policies}
    for policy, rule in rules.items():
        if rule.budget is None:
            raise ValueError(f"policy {policy!r} has no budget to sweep; use one that has, such as base:budget=16")
    if not batches or min(batches) < 1:
        raise ValueError(f"batch sizes {list(batches)} must be whole numbers of at least 1, and one at least")
    each = {policy: _each(budgets, batches) for policy, budgets in policies.items()}
    for policy, some in each.items():
        for budget in (*(b for budgets in some.values() for b in budgets), *uneven):
            rules[policy].checked_budget(budget)
    _check_ranks(list(rules.values()), uneven, engine)
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtraError("bench decode drives vLLM, which is not installed: pip install 'moebudget[vllm]'")
    union = UNIONS.get(name) if union is None else union
    needs = frozenset[str]().union(*(rule.needs for rule in rules.values())) - PLACEMENT  # vLLM knows its placement
    with _model(name, needs, stats) as (folder, random, file):
        config = json.loads(Path(folder, "config.json").read_text())
        plan = Plan(folder, random, tuple(batches), prompt, tokens, repeats, tuple(engine.items()), in_process)
        facts = moe_facts(config)
        engines: list[tuple[Any, ...]] = [(plan, None, None, {}, turn)] if off else []
        for policy, some in each.items():
            every: dict[int, list[int | tuple[int, ...]]] = {
                batch: list(dict.fromkeys((facts.experts, *budgets))) for batch, budgets in some.items()
            }
            every[plan.batches[0]] += [ramp(budget, len(facts.layers), facts.experts) for budget in uneven]
            engines.append((plan, policy, file, every, turn))
        with ThreadPoolExecutor(1 if turn is None else len(engines)) as threads:
            timed = list(threads.map(_apart, engines))
    without, found = (timed[0], timed[1:]) if off else ([], timed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stamp = {"gpu": provenance.device_name(device), **provenance.stamp(device)}
    return [
        {**row, **stamp}
        for policy, timings in zip(policies, found, strict=True)
        for row in rows_of(plan, Path(name).name, policy, timings, without, union)
    ]
