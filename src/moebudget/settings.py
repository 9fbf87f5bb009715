"""What a user says about one model, as JSON: `{"moebudget": {"policy": ..., "stats": ...}}`, for vLLM and `attach`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moebudget.policy import Policy
from moebudget.presets import dense, parse
from moebudget.spelling import unknown
from moebudget.stats import Stats, load_stats
from moebudget.types import PLACEMENT

KEY = "moebudget"
FIELDS = ("policy", "stats", "budgets", "enabled", "debug", "evidence")  # the last, of `moebudget tune`, is not read
EXAMPLE = '{"moebudget": {"policy": "base:budget=16", "stats": "stats.safetensors"}}'


@dataclass(frozen=True, slots=True)
class Settings:
    """One model's settings. `budgets` has one number a Mixture-of-Experts layer and wins over the policy's own.

    `debug`, which vLLM alone reads: the ranks compare what they have chosen in every layer and step.
    """

    policy: Policy
    stats: Path | None = None
    budgets: tuple[int, ...] | None = None
    enabled: bool = True
    debug: bool = False


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
    enabled = read_flag("enabled", given.get("enabled", True))
    debug = read_flag("debug", given.get("debug", False))
    return Settings(policy, _stats_path(policy, given.get("stats")), budgets, enabled, debug)


def _stats_path(policy: Policy, given: object) -> Path | None:
    if given is None:
        needs = policy.needs - PLACEMENT  # vLLM knows where its experts lie; `attach` asks for it later
        if needs:
            raise ValueError(
                f"policy {policy.name!r} needs statistics ({', '.join(sorted(needs))}) and `stats` is missing; "
                f"make them with `moebudget calibrate MODEL --data TEXT -o stats.safetensors`, as in {EXAMPLE}"
            )
        return None
    if not isinstance(given, str):
        raise ValueError(f"stats={given!r} must be the path of a safetensors file, as in {EXAMPLE}")
    path = Path(given)
    if not path.is_file():
        raise FileNotFoundError(f"stats={given!r}: no such file (looked in {path.absolute().parent})")
    return path


def read_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


def resolve(
    policy: Policy | str | Mapping[str, Any], stats: Stats | None, budgets: Sequence[int] | None
) -> tuple[Policy, Stats | None, Sequence[int] | None]:
    """Policy, statistics and budgets of what `attach` is given; arguments win over what a config says.

    Raises as `parse`, `read_settings` and `load_stats`, and ValueError for a mapping without "moebudget".
    """
    if isinstance(policy, str):
        return parse(policy), stats, budgets
    if isinstance(policy, Policy):
        return policy, stats, budgets
    found = read_settings(policy)
    if found is None:
        raise ValueError(f"the config has no {KEY!r} among its keys ({', '.join(policy) or 'none'}); as in {EXAMPLE}")
    if not found.enabled:
        return dense(), stats, None
    stats = load_stats(found.stats) if stats is None and found.stats is not None else stats
    return found.policy, stats, found.budgets if budgets is None else budgets
