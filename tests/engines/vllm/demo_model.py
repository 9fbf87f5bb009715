"""Demo model in transformers, for comparison with vLLM: `python -m ... FOLDER` writes statistics and answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import moebudget
from moebudget.core.stats import Stats
from moebudget.engines.transformers.families import model_facts, moe_layers

MODEL = Path(moebudget.__file__).parent / "demo" / "model"
POLICY, TOKENS = "base:budget=9", 20
PROMPTS = [[(311 * i + 17 * j) % 8000 + 100 for j in range(12)] for i in range(6)]


def answers(folder: Path) -> dict[str, Any]:
    """Greedy tokens, their log-probabilities and the counters under POLICY, with random statistics."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    layers = moe_layers(model)
    facts = model_facts(layers, "qwen3_moe")
    generator = torch.Generator().manual_seed(0)
    shape = (len(layers), facts.experts, facts.hidden)
    tensors = {
        "predictor_weight": torch.randn(shape, generator=generator),
        "predictor_bias": torch.randn(shape[:2], generator=generator),
    }
    stats = Stats(facts, tensors)
    stats.save(folder / "stats.safetensors")
    inputs = torch.tensor(PROMPTS)
    with moebudget.attach(model, POLICY, stats, finished_ids=frozenset()) as run, torch.inference_mode():
        out = model.generate(
            input_ids=inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = out.sequences[:, inputs.shape[1] :]
    logprobs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return {"tokens": tokens.tolist(), "logprobs": logprobs.tolist(), "counters": run.counters.as_dict()}


if __name__ == "__main__":
    (Path(sys.argv[1]) / "answers.json").write_text(json.dumps(answers(Path(sys.argv[1]))))
