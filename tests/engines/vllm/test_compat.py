"""Versions and layouts of vLLM that may start, and those that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moebudget.engines.vllm.compat import UnsupportedEngineError, check_layout, check_version

SINGLE_RANK = {
    "data_parallel_size": 1, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1,
    "use_sequence_parallel_moe": False, "use_ubatching": False, "enable_eplb": False, "enable_elastic_ep": False,
    "enable_expert_parallel": False, "expert_placement_strategy": "linear",
}  # fmt: skip


def layout(**changes: Any) -> Any:
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**SINGLE_RANK, **changes}))


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1", "0.32.0+cpu", "0.33.1rc2.dev3"])
def test_tested_versions_start(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0", "dev"])
def test_untested_versions_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=rf"tested with vLLM 0\.26 to 0\.33, this is {version}"):
        check_version(version)


def test_covered_layouts_start() -> None:
    check_layout(layout(), batch_invariant=False)
    check_layout(layout(enable_expert_parallel=True), batch_invariant=False)
    check_layout(layout(expert_placement_strategy="round_robin"), batch_invariant=False)  # without expert parallelism
    check_layout(layout(enable_expert_parallel=True, enable_eplb=True), batch_invariant=False)
    check_layout(layout(enable_expert_parallel=True), batch_invariant=False, by_device=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2: every rank would choose separately"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"use_sequence_parallel_moe": True}, "sequence-parallel experts: a rank sees part"),
        ({"use_ubatching": True}, "micro-batch overlap"),
        ({"enable_elastic_ep": True}, "enable_elastic_ep"),
        ({"enable_expert_parallel": True, "expert_placement_strategy": "round_robin"}, "'round_robin'"),
    ],
)
def test_layouts_without_cover_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=message):
        check_layout(layout(**changes), batch_invariant=False)


def test_load_balancing_under_a_policy_that_reads_devices_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="enable_eplb under a policy that reads the devices of experts"):
        check_layout(layout(enable_eplb=True), batch_invariant=False, by_device=True)


def test_batch_invariant_mode_is_refused() -> None:
    with pytest.raises(UnsupportedEngineError, match="VLLM_BATCH_INVARIANT=1: a token's experts depend on its batch"):
        check_layout(layout(), batch_invariant=True)
