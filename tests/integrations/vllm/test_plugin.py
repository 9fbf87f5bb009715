"""The entry point and the patches, on stand-ins of vLLM's modules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from moebudget.integrations.vllm import control, patches, plugin
from moebudget.integrations.vllm.board import KEEPS, PADDING, VOTES, Board

CAPPED = SimpleNamespace(additional_config={"moebudget": {"policy": "squared:budget=2"}})
PLAIN = SimpleNamespace(additional_config={})


def test_entry_points_are_gone_or_named_apart() -> None:
    groups = ("vllm.general_plugins", "vllm.endpoint_plugins")
    found = {group: {point.name: point.value for point in entry_points(group=group)} for group in groups}
    assert found["vllm.general_plugins"]["moebudget"] == "moebudget.integrations.vllm.plugin:register"
    assert found["vllm.endpoint_plugins"]["moebudget"] == "moebudget.integrations.vllm.endpoint:Endpoint"


def test_registering_loads_vllm_or_torch() -> None:
    probe = (
        "import sys; from moebudget.integrations.vllm.plugin import register; register(); register(); "
        "print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)), len(sys.meta_path))"
    )
    plain = subprocess.run(
        [sys.executable, "-c", "import sys; print(len(sys.meta_path))"], capture_output=True, text=True
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", str(int(plain.stdout) + 1)]


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A module `standin` on the path, whose patch notes the names of what it gets."""
    (tmp_path / "standin.py").write_text("loaded = True\n")
    (tmp_path / "standin_patch.py").write_text("seen = []\ndef patch(module):\n    seen.append(module.loaded)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugin, "PATCHES", {"standin": "standin_patch:patch"})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    import standin_patch  # type: ignore[import-not-found]

    yield standin_patch.seen
    for name in ("standin", "standin_patch"):
        sys.modules.pop(name, None)


def test_module_is_not_patched_once_after_its_import(patched: list[str]) -> None:
    plugin.register()
    assert not patched
    import standin  # type: ignore[import-not-found]

    assert patched == [True]
    assert type(standin.__loader__).__module__ != plugin.__name__
    plugin.register()
    assert patched == [True]


def test_loaded_module_is_not_patched_at_once(patched: list[str]) -> None:
    import standin  # noqa: F401

    plugin.register()
    assert patched == [True]


def test_unsupported_vllm_is_patched_or_not_refused(patched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.34.0"))  # type: ignore[arg-type]
    plugin.register()
    import standin  # noqa: F401

    assert not patched
    monkeypatch.setattr(plugin, "CONFIG", "standin")  # the one module that is patched all the same
    plugin.register()
    assert patched == [True]


def test_kill_switch_does_nothing(patched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SWITCH, "1")
    plugin.register()
    import standin  # noqa: F401

    assert not patched
    monkeypatch.setenv(plugin.SWITCH, "yes")
    with pytest.raises(ValueError, match="MOEBUDGET_DISABLE='yes' must be 1"):
        plugin.register()


class Runner:
    """What both of vLLM's model runners have."""

    def __init__(self, board: Board | None) -> None:
        self.calls: list[str] = []
        if board is not None:
            self.moebudget = SimpleNamespace(
                before_step=lambda: board, after_dummy_run=lambda: self.calls.append("asked")
            )

    def _dummy_run(self, tokens: int) -> int:
        self.calls.append("dummy")
        return tokens

    def capture_model(self) -> int:
        return 7


def params(wish: bool | None = None) -> Any:
    return SimpleNamespace(extra_args=None if wish is None else {"moebudget": wish})


STEP = SimpleNamespace(
    num_scheduled_tokens={"a": 1, "b": 4, "c": 2, "d": 1, "e": 1},
    scheduled_spec_decode_tokens={"b": [1, 2, 3]},
    scheduled_new_reqs=[
        SimpleNamespace(req_id="c", sampling_params=params()),
        SimpleNamespace(req_id="d", sampling_params=params(False)),
    ],
)
# a decodes, b decodes with three drafts, c reads its prompt, d has opted out, e reads the last token of its prompt.
EXPECTED = [VOTES, *[VOTES] * 4, *[KEEPS] * 2, KEEPS, KEEPS, *[PADDING] * 3]


def in_module(cls: type) -> Any:
    module = ModuleType("standin")
    module.GPUModelRunner = cls  # type: ignore[attr-defined]
    return module


def runner_v1(board: Board | None) -> Any:
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
    return V1(board)


def runner_v2(board: Board | None) -> Any:
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
    return V2(board)


def test_rows_of_the_first_model_runner_are_misread() -> None:
    board = Board(12, "cpu")
    assert runner_v1(board)._prepare_inputs(STEP, 5) == (STEP, 5)
    assert board.rows.tolist() == EXPECTED
    assert board.request.tolist() == [0, 1, 1, 1, 1, 2, 2, 3, 4, -1, -1, -1]


def test_rows_of_the_second_model_runner_are_misread() -> None:
    board = Board(12, "cpu")
    runner = runner_v2(board)
    runner.add_requests(STEP)
    assert runner.prepare_inputs(STEP, 1, 2).req_ids == list("abcde")
    assert board.rows.tolist() == EXPECTED


@pytest.mark.parametrize("make", [runner_v1, runner_v2])
def test_dummy_batch_votes_or_is_not_checked(make: Any) -> None:
    board = Board(12, "cpu")
    runner = make(board)
    for call in (lambda: runner._dummy_run(3), runner.capture_model):
        board.rows.fill_(VOTES)
        assert call() in (3, 7)
        assert board.rows.tolist() == [KEEPS] * 12
    assert runner.calls == ["dummy", "asked"]


@pytest.mark.parametrize("make", [runner_v1, runner_v2])
def test_model_runner_without_a_policy_is_touched(make: Any) -> None:
    runner = make(None)
    assert runner._dummy_run(3) == 3
    assert runner.capture_model() == 7


def test_monolithic_kernel_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    current = SimpleNamespace(config=CAPPED)
    fake: Any = ModuleType("vllm.config")
    fake.get_current_vllm_config_or_none = lambda: current.config
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", fake)

    class FusedMoEExperts:
        whole = False

        @classmethod
        def is_monolithic(cls) -> bool:
            return cls.whole

        @staticmethod
        def is_supported_config(cls: Any, *more: Any) -> tuple[bool, str | None]:  # noqa: ARG004
            return True, None

    class Whole(FusedMoEExperts):
        whole = True

    module: Any = ModuleType("standin")
    module.FusedMoEExperts = FusedMoEExperts
    patches.patch_kernel_choice(module)
    supported, why = Whole.is_supported_config(Whole, 1, 2)
    assert not supported
    assert "does not ask the router" in (why or "")
    assert FusedMoEExperts.is_supported_config(FusedMoEExperts, 1, 2) == (True, None)
    current.config = PLAIN
    assert Whole.is_supported_config(Whole, 1, 2) == (True, None)


def test_misspelt_wish_of_a_request_is_served() -> None:
    class SamplingParams:
        extra_args: Any = None

        def _verify_args(self) -> None:
            pass

    module: Any = ModuleType("standin")
    module.SamplingParams = SamplingParams
    patches.patch_sampling_params(module)
    wish = SamplingParams()
    wish._verify_args()
    wish.extra_args = {"moebudget": "0"}
    with pytest.raises(ValueError, match="must be false"):
        wish._verify_args()


def test_rpc_of_an_uncapped_worker_changes_something() -> None:
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    assert control.moebudget_state(worker) is None
    with pytest.raises(ValueError, match='started without "moebudget"'):
        control.moebudget_set(worker, 4)
