"""Versions and layouts of vLLM that are refused before any weight is loaded, because capping would silently fail."""

from __future__ import annotations

import re
from typing import Any

OLDEST, NEWEST = (0, 26), (0, 33)


class UnsupportedEngineError(ValueError):
    """An engine that moebudget does not cap, with the reason and the way out."""


def supported(version: str) -> bool:
    """Whether a version of vLLM is in the tested range."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and OLDEST <= (int(numbers[1]), int(numbers[2])) <= NEWEST


def check_version(version: str) -> None:
    """Raise UnsupportedEngineError for a version of vLLM outside the tested range."""
    if not supported(version):
        oldest, newest = (".".join(map(str, v)) for v in (OLDEST, NEWEST))
        raise UnsupportedEngineError(
            f"moebudget is tested with vLLM {oldest} to {newest}, this is {version}: install one of those, or remove "
            '"moebudget" from --additional-config'
        )


def check_layout(config: Any, *, batch_invariant: bool, by_device: bool = False) -> None:
    """Raise UnsupportedEngineError, with the reason, for a VllmConfig whose steps or ranks the hook does not cover.

    `by_device`: the policy reads the devices of experts.
    """
    parallel = config.parallel_config
    reasons = {
        "VLLM_BATCH_INVARIANT=1": (batch_invariant, "a token's experts depend on its batch mates by design"),
        f"data_parallel_size={parallel.data_parallel_size}": (
            parallel.data_parallel_size > 1,
            "every rank would choose separately, and the union of their experts exceeds the budget",
        ),
        f"pipeline_parallel_size={parallel.pipeline_parallel_size}": (
            parallel.pipeline_parallel_size > 1,
            "statistics and budgets per layer need all layers of the model on one rank",
        ),
        f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}": (
            parallel.prefill_context_parallel_size > 1,
            "a rank sees part of the batch, in another order",
        ),
        "sequence-parallel experts": (
            parallel.use_sequence_parallel_moe,
            "a rank sees part of the batch, so every rank would choose different experts",
        ),
        "micro-batch overlap (enable_dbo or ubatch_size)": (
            parallel.use_ubatching,
            "a layer sees half of the step, and the two halves together exceed the budget",
        ),
        "enable_eplb under a policy that reads the devices of experts": (
            parallel.enable_eplb and by_device,
            "experts have copies on several devices and move while the engine serves; base, spread and price do not "
            "read devices, unless level=yes",
        ),
        "enable_elastic_ep": (parallel.enable_elastic_ep, "layers are replaced while the engine serves"),
        f"expert_placement_strategy={parallel.expert_placement_strategy!r}": (
            parallel.enable_expert_parallel and parallel.expert_placement_strategy != "linear",
            "only the linear placement is tested",
        ),
    }
    for setting, (wrong, why) in reasons.items():
        if wrong:
            raise UnsupportedEngineError(
                f"moebudget does not work with {setting}: {why}. Unset it, or remove "
                '"moebudget" from --additional-config'
            )
