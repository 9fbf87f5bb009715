"""RPC on every worker: `llm.collective_rpc("moebudget_state")`, `llm.collective_rpc("moebudget_set", args=(8,))`."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def moebudget_state(self: Any) -> dict[str, Any] | None:
    """Policy, budgets and counters of this worker; None if the engine was started without "moebudget"."""
    engine = getattr(self.model_runner, "moebudget", None)
    return None if engine is None else engine.state()


def moebudget_set(
    self: Any, budget: int | list[int] | None = None, enabled: bool | None = None
) -> dict[str, Any] | None:
    """Change the budget (one number, or one a layer) or switch on and off, from the next step on.

    None leaves as it is. Raises ValueError that says what is wrong, before anything is changed.
    """
    from moebudget.integrations.vllm.config import read_change

    engine = getattr(self.model_runner, "moebudget", None)
    if engine is None:
        raise ValueError(
            'this engine was started without "moebudget" in --additional-config, so nothing can be changed'
        )
    budgets, on = read_change({"budget": budget, "enabled": enabled}, engine.settings.policy, len(engine.layers))
    engine.change(budgets, on)
    return moebudget_state(self)


def patch_worker_base(module: ModuleType) -> None:
    """WorkerBase: add the methods above."""
    module.WorkerBase.moebudget_state = moebudget_state
    module.WorkerBase.moebudget_set = moebudget_set
