"""Where the experts of a layer lie and what fetching one costs: read by XShare's and CAEE's device-aware rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of every expert of a layer, the cost of fetching one, and which need no fetching.

    device [N] int64 in 0..devices-1; cost [N] >= 0 in any one unit (seconds, or 1 an expert), default 1; resident [N]
    bool, experts whose weights are at hand already and cost nothing (CAEE's offload deployment), default none.

    Raises ValueError for an expert without a device, a device that is not there, or a wrong length or cost.
    """

    device: Tensor
    devices: int
    cost: Tensor | None = None
    resident: Tensor | None = None

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError(f"devices={self.devices} must be at least 1")
        if self.device.ndim != 1 or self.device.dtype.is_floating_point or self.device.dtype == torch.bool:
            raise ValueError(
                f"device must hold one whole number an expert, [N]; it is {tuple(self.device.shape)} "
                f"{self.device.dtype}"
            )
        for expert, device in enumerate(self.device.tolist()):
            if device < 0:
                raise ValueError(f"expert {expert} has no device ({device}); give every expert one of 0..devices-1")
            if device >= self.devices:
                raise ValueError(
                    f"expert {expert} lies on device {device}, but there are {self.devices}: 0..{self.devices - 1}"
                )
        for name, value in (("cost", self.cost), ("resident", self.resident)):
            if value is not None and value.shape != self.device.shape:
                raise ValueError(
                    f"{name} has shape {tuple(value.shape)}, the placement has {len(self.device)} experts"
                )
        if self.resident is not None and self.resident.dtype != torch.bool:
            raise ValueError(
                f"resident must be bool, True where an expert needs no fetching; it is {self.resident.dtype}"
            )
        for expert, cost in enumerate([] if self.cost is None else self.cost.tolist()):
            if not 0 <= cost < math.inf:
                raise ValueError(f"expert {expert} costs {cost:g}: every cost must be a finite number of at least 0")

    @classmethod
    def contiguous(cls, experts: int, devices: int, resident: Tensor | None = None) -> Placement:
        """Equal blocks of neighbouring experts, as engines place them without load balancing; cost 1 each."""
        if not 1 <= devices <= experts:
            raise ValueError(f"devices={devices} must lie between 1 and the number of experts, {experts}")
        return cls(torch.arange(experts) * devices // experts, devices, None, resident)

    def tensors(self) -> dict[str, Tensor]:
        """What selections read: `placement_device` [N] int64 and `placement_cost` [N] float32, 0 where resident."""
        cost = torch.ones(len(self.device)) if self.cost is None else self.cost.float()
        if self.resident is not None:
            cost = torch.where(self.resident, 0.0, cost)
        return {"placement_device": self.device.long(), "placement_cost": cost}


@dataclass(frozen=True, slots=True)
class TransferFit:
    """Time to move S bytes over a link, t0 + S / bandwidth (CAEE's offload cost, our reading of the fit)."""

    t0: float  # seconds
    bandwidth: float  # bytes a second

    def seconds(self, size: float) -> float:
        """Predicted time of one transfer of `size` bytes."""
        return self.t0 + size / self.bandwidth


def fit_transfer(sizes: Sequence[float], seconds: Sequence[float]) -> TransferFit:
    """Least-squares line through a measured sweep of transfer sizes (bytes) and times (seconds).

    Raises ValueError for fewer than two sizes, or a sweep in which time does not grow with size.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(
            f"a link's cost needs times of at least two different sizes, got {len(sizes)} and {len(seconds)}"
        )
    x, y = torch.tensor(sizes, dtype=torch.float64), torch.tensor(seconds, dtype=torch.float64)
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    if not 0 < slope < math.inf:
        raise ValueError(
            f"transfer times do not grow with size (slope {slope:.3g} s a byte): measure larger transfers"
        )
    return TransferFit(float(y.mean() - slope * x.mean()), 1 / slope)


def measure_transfers(
    device: torch.device | str, sizes: Sequence[int], repeats: int = 20
) -> tuple[list[float], list[float]]:
    """Copy pinned host memory of each size (bytes) to a CUDA device: (sizes, the median seconds of each)."""
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"a transfer sweep measures host to GPU copies; {device} is no CUDA device")
    times = []
    for size in sizes:
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(size, dtype=torch.uint8, device=device)
        found = []
        for turn in range(repeats + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            torch.cuda.synchronize(device)
            if turn >= 3:
                found.append(start.elapsed_time(end) / 1e3)
        times.append(sorted(found)[repeats // 2])
    return list(sizes), times
