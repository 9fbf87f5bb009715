"""The contract script, on made-up wheels: it reports renamed names, changed signatures and reordered calls."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path
from typing import Any

import pytest

CONTRACT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[3] / "experiments/checks/vllm_contract.py"))
BASE = f"{CONTRACT['FUSED']}/router/base_router.py"
GOOD = {
    BASE: """
if True:
    def eplb_map_to_physical_and_record(topk_ids, expert_load_view, logical_to_physical_map,
        logical_replica_count, record_enabled, num_unpadded_tokens=None): ...
class BaseRouter:
    def __init__(self): self.top_k = self.global_num_experts = 1
    def set_capture_fn(self, capture_fn): ...
    def _compute_routing(self, hidden_states, router_logits, indices_type, *, input_ids=None): ...
    def _select_experts(self, hidden_states, router_logits):
        ids = self._compute_routing(1)
        self.capture_fn(ids)
        return self._apply_eplb_mapping(ids)
""",
    "plugins/__init__.py": "A = 'vllm.general_plugins', 'vllm.endpoint_plugins'",
    "envs.py": "VLLM_BATCH_INVARIANT: bool = False",
}


def faults(folder: Path, old: str = "", new: str = "") -> list[str]:
    """Faults in the files of GOOD, after a change of their text."""
    path = folder / "wheel.whl"
    with zipfile.ZipFile(path, "w") as file:
        for name, text in GOOD.items():
            file.writestr(f"vllm/{name}", text.replace(old, new) if old else text)
    with zipfile.ZipFile(path) as file:
        broken = list(CONTRACT["broken"](file))
    return [fault for fault in broken if not fault.endswith(" is gone") or ":" in fault]


def test_kept_contract_has_no_faults(tmp_path: Path) -> None:
    assert not faults(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("def _compute_routing", "def _route", "_compute_routing is gone"),
        (
            "self, hidden_states, router_logits, indices_type",
            "self, router_logits, indices_type",
            "takes (self, router",
        ),
        ("self.top_k = ", "self.k = ", "BaseRouter has no top_k"),
        ("eplb_map_to_physical_and_record", "map_and_record", "eplb_map_to_physical_and_record is gone"),
        (
            "logical_replica_count, record",
            "record",
            "eplb_map_to_physical_and_record takes (topk_ids, expert_load_view",
        ),
        ("self.capture_fn(ids)", "pass", "no longer calls _compute_routing(, capture_fn("),
        ("VLLM_BATCH_INVARIANT", "VLLM_STABLE", "the module has no VLLM_BATCH_INVARIANT"),
        ("vllm.endpoint_plugins", "vllm.routes", "no longer loads vllm.endpoint_plugins"),
    ],
)
def test_broken_contract_is_reported(tmp_path: Path, old: str, new: str, message: str) -> None:
    (fault,) = faults(tmp_path, old, new)
    assert message in fault


def test_missing_files_are_reported(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as file:
        file.writestr("vllm/plugins/__init__.py", GOOD["plugins/__init__.py"])
    with zipfile.ZipFile(tmp_path / "w.whl") as file:
        broken = set(CONTRACT["broken"](file))
    assert {f"{name} is gone" for name in CONTRACT["SIGNATURES"]} <= broken
