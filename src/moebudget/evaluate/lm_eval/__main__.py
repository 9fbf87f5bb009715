"""The command line of lm-evaluation-harness with this package's model and tasks."""

from __future__ import annotations

from moebudget.evaluate.lm_eval.run import harness

if __name__ == "__main__":
    harness()
