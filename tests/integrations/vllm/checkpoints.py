"""Tiny random checkpoints of four router kinds, written with transformers: `python -m ... FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

EXPERTS, TOP_K, LAYERS, VOCAB, HIDDEN = 16, 4, 3, 256, 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
_MLA = {"kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}

# name -> (config class, model class, fields beyond the common ones)
CHECKPOINTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": EXPERTS, "norm_topk_prob": True}),
    "qwen2": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {"num_experts": EXPERTS, "hidden_size": 128, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    ),
    "deepseek": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {
            **_MLA, "num_key_value_heads": 4, "head_dim": 32, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
            "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0,
            "first_k_dense_replace": 0, "norm_topk_prob": False,
        },
    ),
    "glm4": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {
            "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "norm_topk_prob": True,
        },
    ),
    "one": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": EXPERTS, "num_hidden_layers": 1}),
    "dense": ("Qwen3Config", "Qwen3ForCausalLM", {}),
}  # fmt: skip


def write(folder: Path) -> None:
    """One checkpoint a subfolder, bf16, and statistics of the first in stats.safetensors."""
    import torch
    import transformers

    from moebudget.integrations.families import model_facts, moe_layers
    from moebudget.stats import Stats

    for name, (config_class, model_class, fields) in CHECKPOINTS.items():
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**{**_COMMON, **fields})
        model = getattr(transformers, model_class)(config).to(torch.bfloat16)
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):
                module.e_score_correction_bias.data.normal_(std=0.1)
        model.save_pretrained(folder / name)
        if name == "qwen3":
            layers = moe_layers(model)
            n, d = len(layers), layers[0].weight.shape[1]
            tensors = {
                "predictor_weight": torch.randn(n, EXPERTS, d),
                "predictor_bias": torch.randn(n, EXPERTS),
                "energy_mean": torch.rand(n, EXPERTS) + 0.1,
            }
            facts = model_facts(layers, "qwen3_moe")
            Stats(facts, tensors, {"model": "tiny qwen3"}).save(folder / "stats.safetensors")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
