"""Entry point of `vllm.general_plugins`. Imports neither vLLM nor torch: patches follow vLLM's own imports."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from moebudget.engines.vllm.compat import supported

SWITCH = "MOEBUDGET_DISABLE"
_ROOM = "moebudget.engines.vllm"
# Module of vLLM -> function that patches it, called once, right after the module is loaded.
CONFIG = "vllm.config.vllm"
PATCHES = {
    CONFIG: f"{_ROOM}.patches:patch_config",
    "vllm.sampling_params": f"{_ROOM}.patches:patch_sampling_params",
    "vllm.model_executor.layers.fused_moe.modular_kernel": f"{_ROOM}.patches:patch_kernel_choice",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": f"{_ROOM}.patches:patch_moe_runner",
    "vllm.v1.worker.gpu_worker": f"{_ROOM}.patches:patch_worker",
    "vllm.v1.worker.worker_base": f"{_ROOM}.rpc:patch_worker_base",
    "vllm.v1.worker.gpu_model_runner": f"{_ROOM}.patches:patch_runner_v1",
    "vllm.v1.worker.gpu.model_runner": f"{_ROOM}.patches:patch_runner_v2",
}
MARK = "_moebudget_patched"


def switched_off() -> bool:
    """Whether the kill switch is set. ValueError for a value other than 0 or 1."""
    value = os.environ.get(SWITCH, "0")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SWITCH}={value!r} must be 1 (the plugin does nothing) or 0")
    return value == "1"


def register() -> None:
    """Patch the modules of vLLM, those not yet loaded as soon as they are. May be called repeatedly."""
    if switched_off():
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in PATCHES:
        module = sys.modules.get(name)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _patch(module)


def _patch(module: ModuleType) -> None:
    # In an unsupported version, patch only the configuration, which then refuses to start a capped engine.
    version = str(getattr(sys.modules.get("vllm"), "__version__", ""))
    if getattr(module, MARK, False) or not (supported(version) or module.__name__ == CONFIG):
        return
    where, _, function = PATCHES[module.__name__].partition(":")
    getattr(importlib.import_module(where), function)(module)
    setattr(module, MARK, True)


class _Loader(importlib.abc.Loader):
    """Loader that patches a module after the original loader has loaded it."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader  # tools that read sources need the original loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _patch(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that asks the other finders for the modules of PATCHES and wraps their loader."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in PATCHES:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None
