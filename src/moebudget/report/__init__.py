"""Report: benchmark rows -> one self-contained HTML page, and plots."""

from __future__ import annotations

from moebudget.report.page import build
from moebudget.report.rows import BrokenRowError, read_rows

__all__ = ["BrokenRowError", "build", "read_rows"]
