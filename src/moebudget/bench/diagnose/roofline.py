"""Lower bound of a decode step's time, by the bytes that it must read, from a config.json alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moebudget.bench.sizes import moe_facts

# Memory bandwidth in GB/s from the manufacturers' data sheets (SXM unless named PCIe).
GPUS = {
    "A100-40GB": 1555, "A100-80GB": 2039, "H100-PCIe": 2000, "H100": 3350, "H200": 4800, "B200": 8000, "L4": 300,
    "L40S": 864, "RTX-4090": 1008, "RTX-5090": 1792, "MI300X": 5300,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes of one decode step. Its time is bytes over bandwidth: a bound without launches, arithmetic or routing."""

    layers: int  # layers with experts
    experts: int
    top_k: int
    expert_bytes: int
    other_bytes: int  # attention, shared experts, dense layers, routers and the output matrix
    cache_bytes: int  # keys and values of one token

    def union(self, batch: int) -> float:
        """Distinct experts that `batch` tokens fetch if all experts are equally likely: N (1 - (1 - K / N)^B)."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** batch)

    def step_ms(self, fetched: float, batch: int, context: int, gb_s: float) -> float:
        """Milliseconds of a step that fetches `fetched` experts per layer, with `context` cached tokens per row."""
        moved = self.other_bytes + self.layers * fetched * self.expert_bytes + batch * context * self.cache_bytes
        return 1e3 * moved / (gb_s * 1e9)

    def expert_ms(self, gb_s: float) -> float:
        """Milliseconds to read one more expert in every layer."""
        return 1e3 * self.layers * self.expert_bytes / (gb_s * 1e9)


def roofline(config: dict[str, Any], bytes_a_weight: float = 2.0) -> Roofline:
    """Read the config.json of a text model, or the text part of one. Raises ValueError for one without experts.

    Attention is grouped-query or, with `kv_lora_rank`, multi-head latent attention.
    """
    config = config.get("text_config", config)
    facts = moe_facts(config)
    d, all_layers = config["hidden_size"], config["num_hidden_layers"]
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
    heads = config["num_attention_heads"]
    if config.get("kv_lora_rank"):
        rank, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
        value, q_rank = config["v_head_dim"], config.get("q_lora_rank")
        queries = (d + heads * (nope + rope)) * q_rank if q_rank else d * heads * (nope + rope)
        attention = queries + d * (rank + rope) + rank * heads * (nope + value) + heads * value * d
        cache = rank + rope
    else:
        size = config.get("head_dim") or d // heads
        groups = config.get("num_key_value_heads") or heads
        attention, cache = 2 * d * size * (heads + groups), 2 * groups * size
    moe, dense = len(facts.layers), all_layers - len(facts.layers)
    weights = all_layers * attention + moe * (3 * d * shared + d * facts.experts) + d * config["vocab_size"]
    weights += dense * 3 * d * config.get("intermediate_size", 0)
    return Roofline(
        layers=moe,
        experts=facts.experts,
        top_k=facts.top_k,
        expert_bytes=round(3 * d * width * bytes_a_weight),
        other_bytes=round(weights * bytes_a_weight),
        cache_bytes=round(all_layers * cache * 2),
    )
