"""Memory bandwidth of a copy on this machine."""

from __future__ import annotations

import time

import torch

REPEATS, COPIES = 5, 8


def copy_bandwidth(device: torch.device, size: int = 2**28) -> float:
    """GB/s of large copies on the device, counting reads and writes; the fastest of REPEATS runs of COPIES each."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(REPEATS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(COPIES):
            target.copy_(source)
        synchronize(device)
        times.append(time.perf_counter() - start)
    return 2 * size * COPIES / min(times) / 1e9


def synchronize(device: torch.device) -> None:
    """Wait for the device to finish; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
