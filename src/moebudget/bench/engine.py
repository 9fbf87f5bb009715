"""One vLLM engine, driven offline and timed at several batch sizes and budgets."""

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

START = 900  # seconds that engines started side by side wait for the last of them
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
log = logging.getLogger("vllm.moebudget")  # vLLM's handlers print it


@dataclass(frozen=True, slots=True)
class Plan:
    """What one engine runs: B requests of `prompt` tokens each, `tokens` decoded, whatever they are."""

    model: str  # a folder with config.json, and weights unless `random`
    random: bool
    batches: tuple[int, ...]
    prompt: int = 128
    tokens: int = 384
    repeats: int = 3  # turns over the budgets; of each the median counts
    engine: tuple[tuple[str, Any], ...] = ()  # further arguments of vLLM's LLM
    in_process: bool = False  # vLLM's core in the process that asks: a batch's requests arrive before its first step


@dataclass(frozen=True, slots=True)
class Timing:
    """One batch size at one budget; None: as the engine was started without the plugin."""

    batch: int
    budget: int | None
    tpot_ms: float  # of a step, without the prompt
    tokens_per_s: float  # end to end, prompt included
    fetched: float | None = None  # distinct experts a layer and step
    native_union: float | None = None
    most: float | None = None
    path: str = ""
    expert_bytes: int = 0
    layers: int = 0
    by_layer: tuple[float, ...] = ()
    budgets: tuple[int, ...] = ()  # one a layer, where they differ; `budget` is their mean
    tpots: tuple[float, ...] = ()  # of each repeat alone, ms
    digest: str = ""  # of all tokens in the order of the requests; empty if the repeats differ
    ranks: int = 1  # that experts are spread over
    by_rank: tuple[float, ...] = ()  # fetched a layer and step by each of several ranks
    fullest: float | None = None  # the same of the rank that fetches most in each layer and step

    @property
    def spread(self) -> float | None:
        """How far the repeats' times lie apart, max / min - 1; None for a single one or one below 0."""
        if len(self.tpots) < 2 or min(self.tpots) <= 0:
            return None
        return max(self.tpots) / min(self.tpots) - 1


@dataclass(frozen=True, slots=True)
class Turn:
    """Engines that start side by side wait for each other; then one at a time runs, in the order in which they ask.

    An engine that asks again stands behind all that wait, so that equal engines alternate.
    """

    started: Any  # a manager's Barrier for all of them
    asked: Any  # a manager's Condition
    line: Any  # a manager's list: who runs, and who waits

    @classmethod
    def of(cls, manager: Any, engines: int) -> Turn:
        return cls(manager.Barrier(engines), manager.Condition(), manager.list())

    @contextmanager
    def or_abort(self) -> Iterator[None]:
        """Wake the other engines, which wait for this one, if something fails here."""
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
    """Extension of vLLM's workers: weights of the scale of trained ones, other ones in every layer.

    vLLM's own dummy weights are the same in all layers, and at most .001: a router that rounds its scores to bfloat16
    then finds them all equal, and every row takes the first K experts.
    """

    model_runner: Any

    def randomize_weights(self, seed: int) -> None:
        """Norms 1, biases 0, matrices of unit gain; types other than float32, bfloat16 and float16 stay."""
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
    """Start one engine and time each batch size at its budgets. Without a policy and budgets the plugin stays out.

    A tuple is one budget a layer. Turns over the budgets interleave, and with `turn` those of all engines do, so that
    a slow moment of the machine hits all alike.
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
        """Seconds for `batch` prompts of their own and `tokens` tokens each, and a digest of these."""
        ids = np.random.default_rng(batch).integers(0, vocabulary, (batch, plan.prompt))
        prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        done = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        made = json.dumps([list(request.outputs[0].token_ids) for request in done])
        return seconds, hashlib.sha256(made.encode()).hexdigest()[:16]

    def times() -> Iterator[Timing]:
        for batch in plan.batches:
            asked: Sequence[int | tuple[int, ...] | None] = budgets.get(batch) or (None,)
            seconds: list[list[tuple[float, float]]] = [[] for _ in asked]
            digests: list[list[str]] = [[] for _ in asked]
            states: list[list[Any]] = [[] for _ in asked]
            for repeat in range(plan.repeats):
                with nullcontext() if turn is None else turn:
                    if repeat == 0:
                        generate(batch, 1 + plan.tokens)  # compiles what is compiled late
                    for budget, taken, made, seen in zip(asked, seconds, digests, states, strict=True):
                        if budget is not None:
                            value = list(budget) if isinstance(budget, tuple) else budget
                            llm.collective_rpc("moebudget_set", args=(value,))
                        generate(batch, 4)
                        first, _ = generate(batch, 1)
                        before = None if budget is None else llm.collective_rpc("moebudget_state")[0]
                        whole, digest = generate(batch, 1 + plan.tokens)
                        taken.append((first, whole))
                        made.append(digest)
                        if budget is not None:
                            seen.append((before, llm.collective_rpc("moebudget_state")[0]))
            for budget, taken, made, seen in zip(asked, seconds, digests, states, strict=True):
                counts = _counts(seen)
                counts["tpots"] = tpots = tuple(1e3 * (whole - first) / plan.tokens for first, whole in taken)
                tpot, speed = median(tpots), batch * (1 + plan.tokens) / median(whole for _, whole in taken)
                counts["digest"] = made[0] if len(set(made)) == 1 else ""
                if isinstance(budget, tuple):
                    counts["budgets"], budget = budget, round(sum(budget) / len(budget))
                timing = Timing(batch, budget, tpot, speed, **counts)
                log.info("%s", timing)
                yield timing

    try:
        if turn is not None:
            turn.started.wait(START)
        found = list(times())
        if turn is not None:
            with suppress(BrokenBarrierError):  # another engine failed
                turn.started.wait(START)  # taking an engine down would disturb the last to be timed
        return found
    finally:
        if not hasattr(llm.llm_engine.engine_core, "engine_core"):  # one in this process ends with it
            llm.llm_engine.engine_core.shutdown()  # or this process waits for the engine's forever


def _counts(states: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    """What the plugin counted between the two states of each turn."""
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
    """What each expert-parallel rank fetched, a layer and step; nothing without such ranks."""
    both = [(a, b) for a, b in states if a is not None and b is not None]
    if not both:
        return {}
    ranks = both[0][1]["ranks"]
    return {
        "ranks": ranks,
        "by_rank": tuple(sum(b["fetched"][r] - a["fetched"][r] for a, b in both) / steps for r in range(ranks)),
        "fullest": sum(b["fetched_most"] - a["fetched_most"] for a, b in both) / steps,
    }
