"""Fused Triton kernels: the scoring, selection and fill of a policy in two small launches."""

from __future__ import annotations

from moebudget.kernels.fused import FusedRouter
from moebudget.kernels.lower import Lowered, NotFusedError, lower

__all__ = ["FusedRouter", "Lowered", "NotFusedError", "lower"]
