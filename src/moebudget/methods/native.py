"""Native routing: the model as it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moebudget.core.ops import (
    native_union,
)
from moebudget.core.policy import Policy, Select
from moebudget.core.types import Active, LayerStats, RouterBatch
from moebudget.methods.common import RouterMass
from moebudget.methods.fills import Drop
from moebudget.methods.registry import register


@dataclass(frozen=True, slots=True)
class NativeUnion(Select):
    """Every expert that native routing fetches."""

    def __call__(self, scores: Tensor, batch: RouterBatch, stats: LayerStats) -> Active:
        return Active(native_union(batch))


@register(source="the model itself", example="native", label="native")
def native() -> Policy:
    """The model as it is: every route of every row."""
    return Policy(RouterMass(), NativeUnion(), Drop(), "native")
