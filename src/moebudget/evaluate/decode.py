"""Greedy decoding in a constant batch: the next request takes the slot of a finished one at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from moebudget.core.counters import Counters
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.engines.transformers.attach import attach
from moebudget.evaluate.tasks import cache_argument, prefill
from moebudget.evaluate.text import require_active, sum_counters


class UnsupportedCacheError(ValueError):
    """A cache whose rows cannot be replaced one by one."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt of at least two tokens, the maximum number of tokens to generate, and texts that end the answer."""

    prompt: tuple[int, ...]
    most: int
    stops: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Decoded:
    """Answers in the order of the requests. `full` counts steps of exactly `batch` rows, `tail` those of fewer."""

    tokens: list[list[int]]
    texts: list[str]
    full: Counters | None
    tail: Counters | None

    @property
    def counters(self) -> Counters:
        return sum_counters([part for part in (self.full, self.tail) if part is not None])


@dataclass(slots=True)
class _Lane:
    index: int  # of its request
    token: int  # to feed next
    answer: list[int] = field(default_factory=list)
    done: bool = False


@torch.no_grad()
def decode(
    model: nn.Module,
    policy: Policy,
    stats: Stats | None,
    requests: Sequence[Request],
    tokenizer: Any,
    *,
    batch: int = 16,
    constant: bool = True,
    quiet: bool = False,
) -> Decoded:
    """Answer the requests greedily, `batch` in flight; all rows of a step decide together.

    Prompts are prefilled with native routing, except for the last token. That token is the first decode step, so the
    policy also applies to answers of one token. While requests wait, every step has `batch` rows; then the batch
    drains, which `Decoded.tail` counts separately. Without `constant`, `batch` requests start together and the next
    ones start when all have finished; finished rows do not vote.

    Raises ValueError for a request that cannot be decoded, UnsupportedCacheError if `constant` is on and the model's
    cache holds anything but keys and values of all tokens (a sliding window, a state), InactivePolicyError.
    """
    if not requests:
        raise ValueError("no requests to decode")
    for request in requests:
        if len(request.prompt) < 2 or request.most < 1:
            raise ValueError(f"a request needs at least 2 prompt tokens and 1 token to generate: {request!r}")
    ends = ending_ids(model, tokenizer)
    queue, lanes = deque(range(len(requests))), list[_Lane]()
    tokens: list[list[int]] = [[] for _ in requests]
    parts: dict[bool, list[Counters]] = {True: [], False: []}
    flight = _Flight(model)
    with (
        attach(model, policy, stats, finished_ids=frozenset()) as run,
        Progress(console=Console(stderr=True, quiet=quiet)) as progress,
    ):
        bar = progress.add_task("answers", total=len(requests))
        was_full = None
        while queue or not all(lane.done for lane in lanes):
            going = [i for i, lane in enumerate(lanes) if not lane.done]
            if constant and len(going) < len(lanes):
                flight.keep(going)
                lanes = [lanes[i] for i in going]
            if queue and (len(lanes) < batch if constant else not going):
                free = batch - len(lanes) if constant else batch
                new = [queue.popleft() for _ in range(min(free, len(queue)))]
                lanes = (lanes if constant else []) + [_Lane(i, requests[i].prompt[-1]) for i in new]
                flight.join([list(requests[i].prompt) for i in new], fresh=not constant or not going)
            going = [i for i, lane in enumerate(lanes) if not lane.done]
            full = len(going) == batch
            if was_full not in (None, full):
                parts[not full].append(run.counters)
                run.reset()
            was_full = full
            with run.decode_steps(torch.tensor([going], device=flight.device)):
                best = flight.step([lane.token for lane in lanes])
            for i in going:
                lane = lanes[i]
                lane.token = best[i]
                lane.answer.append(best[i])
                lane.done = _ended(lane.answer, requests[lane.index], tokenizer, ends)
                if lane.done:
                    tokens[lane.index] = lane.answer
                    progress.advance(bar)
        parts[bool(was_full)].append(run.counters)
    full_, tail = (sum_counters(parts[key]) if parts[key] else None for key in (True, False))
    texts = [_text(answer, request, tokenizer, ends) for answer, request in zip(tokens, requests, strict=True)]
    decoded = Decoded(tokens, texts, full_, tail)
    require_active(policy, decoded.counters)
    return decoded


class _Flight:
    """Cache and mask [n, L] of the rows in flight; every row is aligned to the right."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.device = model, next(model.parameters()).device
        self.cache: Any = None
        self.mask = torch.zeros(0, 0, dtype=torch.int64, device=self.device)

    def join(self, prompts: list[list[int]], fresh: bool) -> None:
        """Prefill the prompts without their last tokens; append their rows to those in flight, or replace them."""
        cache, mask = prefill(self.model, prompts, self.device)
        if not fresh:
            cache, mask = _joined([(_states(self.cache), self.mask), (_states(cache), mask)])
        self.cache, self.mask = cache, mask

    def keep(self, rows: list[int]) -> None:
        """Drop all rows except these."""
        if not rows:
            self.cache, self.mask = None, self.mask[:0]
            return
        kept = [(keys[rows], values[rows]) for keys, values in _states(self.cache)]
        self.cache, self.mask = _joined([(kept, self.mask[rows])])

    def step(self, tokens: list[int]) -> list[int]:
        """Feed one token per row; return the most likely next tokens."""
        ids = torch.tensor(tokens, device=self.device)[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        logits = self.model(
            input_ids=ids,
            attention_mask=self.mask,
            position_ids=self.mask.sum(-1, keepdim=True) - 1,
            use_cache=True,
            **{cache_argument(self.model): self.cache},
        ).logits
        return [int(token) for token in logits[:, -1].argmax(-1)]


States = list[tuple[Tensor, Tensor]]  # keys and values [n, heads, L, d] of every layer


def _states(cache: Any) -> States:
    from transformers.cache_utils import DynamicLayer

    unsupported = {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    if unsupported:
        raise UnsupportedCacheError(
            f"rows of a cache with {', '.join(sorted(unsupported))} cannot be replaced one by one, so the batch "
            "cannot be constant; use constant=False (eval --draining) to let batches drain"
        )
    return [(layer.keys, layer.values) for layer in cache.layers]


def _joined(parts: list[tuple[States, Tensor]]) -> tuple[Any, Tensor]:
    """One cache and mask of several, aligned at the right, without columns that belong to no row."""
    from transformers import DynamicCache

    longest = max(int(mask.sum(-1).max()) for _, mask in parts)

    def fit(tensor: Tensor, dim: int) -> Tensor:
        extra = longest - tensor.shape[dim]
        if extra <= 0:
            return tensor.narrow(dim, -extra, longest)
        shape = list(tensor.shape)
        shape[dim] = extra
        return torch.cat([tensor.new_zeros(shape), tensor], dim)

    cache = DynamicCache()
    for number, layers in enumerate(zip(*(states for states, _ in parts), strict=True)):
        keys, values = (torch.cat([fit(layer[which], 2) for layer in layers]) for which in (0, 1))
        cache.update(keys, values, number)
    return cache, torch.cat([fit(mask, 1) for _, mask in parts])


def ending_ids(model: nn.Module, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer, from the generation settings and the tokenizer."""
    eos: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    eos_ids = eos if isinstance(eos, list | tuple) else [eos]
    return frozenset(i for i in (*eos_ids, tokenizer.eos_token_id) if i is not None)


def _ended(answer: list[int], request: Request, tokenizer: Any, ends: frozenset[int]) -> bool:
    if answer[-1] in ends or len(answer) >= request.most:
        return True
    if not request.stops:
        return False
    window = max(len(stop.encode()) for stop in request.stops) + 4  # a token is at least a byte
    tail = tokenizer.decode(answer[-window:], skip_special_tokens=True)
    return any(stop in tail for stop in request.stops)


def _text(answer: list[int], request: Request, tokenizer: Any, ends: frozenset[int]) -> str:
    text: str = tokenizer.decode([i for i in answer if i not in ends], skip_special_tokens=True)
    for stop in request.stops:
        text = text.partition(stop)[0]
    return text
