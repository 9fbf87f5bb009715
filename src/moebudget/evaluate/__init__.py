"""Quality in decode mode: loss and agreement on text, exact match on tasks, retained energy, with intervals."""

from __future__ import annotations

from moebudget.evaluate.quality import Quality, evaluate
from moebudget.evaluate.retained import retained_energy
from moebudget.evaluate.tasks import TaskResult, evaluate_tasks
from moebudget.evaluate.text import InactivePolicyError, TextResult, evaluate_text

__all__ = [
    "InactivePolicyError",
    "Quality",
    "TaskResult",
    "TextResult",
    "evaluate",
    "evaluate_tasks",
    "evaluate_text",
    "retained_energy",
]
