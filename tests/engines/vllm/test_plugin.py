"""Entry point and patches, on fakes of vLLM's modules."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from moebudget.core.types import RowKind
from moebudget.engines.vllm import patches, plugin
from moebudget.engines.vllm.row_kinds import StepRows

CAPPED = SimpleNamespace(additional_config={"moebudget": {"policy": "squared:budget=2"}})
UNCAPPED = SimpleNamespace(additional_config={})


def test_wheel_has_both_entry_points() -> None:
    groups = ("vllm.general_plugins", "vllm.endpoint_plugins")
    points = {group: {point.name: point.value for point in entry_points(group=group)} for group in groups}
    assert points["vllm.general_plugins"]["moebudget"] == "moebudget.engines.vllm.plugin:register"
    assert points["vllm.endpoint_plugins"]["moebudget"] == "moebudget.engines.vllm.endpoint:Endpoint"


def test_patches_name_functions_that_exist() -> None:
    for where in plugin.PATCHES.values():
        module, _, function = where.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_registering_loads_neither_vllm_nor_torch() -> None:
    probe = (
        "import sys; from moebudget.engines.vllm.plugin import register; register(); register(); "
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)), len(sys.meta_path))"
    )
    count = "import sys; print(len(sys.meta_path))"
    before = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True)
    after = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert after.stdout.split() == ["[]", str(int(before.stdout) + 1)]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A module `fake` on the path; its patch records whether the module was loaded."""
    (tmp_path / "fake.py").write_text("loaded = True\n")
    (tmp_path / "fake_patch.py").write_text("seen = []\ndef patch(module):\n    seen.append(module.loaded)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugin, "PATCHES", {"fake": "fake_patch:patch"})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import fake_patch  # type: ignore[import-not-found]

    yield fake_patch.seen
    for name in ("fake", "fake_patch"):
        sys.modules.pop(name, None)


def test_module_is_patched_once_after_its_import(patched: list[str]) -> None:
    plugin.register()
    assert not patched
    import fake  # type: ignore[import-not-found]

    assert patched == [True]
    assert type(fake.__loader__).__module__ != plugin.__name__
    plugin.register()
    assert patched == [True]


def test_loaded_module_is_patched_at_once(patched: list[str]) -> None:
    import fake  # noqa: F401

    plugin.register()
    assert patched == [True]


def test_only_the_config_of_an_unsupported_vllm_is_patched(
    patched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.34.0"))  # type: ignore[arg-type]
    plugin.register()
    import fake  # noqa: F401

    assert not patched
    monkeypatch.setattr(plugin, "CONFIG", "fake")  # the one module that is still patched
    plugin.register()
    assert patched == [True]


def test_kill_switch_prevents_every_patch(patched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SWITCH, "1")
    plugin.register()
    import fake  # noqa: F401

    assert not patched
    monkeypatch.setenv(plugin.SWITCH, "yes")
    with pytest.raises(ValueError, match="MOEBUDGET_DISABLE='yes' must be 1"):
        plugin.register()


class Runner:
    """The methods that both of vLLM's model runners have."""

    def __init__(self, step_rows: StepRows | None) -> None:
        self.calls: list[str] = []
        if step_rows is not None:
            self.moebudget = SimpleNamespace(
                before_step=lambda: step_rows, after_dummy_run=lambda: self.calls.append("checked")
            )

    def _dummy_run(self, tokens: int) -> int:
        self.calls.append("dummy")
        return tokens

    def capture_model(self) -> int:
        return 7


def params(capped: bool | None = None) -> Any:
    return SimpleNamespace(extra_args=None if capped is None else {"moebudget": capped})


STEP = SimpleNamespace(
    num_scheduled_tokens={"a": 1, "b": 4, "c": 2, "d": 1, "e": 1},
    scheduled_spec_decode_tokens={"b": [1, 2, 3]},
    scheduled_new_reqs=[
        SimpleNamespace(req_id="c", sampling_params=params()),
        SimpleNamespace(req_id="d", sampling_params=params(False)),
    ],
)
# a decodes, b decodes with three drafts, c reads its prompt, d opts out, e reads the last token of its prompt.
EXPECTED = [
    RowKind.DECODE,
    *[RowKind.DECODE] * 4,
    *[RowKind.NATIVE] * 2,
    RowKind.NATIVE,
    RowKind.NATIVE,
    *[RowKind.PAD] * 3,
]


def in_module(cls: type) -> Any:
    module = ModuleType("fake")
    module.GPUModelRunner = cls  # type: ignore[attr-defined]
    return module


def runner_v1(step_rows: StepRows | None) -> Any:
    class V1(Runner):
        requests: ClassVar = {
            name: SimpleNamespace(sampling_params=params(False if name == "d" else None)) for name in "abcde"
        }
        input_batch = SimpleNamespace(
            req_ids=list("abcde"),
            num_computed_tokens_cpu=np.array([9, 9, 0, 9, 8, 77]),
            num_prompt_tokens=np.array([9, 9, 2, 9, 9, 77]),
        )

        def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> tuple[Any, Any]:
            return scheduler_output, num_scheduled_tokens

    patches.patch_runner_v1(in_module(V1))
    return V1(step_rows)


def runner_v2(step_rows: StepRows | None) -> Any:
    class V2(Runner):
        req_states = SimpleNamespace(req_id_to_index=dict.fromkeys("abcde", 0))

        def add_requests(self, scheduler_output: Any) -> None:
            pass

        def prepare_inputs(self, scheduler_output: Any, *more: Any) -> Any:  # noqa: ARG002
            return SimpleNamespace(
                req_ids=list("abcde"),
                query_start_loc_np=np.array([0, 1, 5, 7, 8, 9, 9, 9]),
                is_prefilling_np=np.array([False, False, True, False, True]),
            )

    patches.patch_runner_v2(in_module(V2))
    return V2(step_rows)


def test_rows_of_the_first_model_runner_are_described() -> None:
    step_rows = StepRows(12, "cpu")
    assert runner_v1(step_rows)._prepare_inputs(STEP, 5) == (STEP, 5)
    assert step_rows.kind.tolist() == EXPECTED
    assert step_rows.request.tolist() == [0, 1, 1, 1, 1, 2, 2, 3, 4, -1, -1, -1]


def test_rows_of_the_second_model_runner_are_described() -> None:
    step_rows = StepRows(12, "cpu")
    runner = runner_v2(step_rows)
    runner.add_requests(STEP)
    assert runner.prepare_inputs(STEP, 1, 2).req_ids == list("abcde")
    assert step_rows.kind.tolist() == EXPECTED


@pytest.mark.parametrize("make", [runner_v1, runner_v2])
def test_dummy_batches_keep_native_routes_and_are_checked(make: Any) -> None:
    step_rows = StepRows(12, "cpu")
    runner = make(step_rows)
    for call in (lambda: runner._dummy_run(3), runner.capture_model):
        step_rows.kind.fill_(RowKind.DECODE)
        assert call() in (3, 7)
        assert step_rows.kind.tolist() == [RowKind.NATIVE] * 12
    assert runner.calls == ["dummy", "checked"]


@pytest.mark.parametrize("make", [runner_v1, runner_v2])
def test_model_runner_without_a_policy_is_left_alone(make: Any) -> None:
    runner = make(None)
    assert runner._dummy_run(3) == 3
    assert runner.capture_model() == 7


def test_monolithic_kernels_are_unsupported_in_a_capped_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(config=CAPPED)
    fake: Any = ModuleType("vllm.config")
    fake.get_current_vllm_config_or_none = lambda: current.config
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", fake)

    class FusedMoEExperts:
        monolithic = False

        @classmethod
        def is_monolithic(cls) -> bool:
            return cls.monolithic

        @staticmethod
        def is_supported_config(cls: Any, *more: Any) -> tuple[bool, str | None]:  # noqa: ARG004
            return True, None

    class Monolithic(FusedMoEExperts):
        monolithic = True

    module: Any = ModuleType("fake")
    module.FusedMoEExperts = FusedMoEExperts
    patches.patch_kernel_choice(module)
    supported, reason = Monolithic.is_supported_config(Monolithic, 1, 2)
    assert not supported
    assert "does not call the router" in (reason or "")
    assert FusedMoEExperts.is_supported_config(FusedMoEExperts, 1, 2) == (True, None)
    current.config = UNCAPPED
    assert Monolithic.is_supported_config(Monolithic, 1, 2) == (True, None)


def test_request_with_a_wrong_opt_out_is_refused() -> None:
    class SamplingParams:
        extra_args: Any = None

        def _verify_args(self) -> None:
            pass

    module: Any = ModuleType("fake")
    module.SamplingParams = SamplingParams
    patches.patch_sampling_params(module)
    request = SamplingParams()
    request._verify_args()
    request.extra_args = {"moebudget": "0"}
    with pytest.raises(ValueError, match="must be false"):
        request._verify_args()
