"""Tiny random checkpoints for four kinds of routers, written with transformers: `python -m ... FOLDER`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from moebudget.bench.sizes import SIZES

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

# name -> (config class, model class, fields besides _COMMON)
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
    "one_layer": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"num_experts": EXPERTS, "num_hidden_layers": 1}),
    "dense": ("Qwen3Config", "Qwen3ForCausalLM", {}),
}  # fmt: skip

# Sizes that GPU kernels accept, with fp8 block scales and over two tensor-parallel ranks.
WIDE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64,
    "num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": TOP_K, "norm_topk_prob": True,
    "initializer_range": 0.1,
}  # fmt: skip
RANK = 8  # of the LoRA adapter
# Expert load balancing: two experts have a copy, and vLLM rearranges all copies over the ranks every 20 steps.
BALANCE: dict[str, Any] = {
    "enable_eplb": True,
    "eplb_config": {
        "num_redundant_experts": 2, "use_async": False, "communicator": "torch_gloo", "step_interval": 20,
        "window_size": 10,
    },
}  # fmt: skip
DEMO_FOLDER = Path(__file__).resolve().parents[3] / "src/moebudget/demo/model"
DEMO: dict[str, Any] = json.loads((DEMO_FOLDER / "config.json").read_text())
QWEN3: dict[str, Any] = {**SIZES["qwen3-30b"], "num_hidden_layers": 4}


def write(folder: Path) -> None:
    """Write each checkpoint to a subfolder, in bf16, and statistics of the first to stats.safetensors."""
    for name, (config_class, model_class, fields) in CHECKPOINTS.items():
        model = make(config_class, model_class, fields)
        model.save_pretrained(folder / name)
        if name == "qwen3":
            save_stats(model, folder / "stats.safetensors")


def write_wide(folder: Path) -> None:
    """Write a checkpoint of WIDE's sizes to wide, its statistics to wide.safetensors, an adapter to adapter."""
    model = make("Qwen3MoeConfig", "Qwen3MoeForCausalLM", WIDE)
    model.save_pretrained(folder / "wide")
    save_stats(model, folder / "wide.safetensors")
    save_adapter(folder / "adapter")


def write_with_stats(name: str, folder: Path, device: str) -> None:
    """Write the demo model ("demo") or four random layers of Qwen3-30B-A3B's sizes ("qwen3"), with its statistics."""
    import torch
    import transformers

    if name == "demo":
        shutil.copytree(DEMO_FOLDER, folder / name, dirs_exist_ok=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_FOLDER, dtype=torch.bfloat16)
    else:
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(**{k: v for k, v in QWEN3.items() if k != "model_type"})
        with torch.device(device):
            model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder / name)
    save_stats(model, folder / f"{name}.safetensors")


def make(config_class: str, model_class: str, fields: dict[str, Any]) -> Any:
    """A random model in bf16."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**_COMMON, **fields})
    model = getattr(transformers, model_class)(config).to(torch.bfloat16)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.data.normal_(std=0.1)
    return model


def save_stats(model: Any, path: Path) -> None:
    """Save random statistics of a Qwen3 model for `base`."""
    import torch

    from moebudget.core.stats import Stats
    from moebudget.engines.transformers.families import model_facts, moe_layers

    layers = moe_layers(model)
    facts = model_facts(layers, "qwen3_moe")
    shape = (len(layers), facts.experts)
    tensors = {
        "predictor_weight": torch.randn(*shape, facts.hidden),
        "predictor_bias": torch.randn(shape),
        "energy_mean": torch.rand(shape) + 0.1,
    }
    Stats(facts, tensors, {"model": "tiny qwen3"}).save(path)


def save_adapter(folder: Path) -> None:
    """Save a LoRA adapter of WIDE's attention and experts, as PEFT does, strong enough to change tokens."""
    import torch
    from safetensors.torch import save_file

    hidden, wide = WIDE["hidden_size"], WIDE["moe_intermediate_size"]
    heads = WIDE["head_dim"] * _COMMON["num_attention_heads"]
    values = WIDE["head_dim"] * _COMMON["num_key_value_heads"]
    shapes = {
        "q_proj": (hidden, heads),
        "k_proj": (hidden, values),
        "v_proj": (hidden, values),
        "o_proj": (heads, hidden),
    }
    expert = {"gate_proj": (hidden, wide), "up_proj": (hidden, wide), "down_proj": (wide, hidden)}
    tensors = {}
    for layer in range(WIDE["num_hidden_layers"]):
        modules = {f"self_attn.{name}": shape for name, shape in shapes.items()}
        for number in range(WIDE["num_experts"]):
            modules |= {f"mlp.experts.{number}.{name}": shape for name, shape in expert.items()}
        for name, (inside, outside) in modules.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, inside).bfloat16() * inside**-0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(outside, RANK).bfloat16() * 0.3
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none",
        "target_modules": [*shapes, *expert], "base_model_name_or_path": "wide",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
