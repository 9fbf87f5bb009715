"""Extension of vLLM's workers that records the experts of every row and layer, eager or in CUDA graphs.

It reads the requests and positions of rows from vLLM and nothing from moebudget. Copies are EPLB's copies of experts,
if there are any, numbered as vLLM's kernels see them. Ids are copied on the device into buffers of fixed addresses, so
that a captured graph fills them at every replay; they are read after each step.
"""

from __future__ import annotations

import functools
import sys
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor

# step, layer, request, position, executed ids, native ids, executed copies
Row = tuple[int, int, int, int, list[int], list[int], list[int]]


class Recorder:
    """Recorder of one model runner. `rows` grows while `on`; a step is one forward pass with requests in it."""

    def __init__(self, model_runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        self.rows: list[Row] = []
        self.step, self.on = 0, False
        self.batch: list[tuple[int, int]] = []
        layers = [m for m in model_runner.get_model().modules() if isinstance(m, MoERunner)]
        config = model_runner.vllm_config
        size = max(int(model_runner.max_num_tokens), int(config.compilation_config.max_cudagraph_capture_size or 0))
        shape = (3, len(layers), size, layers[0].router.top_k)
        with torch.inference_mode(False):
            self.buffer = torch.full(shape, -1, dtype=torch.int32, device=model_runner.device)
        for layer, run, native, copies in zip(layers, *self.buffer, strict=True):
            observe(layer.router, run, native, copies)
        self._observe_steps(model_runner)

    def _observe_steps(self, model_runner: Any) -> None:
        second = hasattr(model_runner, "prepare_inputs")
        name = "prepare_inputs" if second else "_prepare_inputs"
        prepare, execute = getattr(model_runner, name), model_runner.execute_model

        def prepared(*args: Any, **kwargs: Any) -> Any:
            result = prepare(*args, **kwargs)
            self.batch = describe(result if second else model_runner.input_batch, model_runner, second)
            return result

        def executed(*args: Any, **kwargs: Any) -> Any:
            self.batch = []
            result = execute(*args, **kwargs)
            if self.on and self.batch:
                self._note()
            return result

        setattr(model_runner, name, prepared)
        model_runner.execute_model = executed

    def _note(self) -> None:
        self.step += 1
        for layer, ids in enumerate(zip(*self.buffer[:, :, : len(self.batch)].tolist(), strict=True)):
            for (request, position), run, native, copies in zip(self.batch, *ids, strict=True):
                self.rows.append((self.step, layer, request, position, sorted(run), sorted(native), sorted(copies)))


def describe(batch: Any, model_runner: Any, second: bool) -> list[tuple[int, int]]:
    """(request, position) of each row, from the batch of vLLM's second model runner, or of its first."""
    starts = batch.query_start_loc_np if second else model_runner.query_start_loc.np
    computed = batch.num_computed_tokens_np if second else batch.num_computed_tokens_cpu
    return [
        (int(request.split("-")[0]), int(computed[number]) + offset)
        for number, request in enumerate(batch.req_ids)
        for offset in range(int(starts[number + 1] - starts[number]))
    ]


def observe(router: Any, run: Tensor, native: Tensor, copies: Tensor) -> None:
    """Copy executed ids into `run`, native ids into `native` and executed copies into `copies`, all [T, K]."""
    before = router.capture_fn

    def capture(ids: Tensor) -> None:
        if before is not None:  # vLLM's own observer, for enable_return_routed_experts
            before(ids)
        run[: ids.shape[0]].copy_(ids)

    router.set_capture_fn(capture)
    router.native_ids, router.copy_ids = native, copies
    # moebudget's router class derives from vLLM's, whose method still returns native ids.
    note_routing(next(cls for cls in type(router).__mro__ if cls.__module__.startswith("vllm.")))


@functools.cache
def note_routing(cls: Any) -> None:
    """Let the class's methods copy native ids and executed copies into the router's buffers."""
    original, balance = cls._compute_routing, cls._apply_eplb_mapping

    @functools.wraps(balance)
    def _apply_eplb_mapping(self: Any, ids: Tensor) -> Tensor:
        copies = balance(self, ids)
        if getattr(self, "copy_ids", None) is not None:
            self.copy_ids[: ids.shape[0]].copy_(copies)
        return copies  # type: ignore[no-any-return]

    @functools.wraps(original)
    def _compute_routing(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights, ids = original(self, *args, **kwargs)
        native = getattr(self, "native_ids", None)
        if native is not None:
            native[: ids.shape[0]].copy_(ids)
        return weights, ids

    cls._compute_routing, cls._apply_eplb_mapping = _compute_routing, _apply_eplb_mapping


class Extension:
    """RPC methods of a worker: `collective_rpc("record_start")`, then `collective_rpc("record_take")`."""

    model_runner: Any
    rank: int
    moebudget_set: Any

    def record_start(self) -> None:
        """Drop the recorded rows and start recording."""
        recorder = recorder_of(self.model_runner)
        recorder.rows, recorder.step, recorder.on = [], 0, True

    def record_take(self) -> list[Row]:
        """Stop recording and return the rows."""
        recorder = recorder_of(self.model_runner)
        recorder.on = False
        return recorder.rows

    def set_on_rank(self, rank: int, budget: int) -> None:
        """Change the budget of one rank alone, which is wrong: the ranks then choose differently."""
        if self.rank == rank:
            self.moebudget_set(budget)


def recorder_of(model_runner: Any) -> Recorder:
    """The recorder of a model runner, made on the first call."""
    if not hasattr(model_runner, "recorder"):
        model_runner.recorder = Recorder(model_runner)
    return model_runner.recorder  # type: ignore[no-any-return]


def record_from_the_first_capture() -> None:
    """Install the recorder before vLLM captures graphs, which it does in this method of its GPU worker."""
    cls = sys.modules["vllm.v1.worker.gpu_worker"].Worker
    original = cls.compile_or_warm_up_model

    @functools.wraps(original)
    def compile_or_warm_up_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder_of(self.model_runner)
        return original(self, *args, **kwargs)

    cls.compile_or_warm_up_model = compile_or_warm_up_model


record_from_the_first_capture()  # vLLM imports this file in the worker process, after the class of its worker


def map_experts_on_the_cpu() -> None:
    """Map ids to the rank's experts: vLLM's CPU kernels index a rank's weights by global ids and crash otherwise."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    original = RoutedExperts.forward_modular

    @functools.wraps(original)
    def forward_modular(
        self: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        expert_map = self.expert_map_manager.expert_map
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0.0)
            topk_ids = local.clamp_min(0).to(topk_ids.dtype)
        return original(self, x, topk_weights, topk_ids, *args, **kwargs)

    RoutedExperts.forward_modular = forward_modular


map_experts_on_the_cpu()


def balance_experts_on_the_cpu() -> None:
    """Add what load balancing lacks in vLLM's CPU build: its set-up, the choice of a copy, and a clock."""
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.model_executor.layers.fused_moe.router import base_router
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def map_to_copies(
        topk_ids: Tensor, expert_load_view: Tensor, logical_to_physical_map: Tensor, logical_replica_count: Tensor,
        record_enabled: Tensor, **_: Any,
    ) -> Tensor:  # fmt: skip
        ids, row = topk_ids.long(), torch.arange(len(topk_ids))[:, None]
        copies = logical_to_physical_map[ids, row % logical_replica_count[ids]]
        if record_enabled:
            expert_load_view += torch.bincount(copies.reshape(-1), minlength=len(expert_load_view)).int()
        return copies.to(topk_ids.dtype)

    base_router.eplb_map_to_physical_and_record = map_to_copies
    runner = sys.modules["vllm.v1.worker.cpu_model_runner"].CPUModelRunner
    load, rearrange = runner.load_model, EplbState.rearrange

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        if self.parallel_config.enable_eplb:
            self._moe_model, self.eplb_state = self.model, EplbState(self.parallel_config, self.device)
            self.eplb_state.add_model(self.model, self.model_config)

    clock = Mock(**{"return_value.elapsed_time.return_value": 0.0})

    @functools.wraps(rearrange)
    def rearranged(self: Any, *args: Any, **kwargs: Any) -> Any:
        with patch.object(torch, "Event", clock), patch.object(torch.accelerator, "current_stream", Mock()):
            return rearrange(self, *args, **kwargs)

    runner.load_model, EplbState.rearrange = load_model, rearranged


balance_experts_on_the_cpu()
