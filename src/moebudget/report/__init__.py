"""`moebudget report`: rows of benchmarks -> one HTML page that needs nothing else, and plots."""

from __future__ import annotations

from moebudget.report.page import build
from moebudget.report.rows import BrokenRowError, read_rows

__all__ = ["BrokenRowError", "build", "read_rows"]
