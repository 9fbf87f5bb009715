"""Patches of vLLM's modules, one function per module. They do nothing without "moebudget" in additional_config."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from moebudget.engines.config import KEY, read_settings
from moebudget.engines.vllm.compat import check_layout, check_version
from moebudget.engines.vllm.row_kinds import StepRows, check_extra_args, decode_requests

Method = Callable[..., Any]


def wrap(cls: Any, name: str, around: Callable[[Method], Method]) -> None:
    """Replace a method of a class by `around(method)`."""
    original = getattr(cls, name)
    setattr(cls, name, functools.wraps(original)(around(original)))


def is_capped(vllm_config: Any) -> bool:
    """Whether the engine of this configuration is to be capped."""
    extra = getattr(vllm_config, "additional_config", None)
    return isinstance(extra, dict) and KEY in extra


def patch_config(module: ModuleType) -> None:
    """VllmConfig: check the settings, the version and the layout as soon as there is a configuration."""

    def around(original: Method) -> Method:
        def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if is_capped(self):
                import vllm
                from vllm import envs

                check_version(vllm.__version__)
                settings = read_settings(self.additional_config)
                by_device = settings is not None and settings.policy.needs_placement
                check_layout(self, batch_invariant=bool(envs.VLLM_BATCH_INVARIANT), by_device=by_device)

        return __post_init__

    wrap(module.VllmConfig, "__post_init__", around)


def patch_sampling_params(module: ModuleType) -> None:
    """SamplingParams: reject a request whose opt-out is not a boolean."""

    def around(original: Method) -> Method:
        def _verify_args(self: Any) -> None:
            original(self)
            check_extra_args(self.extra_args)

        return _verify_args

    wrap(module.SamplingParams, "_verify_args", around)


def patch_kernel_choice(module: ModuleType) -> None:
    """FusedMoEExperts: reject monolithic kernels, which route inside, for a capped engine."""
    original = module.FusedMoEExperts.is_supported_config

    @functools.wraps(original)
    def is_supported_config(cls: Any, *args: Any, **kwargs: Any) -> tuple[bool, str | None]:
        from vllm.config import get_current_vllm_config_or_none

        if cls.is_monolithic() and is_capped(get_current_vllm_config_or_none()):
            return False, "kernel does not call the router, which moebudget needs"
        return original(cls, *args, **kwargs)  # type: ignore[no-any-return]

    module.FusedMoEExperts.is_supported_config = staticmethod(is_supported_config)


def patch_moe_runner(module: ModuleType) -> None:
    """MoERunner: pass each new layer to the engine that is being built."""

    def around(original: Method) -> Method:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            from vllm.config import get_current_vllm_config

            if is_capped(get_current_vllm_config()):
                from moebudget.engines.vllm.engine import Engine

                if Engine.loading is None:
                    raise RuntimeError("a Mixture-of-Experts layer was made outside load_model: nothing would cap it")
                Engine.loading.collect(self)

        return __init__

    wrap(module.MoERunner, "__init__", around)


def patch_worker(module: ModuleType) -> None:
    """Worker: collect the layers while the model loads, then bind the Engine to the model runner."""

    def around(original: Method) -> Method:
        def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            settings = read_settings(self.vllm_config.additional_config)
            if settings is None:
                return original(self, *args, **kwargs)
            from vllm.config import set_current_vllm_config

            from moebudget.engines.vllm.engine import Engine

            family = str(self.vllm_config.model_config.hf_text_config.model_type)
            engine = Engine(settings, family, drafts=self.vllm_config.speculative_config is not None)
            Engine.loading = engine
            try:
                result = original(self, *args, **kwargs)
            finally:
                Engine.loading = None
            with set_current_vllm_config(self.vllm_config):
                engine.bind(self.model_runner)
            self.model_runner.moebudget = engine
            return result

        return load_model

    wrap(module.Worker, "load_model", around)


def patch_runner_v1(module: ModuleType) -> None:
    """GPUModelRunner of v1/worker/gpu_model_runner.py: describe the rows of every step."""

    def around(original: Method) -> Method:
        def _prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, scheduler_output, *args, **kwargs)
            step_rows = _step_rows(self)
            if step_rows is not None:
                batch = self.input_batch
                requests = batch.req_ids
                count = len(requests)
                scheduled, drafts = _tokens(scheduler_output, requests)
                computed, prompt = batch.num_computed_tokens_cpu[:count], batch.num_prompt_tokens[:count]
                new = {name: self.requests[name].sampling_params for name in requests}
                step_rows.note_requests(new, requests)
                step_rows.describe(requests, scheduled, decode_requests(computed, prompt, scheduled, drafts))
            return result

        return _prepare_inputs

    wrap(module.GPUModelRunner, "_prepare_inputs", around)
    _patch_dummies(module.GPUModelRunner)


def patch_runner_v2(module: ModuleType) -> None:
    """GPUModelRunner of v1/worker/gpu/model_runner.py: describe the rows of every step."""

    def around_add(original: Method) -> Method:
        def add_requests(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, scheduler_output, *args, **kwargs)
            step_rows = _step_rows(self)
            if step_rows is not None:
                new = {request.req_id: request.sampling_params for request in scheduler_output.scheduled_new_reqs}
                step_rows.note_requests(new, set(self.req_states.req_id_to_index))
            return result

        return add_requests

    def around(original: Method) -> Method:
        def prepare_inputs(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            batch = original(self, scheduler_output, *args, **kwargs)
            step_rows = _step_rows(self)
            if step_rows is not None:
                lengths = np.diff(batch.query_start_loc_np[: len(batch.req_ids) + 1])
                step_rows.describe(batch.req_ids, lengths, ~batch.is_prefilling_np[: len(lengths)])
            return batch

        return prepare_inputs

    wrap(module.GPUModelRunner, "add_requests", around_add)
    wrap(module.GPUModelRunner, "prepare_inputs", around)
    _patch_dummies(module.GPUModelRunner)


def _step_rows(model_runner: Any) -> StepRows | None:
    """The rows of a capped model runner; None for any other."""
    engine = getattr(model_runner, "moebudget", None)
    return None if engine is None else engine.before_step()


def _tokens(scheduler_output: Any, requests: list[str]) -> tuple[Any, Any]:
    """Scheduled tokens [R] per request, and how many of them are drafts [R]."""
    drafts = scheduler_output.scheduled_spec_decode_tokens
    scheduled = [scheduler_output.num_scheduled_tokens[name] for name in requests]
    return np.array(scheduled), np.array([len(drafts.get(name, ())) for name in requests])


def _patch_dummies(cls: Any) -> None:
    """Let dummy batches and captures keep the native routes; a dummy batch must have called every router."""

    def dummy(original: Method) -> Method:
        def _dummy_run(self: Any, *args: Any, **kwargs: Any) -> Any:
            step_rows = _step_rows(self)
            if step_rows is not None:
                step_rows.reset()
            result = original(self, *args, **kwargs)
            if step_rows is not None:
                self.moebudget.after_dummy_run()
            return result

        return _dummy_run

    def capture(original: Method) -> Method:
        def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
            step_rows = _step_rows(self)
            if step_rows is not None:
                step_rows.reset()
            return original(self, *args, **kwargs)

        return capture_model

    wrap(cls, "_dummy_run", dummy)
    wrap(cls, "capture_model", capture)
