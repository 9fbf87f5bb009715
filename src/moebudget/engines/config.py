"""Per-model configuration, read from JSON: `{"moebudget": {"policy": ..., "stats": ...}}`, for `attach` and vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebudget.core.errors import unknown
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats, load_stats
from moebudget.core.types import PLACEMENT
from moebudget.methods.native import native
from moebudget.methods.registry import parse

KEY = "moebudget"
FIELDS = ("policy", "stats", "budgets", "enabled", "debug", "evidence")  # evidence, from `tune`, is ignored
EXAMPLE = '{"moebudget": {"policy": "base:budget=16", "stats": "stats.safetensors"}}'


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one model. `budgets` has one number per Mixture-of-Experts layer and overrides the policy's budget.

    `debug` is read by vLLM only: the ranks compare their active sets in every layer and step.
    """

    policy: Policy
    stats: Path | None = None
    budgets: tuple[int, ...] | None = None
    enabled: bool = True
    debug: bool = False


def read_settings(additional_config: object) -> Settings | None:
    """The settings in vLLM's additional_config; None if it has no key "moebudget".

    Raises ValueError that names the value, what is allowed and how to write it; FileNotFoundError if the file of
    statistics does not exist.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    config = additional_config[KEY]
    if not isinstance(config, Mapping):
        raise ValueError(f"additional_config[{KEY!r}]={config!r} must be an object, as in {EXAMPLE}")
    for name in config:
        if name not in FIELDS:
            raise ValueError(f"additional_config[{KEY!r}]: {unknown('key', str(name), list(FIELDS))}")
    text = config.get("policy")
    if not isinstance(text, str):
        raise ValueError(f"additional_config[{KEY!r}]: policy={text!r} must be a text string, as in {EXAMPLE}")
    policy = parse(text)
    if policy.needs_energy:
        raise ValueError(
            f"policy {text!r} needs the true output energies of a step, which only analysis runs compute; use base"
        )
    budgets = config.get("budgets")
    if budgets is not None:
        if isinstance(budgets, str) or not isinstance(budgets, Sequence):
            raise ValueError(
                f"budgets={budgets!r} must be a list with one budget per layer; put a single budget into the policy, "
                f"as in {text!r}"
            )
        budgets = policy.layer_budgets(budgets, len(budgets))
    enabled = read_flag("enabled", config.get("enabled", True))
    debug = read_flag("debug", config.get("debug", False))
    return Settings(policy, _stats_path(policy, config.get("stats")), budgets, enabled, debug)


def _stats_path(policy: Policy, stats: object) -> Path | None:
    if stats is None:
        needs = policy.needs - PLACEMENT  # vLLM knows its placement; `attach` asks for one later
        if needs:
            raise ValueError(
                f"policy {policy.name!r} needs statistics ({', '.join(sorted(needs))}) and `stats` is missing; "
                f"make them with `moebudget calibrate MODEL --data TEXT -o stats.safetensors`, as in {EXAMPLE}"
            )
        return None
    if not isinstance(stats, str):
        raise ValueError(f"stats={stats!r} must be the path of a safetensors file, as in {EXAMPLE}")
    path = Path(stats)
    if not path.is_file():
        raise FileNotFoundError(f"stats={stats!r}: no such file (looked in {path.absolute().parent})")
    return path


def read_flag(name: str, value: object) -> bool:
    """The value itself; ValueError unless it is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


def resolve(
    policy: Policy | str | Mapping[str, Any], stats: Stats | None, budgets: Sequence[int] | None
) -> tuple[Policy, Stats | None, Sequence[int] | None]:
    """Policy, statistics and budgets for `attach`, whose arguments override those of a config.

    Raises as `parse`, `read_settings` and `load_stats`, and ValueError if a mapping has no key "moebudget".
    """
    if isinstance(policy, str):
        return parse(policy), stats, budgets
    if isinstance(policy, Policy):
        return policy, stats, budgets
    settings = read_settings(policy)
    if settings is None:
        raise ValueError(f"the config has no {KEY!r} among its keys ({', '.join(policy) or 'none'}); as in {EXAMPLE}")
    if not settings.enabled:
        return native(), stats, None
    stats = load_stats(settings.stats) if stats is None and settings.stats is not None else stats
    return settings.policy, stats, settings.budgets if budgets is None else budgets
