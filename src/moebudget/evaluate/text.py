"""Held-out loss, agreement and fetched experts in decode mode, for many policies on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from moebudget.core.counters import Counters
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats
from moebudget.engines.transformers.attach import attach
from moebudget.engines.transformers.teacher_forcing import pieces, teacher_forced, window_loss


class InactivePolicyError(RuntimeError):
    """A policy was active in no decode step, so its numbers would be those of native routing."""


@dataclass(frozen=True, slots=True)
class TextResult:
    """Results of one policy on held-out text, averaged over the predicted tokens of each sequence."""

    policy: Policy
    nll: Tensor  # [n] float64, mean loss of a sequence in nats per token
    agreement: Tensor  # [n] float64, share of positions with the same most likely token as native routing
    by_position: Tensor  # [P] float64, the same by position after the prefill, over the windows
    tokens: int
    counters: Counters
    best: Tensor | None = None  # [n, S] int64, the most likely tokens; for native routing only


@torch.no_grad()
def evaluate_text(
    model: nn.Module,
    policies: Sequence[Policy],
    stats: Stats | None,
    windows: Tensor,
    *,
    batch: int = 16,
    prefill: int = 1,
    native_best: Tensor | None = None,
    quiet: bool = False,
) -> list[TextResult]:
    """Teacher-forced loss of windows [n, S + 1]: every position of `batch` sequences is one decode step.

    All positions of one or more batches go through the model at once; each Mixture-of-Experts layer decides step by
    step, which equals decoding step by step with a cache. The first `prefill` positions keep their native routes and
    do not count. The last batch may be smaller. If native routing is not among the policies, `native_best` [n, S], the
    `best` of an earlier result on the same windows, saves its pass. Raises InactivePolicyError if a policy was active
    in no decode step.
    """
    if not 1 <= prefill < windows.shape[1] - 1:
        raise ValueError(f"prefill={prefill} must be between 1 and {windows.shape[1] - 2}, the positions of a window")
    if not len(windows):
        raise ValueError("no windows of text to evaluate")
    device = next(model.parameters()).device
    sums = [_Sums() for _ in policies]
    has_native = any(policy.name == "native" for policy in policies)
    console = Console(stderr=True, quiet=quiet)
    parts = list(pieces(windows, batch))
    best_parts = [None] * len(parts) if native_best is None or has_native else list(pieces(native_best, batch))
    for part, best_part in track(list(zip(parts, best_parts, strict=True)), "held-out text", console=console):
        ids, targets, steps = teacher_forced(part.to(device), prefill, batch)
        native_tokens: Tensor | None = None if best_part is None else best_part.to(device)
        if native_tokens is None and not has_native:
            native_tokens = model(input_ids=ids, use_cache=False).logits.argmax(-1)
        for policy, total in sorted(zip(policies, sums, strict=True), key=lambda pair: pair[0].name != "native"):
            with attach(model, policy, stats) as run, run.decode_steps(steps):
                logits = model(input_ids=ids, use_cache=False).logits
                total.counters.append(run.counters)
            total.nll.append(window_loss(logits, targets, prefill))
            best = logits.argmax(-1)
            native_tokens = best if native_tokens is None else native_tokens  # the native policy comes first
            if policy.name == "native":
                total.best.append(best.cpu())
            same = (best == native_tokens)[:, prefill:].double().cpu()
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
    """Raise InactivePolicyError if the counters hold no decode step."""
    if not counters.steps:
        raise InactivePolicyError(
            f"policy {policy.name!r} was active in 0 decode steps: all rows kept their native routes, so its numbers "
            "would be those of native routing"
        )
