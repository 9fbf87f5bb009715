"""Check that released wheels of vLLM have every name and signature that the plugin uses. Imports no vLLM.

python -m experiments.checks.vllm_contract 0.26.0 0.33.0  # downloads those wheels (300 MB each) into build/wheels
python -m experiments.checks.vllm_contract                # the first release of each supported minor version
"""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from moebudget.engines.vllm.compat import NEWEST, OLDEST

ROOT = Path(__file__).parents[2]

WHEELS = ROOT / "build" / "wheels"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64", "manylinux1_x86_64")
FUSED = "model_executor/layers/fused_moe"

# file -> function or Class.method -> its first parameters
SIGNATURES: dict[str, dict[str, str]] = {
    "config/vllm.py": {
        "VllmConfig.__post_init__": "self",
        "get_current_vllm_config": "",
        "get_current_vllm_config_or_none": "",
        "set_current_vllm_config": "vllm_config",
    },
    "sampling_params.py": {"SamplingParams._verify_args": "self"},
    f"{FUSED}/modular_kernel.py": {
        "FusedMoEExperts.is_supported_config": "cls moe_config",
        "FusedMoEExperts.is_monolithic": "",
    },
    f"{FUSED}/runner/moe_runner.py": {"MoERunner.__init__": "self layer_name moe_config router routed_experts"},
    f"{FUSED}/router/base_router.py": {
        "BaseRouter._compute_routing": "self hidden_states router_logits indices_type",
        "BaseRouter._select_experts": "self hidden_states router_logits",
        "BaseRouter.set_capture_fn": "self capture_fn",
        "eplb_map_to_physical_and_record": "topk_ids expert_load_view logical_to_physical_map logical_replica_count "
        "record_enabled num_unpadded_tokens",
    },
    "distributed/parallel_state.py": {
        "get_ep_group": "",
        "get_tp_group": "",
        "GroupCoordinator.all_reduce": "self input_",
    },
    "v1/worker/gpu_worker.py": {"Worker.load_model": "self"},
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner._prepare_inputs": "self scheduler_output num_scheduled_tokens",
        "GPUModelRunner._dummy_run": "self num_tokens",
        "GPUModelRunner.capture_model": "self",
        "GPUModelRunner.get_model": "self",
    },
    "v1/worker/gpu/model_runner.py": {
        "GPUModelRunner.add_requests": "self scheduler_output",
        "GPUModelRunner.prepare_inputs": "self scheduler_output",
        "GPUModelRunner._dummy_run": "self num_tokens",
        "GPUModelRunner.capture_model": "self",
        "GPUModelRunner.get_model": "self",
    },
    "plugins/endpoint_plugins/interface.py": {
        "EndpointPlugin.attach_router": "self app",
        "EndpointPlugin.init_state": "self engine_client state args",
    },
    "engine/protocol.py": {"EngineClient.collective_rpc": "self method timeout args kwargs"},
}

# file -> class ("" for the module) -> fields, properties or attributes set on self
NAMES: dict[str, dict[str, str]] = {
    "config/vllm.py": {
        "VllmConfig": "additional_config parallel_config model_config compilation_config "
        "load_config speculative_config"
    },
    "config/compilation.py": {"CompilationConfig": "max_cudagraph_capture_size"},
    "config/load.py": {"LoadConfig": "load_format"},
    "config/model.py": {"ModelConfig": "hf_text_config dtype"},
    "config/parallel.py": {
        "ParallelConfig": "data_parallel_size pipeline_parallel_size prefill_context_parallel_size enable_eplb "
        "use_sequence_parallel_moe use_ubatching enable_elastic_ep enable_expert_parallel expert_placement_strategy"
    },
    "envs.py": {"": "VLLM_BATCH_INVARIANT"},
    "sampling_params.py": {"SamplingParams": "extra_args"},
    f"{FUSED}/config.py": {
        "FusedMoEConfig": "hidden_dim hidden_dim_unpadded router_logits_dtype num_local_experts num_logical_experts"
    },
    f"{FUSED}/runner/moe_runner.py": {
        "MoERunner": "layer_name layer_id router moe_config routed_experts is_monolithic"
    },
    f"{FUSED}/expert_map_manager.py": {"ExpertMapManager": "expert_map"},
    f"{FUSED}/routed_experts.py": {"RoutedExperts": "expert_map_manager quant_method"},
    "distributed/parallel_state.py": {"GroupCoordinator": "world_size cpu_group"},
    f"{FUSED}/router/base_router.py": {"BaseRouter": "top_k global_num_experts"},
    f"{FUSED}/router/fused_moe_router.py": {"FusedMoERouter": "eplb_state"},
    "distributed/eplb/eplb_state.py": {"EplbLayerState": "logical_to_physical_map logical_replica_count"},
    f"{FUSED}/router/fused_topk_router.py": {"FusedTopKRouter": "renormalize scoring_func"},
    f"{FUSED}/router/fused_topk_bias_router.py": {
        "FusedTopKBiasRouter": "renormalize scoring_func routed_scaling_factor e_score_correction_bias "
        "_hash_indices_table num_fused_shared_experts"
    },
    f"{FUSED}/router/grouped_topk_router.py": {
        "GroupedTopKRouter": "renormalize scoring_func routed_scaling_factor e_score_correction_bias num_expert_group "
        "topk_group num_fused_shared_experts"
    },
    "v1/worker/gpu_model_runner.py": {
        "GPUModelRunner": "requests input_batch max_num_tokens model_config vllm_config device"
    },
    "v1/worker/gpu_input_batch.py": {
        "CachedRequestState": "sampling_params",
        "InputBatch": "req_ids num_computed_tokens_cpu num_prompt_tokens",
    },
    "v1/worker/gpu/model_runner.py": {"GPUModelRunner": "req_states max_num_tokens model_config vllm_config device"},
    "v1/worker/gpu/input_batch.py": {"InputBatch": "req_ids query_start_loc_np is_prefilling_np"},
    "v1/worker/gpu/states.py": {"RequestState": "req_id_to_index"},
    "v1/worker/worker_base.py": {"WorkerBase": "vllm_config"},
    "v1/core/sched/output.py": {
        "NewRequestData": "req_id sampling_params",
        "SchedulerOutput": "scheduled_new_reqs num_scheduled_tokens scheduled_spec_decode_tokens",
    },
    "plugins/endpoint_plugins/interface.py": {"EndpointPlugin": "name required_tasks"},
}
ORDER = ("_compute_routing(", "capture_fn(", "_apply_eplb_mapping(")  # in BaseRouter._select_experts


def wheel(version: str) -> Path:
    """The wheel of a version, downloaded if it is missing."""
    wheels = sorted(WHEELS.glob(f"vllm-{version}-*.whl"))
    if not wheels:
        options = [option for name in PLATFORMS for option in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, *options, "--dest", str(WHEELS), f"vllm=={version}"], check=True)
        wheels = sorted(WHEELS.glob(f"vllm-{version}-*.whl"))
    return wheels[0]


def names_of(owner: ast.AST) -> Iterator[str]:
    """Names that a class (or module) defines: fields, methods, properties, and attributes set on self."""
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id
            elif (
                isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
            ):
                yield target.attr


def children(owner: ast.AST) -> Iterator[ast.AST]:
    """Direct definitions, those under a condition included."""
    for node in ast.iter_child_nodes(owner):
        yield node
        if isinstance(node, ast.If):
            yield from children(node)


def find(tree: ast.Module, path: str) -> ast.AST | None:
    """The definition of `function`, `Class` or `Class.method`; the module for an empty path."""
    owner: ast.AST = tree
    for name in filter(None, path.split(".")):
        child = next((node for node in children(owner) if getattr(node, "name", None) == name), None)
        if child is None:
            return None
        owner = child
    return owner


def broken(sources: zipfile.ZipFile) -> Iterator[str]:
    """Parts of the contract that the sources break."""
    present = set(sources.namelist())
    for file in sorted({*SIGNATURES, *NAMES}):
        if f"vllm/{file}" not in present:
            yield f"{file} is gone"
            continue
        tree = ast.parse(sources.read(f"vllm/{file}"))
        for path, parameters in SIGNATURES.get(file, {}).items():
            function = find(tree, path)
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{file}: {path} is gone"
                continue
            have = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
            expected = parameters.split()
            if have[: len(expected)] != expected:
                yield f"{file}: {path} takes ({', '.join(have)}), expected ({', '.join(expected)}, ...)"
            if path == "BaseRouter._select_experts":
                text = ast.unparse(function)
                positions = [text.find(call) for call in ORDER]
                if -1 in positions or positions != sorted(positions):
                    yield f"{file}: {path} no longer calls {', '.join(ORDER)} in this order"
        for path, names in NAMES.get(file, {}).items():
            owner = find(tree, path)
            missing = set(names.split()) - (set() if owner is None else set(names_of(owner)))
            if missing:
                yield f"{file}: {path or 'the module'} has no {', '.join(sorted(missing))}"
    plugins = sources.read("vllm/plugins/__init__.py").decode()
    for group in ("vllm.general_plugins", "vllm.endpoint_plugins"):
        if group not in plugins:
            yield f"plugins/__init__.py no longer loads {group}"


def main(versions: list[str]) -> int:
    """Check every version and print what is broken; 1 if anything is."""
    versions = versions or [f"{OLDEST[0]}.{minor}.0" for minor in range(OLDEST[1], NEWEST[1] + 1)]
    WHEELS.mkdir(parents=True, exist_ok=True)
    status = 0
    for version in versions:
        with zipfile.ZipFile(wheel(version)) as sources:
            faults = list(broken(sources))
        print(f"vLLM {version}: {'all names and signatures are there' if not faults else f'{len(faults)} broken'}")
        for fault in faults:
            print(f"  {fault}")
        status |= bool(faults)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
