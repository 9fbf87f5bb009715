"""Timing of one offline vLLM engine at several batch sizes and budgets."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import torch

START = 900  # seconds that engines started side by side wait for the last one
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
log = logging.getLogger("vllm.moebudget")  # vLLM's handlers print it


@dataclass(frozen=True, slots=True)
class Plan:
    """Work of one engine: B requests of `prompt` random tokens each, and `tokens` decoded per request."""

    model: str  # a folder with config.json, and weights unless `random`
    random: bool
    batches: tuple[int, ...]
    prompt: int = 128
    tokens: int = 384
    repeats: int = 3  # turns over the budgets; the median of each budget's times counts
    engine: tuple[tuple[str, Any], ...] = ()  # further arguments of vLLM's LLM
    in_process: bool = (
        False  # vLLM's core runs in the caller's process: a batch's requests all arrive before its first step
    )


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of one batch size at one budget; None for the baseline, an engine without the plugin."""

    batch: int
    budget: int | None
    tpot_ms: float  # milliseconds per decode step, without the prompt
    tokens_per_s: float  # end to end, prompt included
    fetched: float | None = None  # distinct experts fetched per layer per step
    native_union: float | None = None
    most: float | None = None  # fetched per step in the layer that fetches most
    path: str = ""
    expert_bytes: int = 0
    layers: int = 0
    by_layer: tuple[float, ...] = ()
    budgets: tuple[int, ...] = ()  # one per layer, if they differ; `budget` is their mean
    tpots: tuple[float, ...] = ()  # milliseconds per step of each repeat
    digest: str = ""  # hash of all tokens in the order of the requests; empty if the repeats differ
    ranks: int = 1  # expert-parallel ranks
    by_rank: tuple[float, ...] = ()  # experts fetched per layer per step by each of several ranks
    fullest: float | None = None  # the same for the rank that fetches most in each layer and step

    @property
    def spread(self) -> float | None:
        """How much the repeats differ, max / min - 1; None for a single repeat or for a time of at most 0."""
        if len(self.tpots) < 2 or min(self.tpots) <= 0:
            return None
        return max(self.tpots) / min(self.tpots) - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """A lock for engines that start side by side: once all have started, they run one at a time, in order of request.

    An engine that asks again queues behind all that wait, so that equal engines alternate.
    """

    started: Any  # a manager's Barrier for all engines
    asked: Any  # a manager's Condition
    line: Any  # a manager's list, the queue: the first engine runs, the others wait

    @classmethod
    def of(cls, manager: Any, engines: int) -> Turn:
        return cls(manager.Barrier(engines), manager.Condition(), manager.list())

    @contextmanager
    def or_abort(self) -> Iterator[None]:
        """If something fails here, wake the engines that wait for this one."""
        try:
            yield
        except BaseException:
            self.started.abort()
            raise

    def __enter__(self) -> None:
        me = uuid.uuid4().hex
        with self.asked:
            self.line.append(me)
            self.asked.wait_for(lambda: self.line[0] == me)

    def __exit__(self, *_: object) -> None:
        with self.asked:
            self.line.pop(0)
            self.asked.notify_all()


class RandomWeights:
    """Extension of vLLM's workers: random weights at the scale of trained ones, different in every layer.

    vLLM's dummy weights are the same in all layers and at most .001: a router that rounds its scores to bfloat16 then
    sees them all as equal, and every row takes the first K experts.
    """

    model_runner: Any

    def randomize_weights(self, seed: int) -> None:
        """Norms 1, biases 0, matrices of unit gain; types other than float32, bfloat16 and float16 stay unchanged."""
        with torch.no_grad():
            for name, weight in self.model_runner.model.named_parameters():
                if weight.dtype not in FLOATS:
                    continue
                if weight.dim() > 1:
                    seed += 1
                    generator = torch.Generator(weight.device).manual_seed(seed)
                    weight.data.normal_(0, weight.shape[-1] ** -0.5, generator=generator)
                else:
                    weight.data.fill_(1 if "norm" in name else 0)


def decode(
    plan: Plan,
    policy: str | None,
    stats: str | None,
    budgets: Mapping[int, Sequence[int | tuple[int, ...]]],
    turn: Turn | None = None,
) -> list[Timing]:
    """Start one engine and time each batch size at its budgets. Without a policy and budgets it is the baseline.

    A tuple is one budget per layer. Turns over the budgets interleave, and with `turn` so do those of all engines:
    a slow moment of the machine then affects all of them.
    """
    if plan.in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {}
    if policy is not None:
        extra = {"moebudget": {"policy": policy, **({} if stats is None else {"stats": stats})}}
    llm = LLM(
        model=plan.model, load_format="dummy" if plan.random else "auto", skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=plan.prompt + plan.tokens + 16, max_num_seqs=max(plan.batches), enable_prefix_caching=False,
        additional_config=extra, seed=0, worker_extension_cls=f"{__name__}.RandomWeights", **dict(plan.engine),
    )  # fmt: skip
    if plan.random:
        llm.collective_rpc("randomize_weights", args=(0,))
    vocabulary = llm.llm_engine.model_config.get_vocab_size()

    def generate(batch: int, tokens: int) -> tuple[float, str]:
        """Seconds to decode `tokens` tokens for each of `batch` random prompts, and a digest of the tokens."""
        ids = np.random.default_rng(batch).integers(0, vocabulary, (batch, plan.prompt))
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        done = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        decoded = json.dumps([list(request.outputs[0].token_ids) for request in done])
        return seconds, hashlib.sha256(decoded.encode()).hexdigest()[:16]

    def times() -> Iterator[Timing]:
        for batch in plan.batches:
            settings: Sequence[int | tuple[int, ...] | None] = budgets.get(batch) or (None,)
            seconds: list[list[tuple[float, float]]] = [[] for _ in settings]
            digests: list[list[str]] = [[] for _ in settings]
            states: list[list[Any]] = [[] for _ in settings]
            for repeat in range(plan.repeats):
                with nullcontext() if turn is None else turn:
                    if repeat == 0:
                        generate(batch, 1 + plan.tokens)  # triggers late compilation
                    for budget, taken, hashes, counted in zip(settings, seconds, digests, states, strict=True):
                        if budget is not None:
                            value = list(budget) if isinstance(budget, tuple) else budget
                            llm.collective_rpc("moebudget_set", args=(value,))
                        generate(batch, 4)
                        first, _ = generate(batch, 1)
                        before = None if budget is None else llm.collective_rpc("moebudget_state")[0]
                        whole, digest = generate(batch, 1 + plan.tokens)
                        taken.append((first, whole))
                        hashes.append(digest)
                        if budget is not None:
                            counted.append((before, llm.collective_rpc("moebudget_state")[0]))
            for budget, taken, hashes, counted in zip(settings, seconds, digests, states, strict=True):
                counts = _counts(counted)
                counts["tpots"] = tpots = tuple(1e3 * (whole - first) / plan.tokens for first, whole in taken)
                tpot, speed = median(tpots), batch * (1 + plan.tokens) / median(whole for _, whole in taken)
                counts["digest"] = hashes[0] if len(set(hashes)) == 1 else ""
                if isinstance(budget, tuple):
                    counts["budgets"], budget = budget, round(sum(budget) / len(budget))
                timing = Timing(batch, budget, tpot, speed, **counts)
                log.info("%s", timing)
                yield timing

    try:
        if turn is not None:
            turn.started.wait(START)
        timings = list(times())
        if turn is not None:
            with suppress(BrokenBarrierError):  # another engine failed
                turn.started.wait(START)  # shutting an engine down would disturb the last one to be timed
        return timings
    finally:
        if not hasattr(llm.llm_engine.engine_core, "engine_core"):  # an engine core in this process ends with it
            llm.llm_engine.engine_core.shutdown()  # otherwise this process waits forever for the engine's


def _counts(states: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """Counts of the plugin between the two states of each turn."""
    if not states:
        return {}
    layers, after = range(len(states[0][0]["per_layer"])), states[-1][1]
    change = {
        name: [sum(b["per_layer"][i][name] - a["per_layer"][i][name] for a, b in states) for i in layers]
        for name in ("steps", "fetched", "native_union")
    }
    steps = sum(change["steps"])
    by_layer = tuple(f / s for f, s in zip(change["fetched"], change["steps"], strict=True))
    return {
        "fetched": sum(change["fetched"]) / steps,
        "native_union": sum(change["native_union"]) / steps,
        "most": max(by_layer),
        "by_layer": by_layer,
        "path": after["path"],
        "expert_bytes": after["fetched_bytes_per_expert"],
        "layers": len(layers),
        **_by_rank([(a["expert_parallel"], b["expert_parallel"]) for a, b in states], steps),
    }


def _by_rank(states: Sequence[tuple[dict[str, Any] | None, dict[str, Any] | None]], steps: float) -> dict[str, Any]:
    """Experts fetched per layer per step by each expert-parallel rank; empty without such ranks."""
    both = [(a, b) for a, b in states if a is not None and b is not None]
    if not both:
        return {}
    ranks = both[0][1]["ranks"]
    return {
        "ranks": ranks,
        "by_rank": tuple(sum(b["fetched"][r] - a["fetched"][r] for a, b in both) / steps for r in range(ranks)),
        "fullest": sum(b["fetched_most"] - a["fetched_most"] for a, b in both) / steps,
    }
