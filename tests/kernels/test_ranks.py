"""Experts fetched per rank: the kernel (in Triton's interpreter without a GPU) and the torch form against sets."""

from __future__ import annotations

import pytest
import torch

from moebudget.core.types import RowKind
from moebudget.engines.vllm.ranks import count_fetched
from moebudget.kernels.ranks import count_ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ((1, 8, 2, 2), (16, 128, 8, 8), (5, 60, 4, 3), (300, 64, 6, 1), (7, 512, 8, 5))  # T, N, K, R


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [count_ranks, count_fetched])
def test_each_rank_counts_the_experts_that_it_holds(count, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    t, n, k, ranks = shape
    g = torch.Generator().manual_seed(t)
    where = torch.randint(0, ranks, (n,), generator=g)
    expected, totals = [0] * (ranks + 1), torch.zeros(ranks + 1, dtype=torch.float64, device=DEVICE)
    for step in range(3):
        ids = torch.stack([torch.randperm(n, generator=g)[:k] for _ in range(t)])
        kinds = (RowKind.DECODE, RowKind.NATIVE, RowKind.PAD, RowKind.DECODE)
        rows = torch.tensor([kinds[(i + step) % 4] for i in range(t)], dtype=torch.int8)
        ids[rows == RowKind.PAD] = -1 if step == 1 else 0
        fetched = {u for i in range(t) if rows[i] == RowKind.DECODE for u in ids[i].tolist()}
        loads = [sum(int(where[u]) == rank for u in fetched) for rank in range(ranks)]
        expected = [total + load for total, load in zip(expected, [*loads, max(loads)], strict=True)]
        count(ids.to(DEVICE, dtype), rows.to(DEVICE), where.to(DEVICE), totals)
    assert totals.tolist() == expected
    assert expected[-1] > 0


def test_step_without_rows_counts_nothing() -> None:
    totals = torch.zeros(3, dtype=torch.float64, device=DEVICE)
    empty = torch.zeros(0, dtype=torch.int8, device=DEVICE)
    count_ranks(
        torch.zeros(0, 4, dtype=torch.int64, device=DEVICE), empty, torch.zeros(8, device=DEVICE).long(), totals
    )
    assert not totals.any()
