"""Forward passes of packed text that end at the last layer needed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, device, nn

from moebudget.calibrate.data import Packed


class LastLayerSeen(Exception):
    """Raised by an observer when the rest of the forward pass is not needed."""


def batches(part: Packed, rows: int, where: device) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and mask [rows, S] of `rows` sequences at a time, on the device."""
    for i in range(0, len(part.ids), rows):
        yield part.ids[i : i + rows].to(where), part.mask[i : i + rows].to(where)


def forward(model: nn.Module, ids: Tensor, mask: Tensor) -> None:
    """One pass without the language head: its logits are not needed."""
    backbone = getattr(model, "base_model", model)
    try:
        backbone(input_ids=ids, attention_mask=mask.long(), use_cache=False)
    except LastLayerSeen:
        return
