"""Placement: which device holds each expert, and what fetching it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of every expert of a layer, the cost of fetching one, and which need no fetching.

    device [N] int64 in 0..devices-1; cost [N] >= 0 in any unit (seconds, or 1 per expert), default 1; resident [N]
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
                f"device must hold one whole number per expert, [N]; it is {tuple(self.device.shape)} "
                f"{self.device.dtype}"
            )
        for expert, device in enumerate(self.device.tolist()):
            if device < 0:
                raise ValueError(f"expert {expert} has no device ({device}); give every expert one of 0..devices-1")
            if device >= self.devices:
                raise ValueError(
                    f"expert {expert} is on device {device}, but there are {self.devices}: 0..{self.devices - 1}"
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
            raise ValueError(f"devices={devices} must be between 1 and the number of experts, {experts}")
        return cls(torch.arange(experts) * devices // experts, devices, None, resident)

    def tensors(self) -> dict[str, Tensor]:
        """What selections read: `placement_device` [N] int64 and `placement_cost` [N] float32, 0 where resident."""
        cost = torch.ones(len(self.device)) if self.cost is None else self.cost.float()
        if self.resident is not None:
            cost = torch.where(self.resident, 0.0, cost)
        return {"placement_device": self.device.long(), "placement_cost": cost}
