"""Driver that runs jobs in vLLM, in this process, and writes the answers: `python -m ... jobs.json answers.json`.

A job is one engine: {"engine": LLM arguments, "phases": [{"set": arguments of moebudget_set, "requests": [...]}]}.
The last phase may have "spoil", a rank and a budget for this rank alone; its answer is the error of the steps that
follow. With "record", record.py records the rows on every rank.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

DEFAULTS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 6,
    "enable_prefix_caching": False,
    "seed": 0,
}


def run(job: dict[str, Any], last: bool) -> dict[str, Any]:
    """Run one engine: per phase the tokens, the recorded rows and the workers' states; or the error at its start.

    The end of the process takes the last engine down: on two GPUs, a shutdown after the workers had ended could hang.
    """
    import torch
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.lora.request import LoRARequest

    if job["engine"].get("enable_eplb"):
        allow_load_balancing_on_the_cpu()
    record = {"worker_extension_cls": "tests.engines.vllm.record.Extension"} if job.get("record") else {}
    try:
        llm = LLM(**{**DEFAULTS, **record, **job["engine"]})
    except Exception as error:
        message = f"{type(error).__name__}: {error}"

        gc.collect()
        cleanup_dist_env_and_memory()
        return {"error": message}
    core = llm.llm_engine.engine_core
    inside = hasattr(core, "engine_core")
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
        if record:
            llm.collective_rpc("record_start")
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
        if "spoil" in phase:
            llm.collective_rpc("set_on_rank", args=tuple(phase["spoil"]))
            try:
                llm.generate(prompts, params, use_tqdm=False)
                answer["error"] = ""
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            phases.append(answer)
            continue
        adapters = [
            LoRARequest("adapter", 1, request["adapter"]) if "adapter" in request else None
            for request in phase["requests"]
        ]
        outputs = [
            out.outputs[0]
            for out in llm.generate(prompts, params, use_tqdm=False, lora_request=adapters if any(adapters) else None)
        ]
        answer["tokens"] = [list(out.token_ids) for out in outputs]
        if job["engine"].get("enable_return_routed_experts"):
            answer["returned"] = [out.routed_experts.tolist() for out in outputs]
        if job.get("logprobs"):
            answer["logprobs"] = [
                [step[token].logprob for step, token in zip(out.logprobs, out.token_ids, strict=True)]
                for out in outputs
            ]
        answer["before"] = before
        answer["states"] = llm.collective_rpc("moebudget_state") if capped else None
        if record:
            ranks = llm.collective_rpc("record_take")
            first = min((row[2] for row in ranks[0]), default=0)
            answer["rows"] = [(s, la, r - first, p, ids) for s, la, r, p, ids, _, _ in ranks[0]]
            answer["native"], answer["copies"] = ([row[i] for row in ranks[0]] for i in (5, 6))
            answer["ranks_run_alike"] = all(rank == ranks[0] for rank in ranks)
        phases.append(answer)
    if last:
        return {"phases": phases}
    if inside:
        core.engine_core.shutdown()
    del llm, core
    gc.collect()
    if inside:
        cleanup_dist_env_and_memory()
    torch.compiler.reset()
    return {"phases": phases}


def allow_load_balancing_on_the_cpu() -> None:
    """Let vLLM's configuration accept expert load balancing on a CPU; record.py adds what is missing there."""
    import vllm.config.parallel as module

    platform = module.current_platform
    if platform.is_cpu():

        class CudaAlike:
            """The CPU platform, but alike CUDA."""

            def __getattr__(self, name: str) -> Any:
                return getattr(platform, name)

            def is_cuda_alike(self) -> bool:
                return True

        module.current_platform = CudaAlike()


def interpret_triton() -> None:
    """Let vLLM use Triton's interpreter as a CPU backend: its second model runner needs a Triton."""
    from types import SimpleNamespace

    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


if __name__ == "__main__":
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        interpret_triton()
    jobs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(job, job is jobs[-1]) for job in jobs]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an ordinary exit would shut the last engine down
