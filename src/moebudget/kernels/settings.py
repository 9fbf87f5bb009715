"""Compile-time settings of the kernels, grouped. Triton compiles one kernel per combination of values."""

from __future__ import annotations

from typing import NamedTuple


class RouterForm(NamedTuple):
    """How the model scores experts and weights its routes: a RouterSpec as the kernels read it."""

    SIGMOID: bool  # else softmax
    RENORMALIZE: bool
    SCALE: float
    GROUPS: int
    OPEN: int  # groups that stay open
    TOP2: bool  # a group counts by the sum of its two best values, else by its best
    GP: int  # GROUPS, padded to a power of two


class Selection(NamedTuple):
    """How the second launch selects the active set."""

    PRICED: bool  # every expert whose sum exceeds the price, whatever the budget
    HOLD: float  # share of an excess over the budget that the price corrects per step; 0: the price stays
    ADDITIVE: bool  # the budget comes on top of the warm-up set, else it includes it
    RANKS: int  # devices that hold experts; 1 if the selection does not depend on them
    LEVEL: bool  # fill up every device to the load of the fullest one, else the budget is per device if RANKS > 1


class Filling(NamedTuple):
    """How the second launch re-routes a row inside the active set."""

    DROP: bool  # keep the native routes in the set alone, else fill up to K
    DENOMINATOR: int  # place in `lower.DENOMINATORS`
