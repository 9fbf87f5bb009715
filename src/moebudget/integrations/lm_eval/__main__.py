"""`python -m moebudget.integrations.lm_eval`: the harness's command line, with this package's model and tasks."""

from __future__ import annotations

from moebudget.integrations.lm_eval.run import harness

if __name__ == "__main__":
    harness()
