"""RPC methods of every worker, `moebudget_state` and `moebudget_set`, and the requests that change an engine.

`llm.collective_rpc("moebudget_state")`, `llm.collective_rpc("moebudget_set", args=(8,))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from moebudget.core.errors import unknown
from moebudget.core.policy import Policy
from moebudget.engines.config import read_flag

KEYS = ("budget", "enabled")


def moebudget_state(self: Any) -> dict[str, Any] | None:
    """Policy, budgets and counters of this worker; None if the engine was started without "moebudget"."""
    engine = getattr(self.model_runner, "moebudget", None)
    return None if engine is None else engine.state()


def moebudget_set(
    self: Any, budget: int | list[int] | None = None, enabled: bool | None = None
) -> dict[str, Any] | None:
    """Change the budget (one number, or one per layer) or switch capping on and off, from the next step on.

    None changes nothing. Raises ValueError that says what is wrong, before anything is changed.
    """
    engine = getattr(self.model_runner, "moebudget", None)
    if engine is None:
        raise ValueError(
            'this engine was started without "moebudget" in --additional-config, so nothing can be changed'
        )
    change = read_change({"budget": budget, "enabled": enabled}, engine.settings.policy, len(engine.layers))
    engine.change(*change)
    return moebudget_state(self)


def read_change(body: object, policy: Policy, layers: int) -> tuple[tuple[int, ...] | None, bool | None]:
    """(budgets, enabled) of a request {"budget": 8 | [8, ...], "enabled": true}; None for what does not change.

    Raises ValueError that says what is wrong with it.
    """
    example = 'as in {"budget": 12} or {"enabled": false}'
    if not isinstance(body, Mapping) or not body:
        raise ValueError(f"{body!r} must be an object with budget or enabled, {example}")
    for name in body:
        if name not in KEYS:
            raise ValueError(f"{unknown('key', str(name), list(KEYS))}; {example}")
    if all(body.get(name) is None for name in KEYS):
        raise ValueError(f"neither budget nor enabled has a value, {example}")
    budget, enabled = body.get("budget"), body.get("enabled")
    return (
        None if budget is None else policy.layer_budgets(budget, layers),
        None if enabled is None else read_flag("enabled", enabled),
    )


def patch_worker_base(module: ModuleType) -> None:
    """WorkerBase: add the RPC methods."""
    module.WorkerBase.moebudget_state = moebudget_state
    module.WorkerBase.moebudget_set = moebudget_set
