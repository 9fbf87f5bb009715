"""What a user changes while serving, and what vLLM cannot hold; what is said at the start is `moebudget.settings`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moebudget.fill import Backfill
from moebudget.policy import Policy
from moebudget.settings import read_flag
from moebudget.spelling import unknown


def check_slots(policy: Policy, top_k: int) -> None:
    """Raise ValueError for a policy that runs more experts a token than the model: vLLM's tensors have K slots."""
    if isinstance(policy.fill, Backfill) and policy.fill.k_max is not None and policy.fill.k_max > top_k:
        raise ValueError(
            f"policy {policy.name!r}: k_max={policy.fill.k_max} exceeds the {top_k} experts a token that the model "
            "runs, and vLLM has no slots for more; lower k_max"
        )


def read_change(body: object, policy: Policy, layers: int) -> tuple[tuple[int, ...] | None, bool | None]:
    """(budgets, enabled) of a request to change them, {"budget": 8 | [8, ...], "enabled": true}; None: as it is.

    Raises ValueError that says what is wrong with it.
    """
    example = 'as in {"budget": 12} or {"enabled": false}'
    if not isinstance(body, Mapping) or not body:
        raise ValueError(f"{body!r} must be an object with budget or enabled, {example}")
    known: dict[str, Any] = {"budget": None, "enabled": None}
    for name in body:
        if name not in known:
            raise ValueError(f"{unknown('key', str(name), list(known))}; {example}")
    if all(body.get(name) is None for name in known):
        raise ValueError(f"neither budget nor enabled has a value, {example}")
    budget, enabled = body.get("budget"), body.get("enabled")
    return (
        None if budget is None else policy.layer_budgets(budget, layers),
        None if enabled is None else read_flag("enabled", enabled),
    )
