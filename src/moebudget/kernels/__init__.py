"""Fused Triton kernels: a policy's scoring, selection and fill for the price of two small launches."""

from __future__ import annotations

from moebudget.kernels.lower import FusedRouter, Lowered, NotFusedError, lower

__all__ = ["FusedRouter", "Lowered", "NotFusedError", "lower"]
