"""Published config.json of the models that `bench decode` can build with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from moebudget.core.stats import ModelFacts, Stats

SIZES: dict[str, dict[str, Any]] = {
    # https://huggingface.co/Qwen/Qwen3-30B-A3B
    "qwen3-30b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    # https://huggingface.co/Qwen/Qwen1.5-MoE-A2.7B
    "qwen1.5-moe": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
        "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "vocab_size": 151936, "max_position_embeddings": 8192, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    # https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
        "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False,
        "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 1.0, "vocab_size": 102400, "max_position_embeddings": 4096, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
# Distinct experts per layer and step that the trained model fetches at 16 rows, https://arxiv.org/abs/2609.36222.
UNIONS = {"qwen3-30b": 48.8}


def read_config(model: str) -> dict[str, Any]:
    """The config.json of a folder, of a file, or of one of SIZES. FileNotFoundError for anything else."""
    if model in SIZES:
        return SIZES[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(
            f"{model!r} is not a folder with a config.json, not a config.json, and not one of {', '.join(SIZES)}"
        )
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def moe_facts(config: dict[str, Any]) -> ModelFacts:
    """Layers, experts, routes and hidden size that a config.json describes, without a hash of weights.

    Raises ValueError for a config without experts.
    """
    experts = config.get("num_experts", config.get("n_routed_experts", config.get("num_local_experts")))
    if experts is None:
        raise ValueError(f"config.json of model_type {config.get('model_type')!r} has no number of experts")
    first, last = config.get("first_k_dense_replace", 0), config["num_hidden_layers"]
    without_experts = set(config.get("mlp_only_layers") or ())
    layers = tuple(i for i in range(first, last) if i not in without_experts)
    return ModelFacts(config["model_type"], layers, experts, config["num_experts_per_tok"], config["hidden_size"], "")


def random_stats(config: dict[str, Any], needs: frozenset[str]) -> Stats:
    """Random statistics of the right shapes for a model with random weights; they cost as much time as real ones."""
    facts, g = moe_facts(config), torch.Generator().manual_seed(0)
    shape = (len(facts.layers), facts.experts)
    tensors = {
        "predictor_weight": torch.randn(*shape, facts.hidden, generator=g),
        "predictor_bias": torch.zeros(shape),
        "energy_mean": torch.ones(shape),
    }
    missing = needs - tensors.keys()
    if missing:
        raise ValueError(f"random statistics do not include {', '.join(sorted(missing))}; give a file with --stats")
    return Stats(facts, {name: tensors[name] for name in sorted(needs)}, {"model": "random"})
