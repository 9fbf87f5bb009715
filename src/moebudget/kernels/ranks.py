"""Experts that each rank of an expert-parallel engine fetches in a step, counted in one small launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moebudget.kernels.batch import DECODE

BLOCK = 1024  # ids that are read at once


def count_ranks(ids: Tensor, rows: Tensor, device: Tensor, totals: Tensor) -> None:
    """Add a step to totals [R + 1] float64: the experts that voting rows run, per rank, and the largest of these.

    ids [T, K], rows [T] int8 RowKind, device [N] int64: the rank of each expert. The torch form, for the CPU, is
    `engines.vllm.ranks.count_fetched`.
    """
    if not len(ids):
        return
    n, ranks = len(device), len(totals) - 1
    _count_ranks[(1,)](
        ids, rows, device, totals, ids.numel(), n, ranks,
        K=ids.shape[1], NP=triton.next_power_of_2(n + 1), RP=triton.next_power_of_2(ranks), SIZE=BLOCK,
    )  # fmt: skip


@triton.jit
def _count_ranks(
    ids, rows, device, totals, count, N, R,
    K: tl.constexpr, NP: tl.constexpr, RP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    expert, rank, slot = tl.arange(0, NP), tl.arange(0, RP), tl.arange(0, SIZE)
    hits = tl.zeros([NP], tl.int32)
    for start in range(0, count, SIZE):
        at = start + slot
        kind = tl.load(rows + at // K, mask=at < count, other=0).to(tl.int32)
        hits += tl.histogram(tl.load(ids + at, mask=kind == DECODE, other=N).to(tl.int32), NP)
    where = tl.load(device + expert, mask=expert < N, other=-1).to(tl.int32)
    here = (where[None, :] == rank[:, None]) & (hits > 0)[None, :]
    fetched = tl.sum(here.to(tl.int32), 1)
    before = tl.load(totals + rank, mask=rank < R)
    tl.store(totals + rank, before + fetched.to(tl.float64), mask=rank < R)
    tl.store(totals + R, tl.load(totals + R) + tl.max(fetched, 0).to(tl.float64))
