"""Fused Triton kernels: a policy's scoring, selection and fill for the price of two small launches."""

from __future__ import annotations

from moebudget.kernels.fused import FusedRouter
from moebudget.kernels.lower import Lowered, NotFusedError, lower

__all__ = ["FusedRouter", "Lowered", "NotFusedError", "lower"]
