"""Teacher forcing: decode steps built from windows of text, and the loss of each window."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

SEQUENCES = 16  # windows per forward pass; a larger batch is one forward pass by itself


def aligned_steps(decode: Tensor, batch: int) -> Tensor:
    """decode [n, S] bool -> rows [n / B * S, B] of the decode steps; a step is one position of `batch` sequences."""
    n, s = decode.shape
    batch = min(batch, n)
    rows = torch.where(decode, torch.arange(n * s, device=decode.device).view(n, s), -1)
    rows = torch.nn.functional.pad(rows, (0, 0, 0, -n % batch), value=-1)  # the last batch may be smaller
    return rows.view(-1, batch, s).transpose(1, 2).flatten(0, 1).contiguous()


def pieces(windows: Tensor, batch: int) -> Iterator[Tensor]:
    """Windows [n, S + 1] split into the inputs of forward passes: about SEQUENCES windows each, in whole batches."""
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
