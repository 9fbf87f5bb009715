"""Allocation: an average budget shared over the layers, measured, solved and stored in the statistics."""

from __future__ import annotations

from moebudget.calibrate.allocation.run import allocate

__all__ = ["allocate"]
