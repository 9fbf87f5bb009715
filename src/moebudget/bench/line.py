"""Line t = a + b * fetched, fitted to step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Line:
    """t = a + b * fetched in milliseconds, half of b's 95 % interval, R², and the points' mean number of experts."""

    a: float
    b: float
    b_half: float
    r2: float
    middle: float

    def at(self, fetched: float, shift: float = 0.0) -> float:
        """Milliseconds on the line, with its slope changed by `shift` ms per expert about the middle of the points."""
        return self.a + self.b * fetched + shift * (fetched - self.middle)

    def gain(self, union: float, fetched: float) -> tuple[float, float]:
        """How many times faster a step is at `fetched` than at `union` experts, and half of the 95 % interval."""
        low, high = (self.at(union, s) / self.at(fetched, s) for s in (-self.b_half, self.b_half))
        return self.at(union) / self.at(fetched), (high - low) / 2


def fit(points: Sequence[tuple[float, float]], least: int = 4) -> Line:
    """Least squares through (experts fetched per layer, milliseconds).

    Raises ValueError for fewer than `least` points, or if all x are equal.

    The interval is that of ordinary regression: Student's t with n - 2 degrees of freedom.
    """
    x, y = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    if len(x) < least or np.ptp(x) == 0:
        raise ValueError(f"a line needs at least {least} points at different numbers of experts; got {len(x)}")
    b, a = np.polyfit(x, y, 1)
    residual = ((y - (a + b * x)) ** 2).sum()
    error = float(np.sqrt(residual / (len(x) - 2) / ((x - x.mean()) ** 2).sum()))
    total = float(((y - y.mean()) ** 2).sum())
    r2 = 1 - float(residual) / total if total else 1.0
    return Line(float(a), float(b), _t95(len(x) - 2) * error, r2, float(x.mean()))


def _t95(degrees: int) -> float:
    """Student's t at 97.5 %, from a table."""
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
    return table.get(degrees, 2.1 if degrees < 30 else 1.96)
