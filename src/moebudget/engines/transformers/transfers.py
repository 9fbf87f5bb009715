"""Times of copies from host to device, measured and fitted as a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TransferFit:
    """Time to copy S bytes over a link, t0 + S / bandwidth (CAEE's offload cost, as we read its fit)."""

    t0: float  # seconds
    bandwidth: float  # bytes per second

    def seconds(self, size: float) -> float:
        """Predicted time of one copy of `size` bytes."""
        return self.t0 + size / self.bandwidth


def fit_transfer(sizes: Sequence[float], seconds: Sequence[float]) -> TransferFit:
    """Least-squares line through measured sizes (bytes) and times (seconds) of copies.

    Raises ValueError for fewer than two different sizes, or if time does not grow with size.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            f"fitting a link needs one time per size for at least two different sizes, got {len(sizes)} sizes and "
            f"{len(seconds)} times"
        )
    x, y = torch.tensor(sizes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    if not 0 < slope < math.inf:
        raise ValueError(
            f"transfer times do not grow with size (slope {slope:.3g} s per byte): measure larger transfers"
        )
    return TransferFit(float(y.mean() - slope * x.mean()), 1 / slope)


def measure_transfers(
    device: torch.device | str, sizes: Sequence[int], repeats: int = 20
) -> tuple[list[float], list[float]]:
    """Copy pinned host memory of each size (bytes) to a CUDA device: (sizes, median seconds of each)."""
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"this measures copies from host to GPU; {device} is not a CUDA device")
    times = []
    for size in sizes:
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        durations = []
        for turn in range(repeats + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize(device)
            if turn >= 3:
                durations.append(start.elapsed_time(end) / 1e3)
        times.append(sorted(durations)[repeats // 2])
    return list(sizes), times
