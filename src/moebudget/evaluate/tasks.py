"""Exact-match accuracy in decode mode: native prefill of the prompts, then every answer token under the policy."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from moebudget.calibrate.data import TokenizerLike
from moebudget.core.counters import Counters
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.engines.transformers.attach import attach
from moebudget.evaluate.text import require_active, sum_counters


class Item(Protocol):
    """A question whose answer continues the prompt."""

    @property
    def task(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def target(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One policy's hits, in the order of the items."""

    policy: Policy
    hits: Tensor  # [n] bool
    tasks: tuple[str, ...]  # [n] the task of each item
    counters: Counters

    @property
    def accuracy(self) -> dict[str, float]:
        """Percent correct, by task."""
        return {t: 100 * float(self.hits[self._of(t)].double().mean()) for t in dict.fromkeys(self.tasks)}

    @property
    def average(self) -> float:
        """Unweighted mean over tasks, in percent."""
        return sum(self.accuracy.values()) / len(self.accuracy)

    @property
    def half_width(self) -> float:
        """Half of the 95 % confidence interval of `average`, in points (binomial within each task)."""
        variance: float = 0.0
        for task, p in self.accuracy.items():
            n = int(self._of(task).sum())
            share = (p / 100 * n + 1) / (n + 2)  # keeps the interval open at 0 and 100 %
            variance += share * (1 - share) / n
        return 196 * math.sqrt(variance) / len(self.accuracy)

    def _of(self, task: str) -> Tensor:
        return torch.tensor([t == task for t in self.tasks])


def pack_lanes(lengths: Sequence[int], lanes: int, width: int, refill: bool = True) -> Tensor:
    """Answers of these lengths -> decode steps [S, lanes] of rows `item * width + position`, -1 where empty.

    A lane takes the next answer when it has finished one, so the batch is constant until the answers run out. Without
    `refill`, `lanes` answers start together and the next ones start when all have finished: the batch drains.
    """
    ends, table = [0] * lanes, list[tuple[int, int, int]]()
    for item, length in enumerate(lengths):
        if not refill and item % lanes == 0:
            ends = [max(ends)] * lanes
        lane = min(range(lanes), key=lambda x: (ends[x], x)) if refill else item % lanes
        table += [(ends[lane] + j, lane, item * width + j) for j in range(length)]
        ends[lane] += length
    steps = torch.full((max(ends), lanes), -1, dtype=torch.int64)
    for step, lane, row in table:
        steps[step, lane] = row
    return steps


@torch.no_grad()
def evaluate_tasks(
    model: nn.Module,
    policies: Sequence[Policy],
    stats: Stats | None,
    items: Sequence[Item],
    tokenizer: TokenizerLike,
    *,
    batch: int = 16,
    chunk: int = 96,
    start_id: int | None = None,
    refill: bool = True,
    quiet: bool = False,
) -> list[TaskResult]:
    """Answer every item with `batch` items in flight.

    The prompt is prefilled with native routing, except for its last token, once for all policies. The last prompt
    token and the answer are decode steps, so the policy also applies to answers of one token. Items keep their order,
    and the next item takes the lane of a finished one (a constant batch, see `pack_lanes`; without `refill` a batch
    drains before the next one starts). Answers are teacher forced: an item is a hit if every token of its target is
    the most likely one after the true tokens before it, as in greedy decoding. Only routes of batch mates that have
    already failed can differ from free decoding. `start_id` is put before every prompt. `chunk` items go through the
    model at a time.
    """
    if not items:
        raise ValueError("no task items to evaluate")
    device = next(model.parameters()).device
    encoded = [_encode(tokenizer, item, start_id) for item in items]
    groups = _length_groups([len(target) for _, target in encoded], chunk)
    hits = torch.zeros(len(policies), len(items), dtype=torch.bool)
    counters: list[list[Counters]] = [[] for _ in policies]
    with Progress(console=Console(stderr=True, quiet=quiet)) as progress:
        bar = progress.add_task("tasks", total=len(groups) * len(policies))
        for group in groups:
            prompts, targets = [encoded[i][0] for i in group], [encoded[i][1] for i in group]
            cache, mask = prefill(model, prompts, device)
            width = max(map(len, targets))
            inputs = torch.zeros(len(group), width, dtype=torch.int64)
            wanted = torch.full((len(group), width), -1)
            for row, (prompt, target) in enumerate(zip(prompts, targets, strict=True)):
                inputs[row, : len(target)] = torch.tensor([prompt[-1], *target[:-1]])
                wanted[row, : len(target)] = torch.tensor(target)
            steps = pack_lanes([len(t) for t in targets], min(batch, len(group)), width, refill).to(device)
            inputs, wanted = inputs.to(device), wanted.to(device)
            full = torch.cat([mask, torch.ones_like(inputs)], 1)
            positions = full.cumsum(-1)[:, mask.shape[1] :] - 1
            for p, policy in enumerate(policies):
                with attach(model, policy, stats) as run, run.decode_steps(steps):
                    logits = model(
                        input_ids=inputs,
                        attention_mask=full,
                        position_ids=positions,
                        use_cache=True,
                        **{cache_argument(model): copy.deepcopy(cache)},
                    ).logits
                    counters[p].append(run.counters)
                correct = (logits.argmax(-1) == wanted) | (wanted < 0)
                hits[p, group] = correct.all(-1).cpu()
                progress.advance(bar)
    results = []
    for p, policy in enumerate(policies):
        total = sum_counters(counters[p])
        require_active(policy, total)
        results.append(TaskResult(policy, hits[p], tuple(i.task for i in items), total))
    return results


def _encode(tokenizer: TokenizerLike, item: Item, start_id: int | None) -> tuple[list[int], list[int]]:
    prompt = list(tokenizer(item.prompt, add_special_tokens=False)["input_ids"])
    target = list(tokenizer(item.target, add_special_tokens=False)["input_ids"])
    prompt = [*([] if start_id is None else [start_id]), *prompt]
    if len(prompt) < 2 or not target:
        raise ValueError(
            f"task item {item.prompt!r} -> {item.target!r}: the prompt needs at least 2 tokens and the target 1"
        )
    return prompt, target


def _length_groups(lengths: Sequence[int], chunk: int) -> list[list[int]]:
    """Indices in chunks, short answers apart from long ones (padding is computed too), each in order."""
    middle = 16
    groups = []
    for part in ([i for i, n in enumerate(lengths) if n <= middle], [i for i, n in enumerate(lengths) if n > middle]):
        groups += [part[i : i + chunk] for i in range(0, len(part), chunk)]
    return groups


def prefill(model: nn.Module, prompts: list[list[int]], device: torch.device) -> tuple[Any, Tensor]:
    """Left-padded prompts without their last token -> (filled cache, attention mask [n, P])."""
    from transformers import DynamicCache

    longest = max(map(len, prompts)) - 1
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) + 1 :] = torch.tensor(prompt[:-1])
        mask[row, longest - len(prompt) + 1 :] = 1
    ids, mask, cache = ids.to(device), mask.to(device), DynamicCache(config=model.config)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    arguments = {cache_argument(model): cache, "use_cache": True}
    backbone = getattr(model, "base_model", model)
    backbone(input_ids=ids, attention_mask=mask, position_ids=positions, **arguments)
    return cache, mask


def cache_argument(model: nn.Module) -> str:
    """The name of the cache argument in this release of transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
