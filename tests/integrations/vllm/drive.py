"""Runs jobs in vLLM, in this process, and writes what happened: `python -m ... jobs.json answers.json`.

A job is one engine: {"engine": LLM arguments, "phases": [{"set": arguments of moebudget_set, "requests": [...]}]}.
What a row is, is found here anew from vLLM's own positions and the prompts' lengths; nothing asks moebudget.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

PLAIN = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 6,
    "enable_prefix_caching": False,
    "seed": 0,
}


class Recorder:
    """Every row of every layer: (step, layer, request, position) and the ids that vLLM's kernels are given."""

    def __init__(self, model_runner: Any) -> None:
        self.rows, self.step, self.batch = [], 0, None
        self.second = hasattr(model_runner, "prepare_inputs")
        name = "prepare_inputs" if self.second else "_prepare_inputs"
        prepare = getattr(model_runner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            result = prepare(*args, **kwargs)
            self.batch = self.describe(result if self.second else model_runner)
            return result

        setattr(model_runner, name, noted)
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        layers = [m for m in model_runner.get_model().modules() if isinstance(m, MoERunner)]
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(lambda ids, number=number: self.note(number, ids))

    def describe(self, source: Any) -> list[tuple[int, int]]:
        """(request, position) of each row, from vLLM's batch (second model runner) or model runner (first)."""
        batch = source if self.second else source.input_batch
        starts = source.query_start_loc_np if self.second else source.query_start_loc.np
        computed = batch.num_computed_tokens_np if self.second else batch.num_computed_tokens_cpu
        return [
            (int(request.split("-")[0]), int(computed[number]) + offset)
            for number, request in enumerate(batch.req_ids)
            for offset in range(int(starts[number + 1] - starts[number]))
        ]

    def note(self, layer: int, ids: Any) -> None:
        self.step += layer == 0
        listed = ids.tolist()
        assert len(self.batch) <= len(listed)
        for (request, position), chosen in zip(self.batch, listed, strict=False):
            self.rows.append((self.step, layer, request, position, sorted(chosen)))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One engine: per phase the tokens, the recorded rows and the workers' states; or the error of its start."""
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    try:
        llm = LLM(**{**PLAIN, **job["engine"]})
    except Exception as error:
        message = f"{type(error).__name__}: {error}"

        gc.collect()
        cleanup_dist_env_and_memory()
        return {"error": message}
    core = llm.llm_engine.engine_core
    inside = hasattr(core, "engine_core")
    recorder = None
    if job.get("record"):
        recorder = Recorder(core.engine_core.model_executor.driver_worker.worker.model_runner)
    capped = "moebudget" in job["engine"].get("additional_config", {})
    phases = []
    for phase in job["phases"]:
        answer: dict[str, Any] = {}
        if "set" in phase:
            try:
                llm.collective_rpc("moebudget_set", kwargs=phase["set"])
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"
        before = llm.collective_rpc("moebudget_state") if capped else None
        if recorder is not None:
            recorder.rows, recorder.step = [], 0
        prompts = [{"prompt_token_ids": request["prompt"]} for request in phase["requests"]]
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=request["tokens"],
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if job.get("logprobs") else None,
                extra_args=request.get("extra_args"),
            )
            for request in phase["requests"]
        ]
        outputs = [out.outputs[0] for out in llm.generate(prompts, params, use_tqdm=False)]
        answer["tokens"] = [list(out.token_ids) for out in outputs]
        if job.get("logprobs"):
            answer["logprobs"] = [
                [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
                for out in outputs
            ]
        answer["before"] = before
        answer["states"] = llm.collective_rpc("moebudget_state") if capped else None
        if recorder is not None:
            first = min((request for _, _, request, _, _ in recorder.rows), default=0)
            answer["rows"] = [(s, la, r - first, p, ids) for s, la, r, p, ids in recorder.rows]
        phases.append(answer)
    if inside:
        core.engine_core.shutdown()
    del llm, core, recorder
    gc.collect()
    if inside:
        cleanup_dist_env_and_memory()
    torch.compiler.reset()
    return {"phases": phases}


def interpret_triton() -> None:
    """Let vLLM take Triton's interpreter for a CPU backend: its second model runner needs some Triton."""
    from types import SimpleNamespace

    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


if __name__ == "__main__":
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        interpret_triton()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]))
