"""What the user says: `--additional-config '{"moebudget": {...}}'` at the start, a budget or off while serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebudget.fill import Backfill
from moebudget.policy import Policy
from moebudget.presets import parse
from moebudget.spelling import unknown

KEY = "moebudget"
FIELDS = ("policy", "stats", "budgets", "enabled")
EXAMPLE = '{"moebudget": {"policy": "base:budget=16", "stats": "stats.safetensors"}}'


@dataclass(frozen=True, slots=True)
class Settings:
    """One engine's settings. `budgets` has one number a Mixture-of-Experts layer and wins over the policy's own."""

    policy: Policy
    stats: Path | None = None
    budgets: tuple[int, ...] | None = None
    enabled: bool = True


def read_settings(additional_config: object) -> Settings | None:
    """The settings in vLLM's additional_config; None without a "moebudget" in it.

    Raises ValueError that names the value, what is allowed and how to write it; FileNotFoundError for statistics that
    are not there.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    given = additional_config[KEY]
    if not isinstance(given, Mapping):
        raise ValueError(f"additional_config[{KEY!r}]={given!r} must be an object, as in {EXAMPLE}")
    for name in given:
        if name not in FIELDS:
            raise ValueError(f"additional_config[{KEY!r}]: {unknown('key', str(name), list(FIELDS))}")
    text = given.get("policy")
    if not isinstance(text, str):
        raise ValueError(f"additional_config[{KEY!r}]: policy={text!r} must be a text, as in {EXAMPLE}")
    policy = parse(text)
    if policy.needs_energy:
        raise ValueError(
            f"policy {text!r} needs the true output energies of a step, which only analysis has; use base"
        )
    budgets = given.get("budgets")
    if budgets is not None:
        if isinstance(budgets, str) or not isinstance(budgets, Sequence):
            raise ValueError(
                f"budgets={budgets!r} must be a list with one budget a layer; for one number write {text!r}"
            )
        budgets = policy.layer_budgets(budgets, len(budgets))
    enabled = _flag("enabled", given.get("enabled", True))
    return Settings(policy, _stats_path(policy, given.get("stats")), budgets, enabled)


def _stats_path(policy: Policy, given: object) -> Path | None:
    if given is None:
        if policy.needs:
            raise ValueError(
                f"policy {policy.name!r} needs statistics ({', '.join(sorted(policy.needs))}) and `stats` is missing; "
                f"make them with `moebudget calibrate MODEL --data TEXT -o stats.safetensors`, as in {EXAMPLE}"
            )
        return None
    if not isinstance(given, str):
        raise ValueError(f"stats={given!r} must be the path of a safetensors file, as in {EXAMPLE}")
    path = Path(given)
    if not path.is_file():
        raise FileNotFoundError(f"stats={given!r}: no such file (looked in {path.absolute().parent})")
    return path


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


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
        None if enabled is None else _flag("enabled", enabled),
    )
