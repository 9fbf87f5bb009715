"""Runs jobs in vLLM, in this process, and writes what happened: `python -m ... jobs.json answers.json`.

A job is one engine: {"engine": LLM arguments, "phases": [{"set": arguments of moebudget_set, "requests": [...]}]}.
What a row is, is found here anew from vLLM's own positions and the prompts' lengths; nothing asks moebudget.
"""

from __future__ import annotations

import gc
import json
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
        self.runner, self.rows, self.step = model_runner, [], 0
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        layers = [m for m in model_runner.get_model().modules() if isinstance(m, MoERunner)]
        for number, layer in enumerate(layers):
            layer.router.set_capture_fn(lambda ids, number=number: self.note(number, ids))

    def note(self, layer: int, ids: Any) -> None:
        self.step += layer == 0
        batch = self.runner.input_batch
        starts = self.runner.query_start_loc.np[: len(batch.req_ids) + 1].tolist()
        listed, row = ids.tolist(), 0
        for number, request in enumerate(batch.req_ids):
            first = int(batch.num_computed_tokens_cpu[number])
            for offset in range(starts[number + 1] - starts[number]):
                where = (self.step, layer, int(request.split("-")[0]), first + offset)
                self.rows.append((*where, sorted(listed[row])))
                row += 1
        assert row <= len(listed)


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
                extra_args=request.get("extra_args"),
            )
            for request in phase["requests"]
        ]
        answer["tokens"] = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
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


if __name__ == "__main__":
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in jobs]))
