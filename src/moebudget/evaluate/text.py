"""Held-out loss, agreement and fetched experts in decode mode, for many policies on the same batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from moebudget.integrations.transformers import attach
from moebudget.policy import Policy
from moebudget.runtime import Counters
from moebudget.stats import Stats

SEQUENCES = 16  # that go through the model at once; a larger batch goes alone


class InactivePolicyError(RuntimeError):
    """A policy was active in 0 decode steps, so its numbers would be those of the unchanged model."""


@dataclass(frozen=True, slots=True)
class TextResult:
    """What one policy did to held-out text; sums over the predicted tokens of each sequence."""

    policy: Policy
    nll: Tensor  # [n] float64, mean loss of a sequence in nats a token
    agreement: Tensor  # [n] float64, share of positions whose most likely token is the dense model's
    by_position: Tensor  # [P] float64, the same by position after the prefill, over the windows
    tokens: int
    counters: Counters
    best: Tensor | None = None  # [n, S] int64 the most likely tokens, of the dense model alone


def aligned_steps(decode: Tensor, batch: int) -> Tensor:
    """decode [n, S] bool -> rows [n / B * S, B] of the decode steps: one position of `batch` sequences is one step."""
    n, s = decode.shape
    batch = min(batch, n)
    rows = torch.where(decode, torch.arange(n * s, device=decode.device).view(n, s), -1)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -n % batch), value=-1)  # the last batch may be smaller
    return rows.view(-1, batch, s).transpose(1, 2).flatten(0, 1).contiguous()


def pieces(windows: Tensor, batch: int) -> Iterator[Tensor]:
    """Windows [n, S + 1] in the pieces that go through the model at once: SEQUENCES windows, in whole batches."""
    yield from windows.split(max(batch, SEQUENCES // batch * batch))


def teacher_forced(windows: Tensor, prefill: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Windows [n, S + 1] -> tokens and targets [n, S], and rows [., B] of the decode steps after `prefill` tokens."""
    ids, targets = windows[:, :-1], windows[:, 1:]
    decode = torch.ones_like(ids, dtype=torch.bool)
    decode[:, :prefill] = False
    return ids, targets, aligned_steps(decode, batch)


def window_loss(logits: Tensor, targets: Tensor, prefill: int) -> Tensor:
    """Logits [b, S, V], targets [b, S] -> each window's mean loss after `prefill` tokens, float64 [b], on the CPU."""
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return loss.view_as(targets)[:, prefill:].double().mean(-1).cpu()


@torch.no_grad()
def evaluate_text(
    model: nn.Module,
    policies: Sequence[Policy],
    stats: Stats | None,
    windows: Tensor,
    *,
    batch: int = 16,
    prefill: int = 1,
    dense_best: Tensor | None = None,
    quiet: bool = False,
) -> list[TextResult]:
    """Teacher-forced loss of windows [n, S + 1]: every position of `batch` sequences is one decode step.

    All positions of one or more batches go through the model at once; each Mixture-of-Experts layer decides step by
    step, which equals decoding step by step with a cache. The first `prefill` positions keep the model's routes
    and do not count. The last batch may be smaller. `dense_best` [n, S], the `best` of an earlier result on the same
    windows, saves the dense model's pass if it is not among the policies. Raises InactivePolicyError if a policy
    decided nothing.
    """
    if not 1 <= prefill < windows.shape[1] - 1:
        raise ValueError(f"prefill={prefill} must lie between 1 and {windows.shape[1] - 2}, the positions of a window")
    if not len(windows):
        raise ValueError("no windows of text to evaluate")
    device = next(model.parameters()).device
    sums = [_Sums() for _ in policies]
    has_dense = any(policy.name == "dense" for policy in policies)
    console = Console(stderr=True, quiet=quiet)
    parts = list(pieces(windows, batch))
    known = [None] * len(parts) if dense_best is None or has_dense else list(pieces(dense_best, batch))
    for part, bests in track(list(zip(parts, known, strict=True)), "held-out text", console=console):
        ids, targets, steps = teacher_forced(part.to(device), prefill, batch)
        one: Tensor | None = None if bests is None else bests.to(device)
        if one is None and not has_dense:
            one = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        for policy, total in sorted(zip(policies, sums, strict=True), key=lambda pair: pair[0].name != "dense"):
            with attach(model, policy, stats) as run, run.decode_steps(steps):
                logits = model(input_ids=ids, use_cache=False).logits
                total.counters.append(run.counters)
            total.nll.append(window_loss(logits, targets, prefill))
            best = logits.argmax(-1)
            one = best if one is None else one  # the dense policy comes first
            if policy.name == "dense":
                total.best.append(best.cpu())
            same = (best == one)[:, prefill:].double().cpu()
            total.agreement.append(same.mean(-1))
            total.by_position.append(same.sum(0))
    return [_result(p, s, windows.shape[1] - 1 - prefill) for p, s in zip(policies, sums, strict=True)]


class _Sums:
    def __init__(self) -> None:
        self.nll: list[Tensor] = []
        self.agreement: list[Tensor] = []
        self.by_position: list[Tensor] = []
        self.counters: list[Counters] = []
        self.best: list[Tensor] = []


def _result(policy: Policy, sums: _Sums, positions: int) -> TextResult:
    counters = sum_counters(sums.counters)
    require_active(policy, counters)
    nll = torch.cat(sums.nll)
    by_position = torch.stack(sums.by_position).sum(0) / len(nll)
    best = torch.cat(sums.best) if sums.best else None
    return TextResult(policy, nll, torch.cat(sums.agreement), by_position, len(nll) * positions, counters, best)


def sum_counters(parts: Sequence[Counters]) -> Counters:
    """Add up counters of the same layers."""
    names = parts[0].totals
    by_layer = tuple(map(sum, zip(*(p.by_layer for p in parts), strict=True)))
    return Counters(parts[0].layers, {name: sum(p.totals[name] for p in parts) for name in names}, by_layer)


def require_active(policy: Policy, counters: Counters) -> None:
    """Raise InactivePolicyError if the policy saw no decode step."""
    if not counters.steps:
        raise InactivePolicyError(
            f"policy {policy.name!r} was active in 0 decode steps: everything was prefill, which keeps the model's "
            "own routes, so any number would be the dense model's"
        )
