"""Table of model architectures: where the router and the experts are, and the rule of the router.

All supported architectures of transformers call `experts(hidden [T, d], ids [T, K], weights [T, K])` from a block
that also holds the router. moebudget intercepts that call and nothing else, so a new architecture is one row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from moebudget.core.router import RouterSpec
from moebudget.core.stats import ModelFacts, hash_routers


class UnsupportedModelError(ValueError):
    """A model that moebudget cannot re-route, with the reason."""


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about one architecture. `spec(config, N)` is the rule of its router."""

    model_type: str
    block: str  # class name of the block that holds router and experts
    spec: Callable[[Any, int], RouterSpec]
    router: str = "gate"  # attribute of the block
    float32: bool = False  # the router multiplies in float32 whatever the model's dtype
    needs: str = ""  # oldest transformers with a separate router and experts, if not the oldest that we support


def _softmax(config: Any, experts: int) -> RouterSpec:
    return RouterSpec(experts, config.num_experts_per_tok, "softmax", bool(config.norm_topk_prob))


def _softmax_of_selected(config: Any, experts: int) -> RouterSpec:
    return RouterSpec(experts, config.num_experts_per_tok, "softmax", True)


def _deepseek_v2(config: Any, experts: int) -> RouterSpec:
    grouped = config.topk_method == "group_limited_greedy"
    groups, open_groups = (config.n_group, config.topk_group) if grouped else (1, 1)
    k, scale = config.num_experts_per_tok, float(config.routed_scaling_factor)
    return RouterSpec(experts, k, "softmax", False, scale, groups, open_groups, "max")


def _deepseek_v3(config: Any, experts: int) -> RouterSpec:
    k, scale, renormalize = (
        config.num_experts_per_tok,
        float(config.routed_scaling_factor),
        bool(config.norm_topk_prob),
    )
    return RouterSpec(experts, k, "sigmoid", renormalize, scale, config.n_group, config.topk_group, "top2")


FAMILIES: dict[str, Family] = {
    f.model_type: f
    for f in (
        Family("qwen3_moe", "Qwen3MoeSparseMoeBlock", _softmax),
        Family("qwen2_moe", "Qwen2MoeSparseMoeBlock", _softmax),
        Family("qwen3_next", "Qwen3NextSparseMoeBlock", _softmax),
        Family("olmoe", "OlmoeSparseMoeBlock", _softmax),
        Family("mixtral", "MixtralSparseMoeBlock", _softmax_of_selected),
        Family("gpt_oss", "GptOssMLP", _softmax_of_selected, router="router"),
        Family("granitemoe", "GraniteMoeMoE", _softmax_of_selected, router="router", needs="5.13"),
        Family("deepseek_v2", "DeepseekV2Moe", _deepseek_v2, float32=True),
        Family("deepseek_v3", "DeepseekV3MoE", _deepseek_v3, float32=True),
        Family("glm4_moe", "Glm4MoeMoE", _deepseek_v3, float32=True),
        Family("dots1", "Dots1MoE", _deepseek_v3, float32=True),
    )
}


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """One Mixture-of-Experts layer of a loaded model."""

    name: str
    index: int  # the decoder layer it belongs to
    router: nn.Module
    experts: nn.Module
    spec: RouterSpec
    float32: bool

    @property
    def weight(self) -> Tensor:
        """The router matrix [N, d]."""
        weight = self.router.weight
        assert isinstance(weight, Tensor)
        return weight

    @property
    def selection_bias(self) -> Tensor | None:
        """[N], added to the scores for ranking only (DeepSeek-V3)."""
        bias = getattr(self.router, "e_score_correction_bias", None)
        return bias if isinstance(bias, Tensor) else None

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [T, d] -> router logits [T, N], recomputed because some releases return probabilities instead."""
        weight, bias = self.weight, getattr(self.router, "bias", None)
        if self.float32:
            hidden, weight = hidden.float(), weight.float()
        return F.linear(hidden, weight, bias)

    def route_outputs(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden [T, d], ids [T, K] -> the unweighted expert output of every route [T, K, d], in one expert call."""
        k = ids.shape[-1]
        ones = hidden.new_ones(ids.numel(), 1)
        outputs = self.experts.forward(hidden.repeat_interleave(k, 0), ids.reshape(-1, 1), ones)
        return outputs.view(*ids.shape, hidden.shape[-1])  # type: ignore[no-any-return]


def text_config(model_or_config: Any) -> Any:
    """The config of the text part, from a model or a config."""
    config = getattr(model_or_config, "config", model_or_config)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def require_family(config: Any) -> Family:
    """The row of a config's architecture; UnsupportedModelError if it is dense or unknown."""
    config = text_config(config)
    family = FAMILIES.get(config.model_type)
    if family is not None:
        return family
    if not any("expert" in name for name in config.to_dict()):
        raise UnsupportedModelError(
            f"{config.model_type!r} is a dense model: it has no experts, so there is nothing to re-route"
        )
    raise UnsupportedModelError(
        f"no row for the architecture {config.model_type!r}; known: {', '.join(sorted(FAMILIES))}. "
        "To add one, add a row to moebudget/engines/transformers/families.py"
    )


def moe_layers(model: nn.Module) -> list[MoeLayer]:
    """The Mixture-of-Experts layers of a transformers model, in order.

    Raises UnsupportedModelError for a dense model, an architecture without a row, or a block that does not separate
    router and experts.
    """
    if getattr(model, "config", None) is None:
        raise UnsupportedModelError(f"{type(model).__name__} has no config: pass a model loaded with transformers")
    config = text_config(model)
    family = require_family(config)
    layers = []
    for name, block in model.named_modules():
        if type(block).__name__ != family.block:
            continue
        router, experts = getattr(block, family.router, None), getattr(block, "experts", None)
        if not isinstance(experts, nn.Module) or not isinstance(getattr(router, "weight", None), Tensor):
            hint = f"; transformers {family.needs} or newer has it" if family.needs else ""
            raise UnsupportedModelError(
                f"{name} ({family.block}) has no separate router and experts in this release of transformers{hint}"
            )
        assert isinstance(router, nn.Module)
        numbers = re.findall(r"\.(\d+)\.", f".{name}.")
        n_experts = int(router.weight.shape[0])  # type: ignore[index]
        spec = family.spec(config, n_experts)
        layers.append(MoeLayer(name, int(numbers[-1]), router, experts, spec, family.float32))
    if not layers:
        raise UnsupportedModelError(
            f"no {family.block} in this {config.model_type!r} model: 0 layers to attach to (are all its layers dense?)"
        )
    return layers


def model_facts(layers: list[MoeLayer], family: str) -> ModelFacts:
    """Facts that statistics of this model must match. `router_hash` is empty for a model on the meta device."""
    first = layers[0]
    ends = [first.weight, layers[-1].weight]
    indices = tuple(layer.index for layer in layers)
    n, d = first.weight.shape
    digest = "" if first.weight.is_meta else hash_routers(ends)
    return ModelFacts(family, indices, n, first.spec.top_k, d, digest)


def model_type(model: nn.Module) -> str:
    """The name of the architecture in transformers, of the text part of the model."""
    return str(text_config(model).model_type)


def facts_of(model: nn.Module) -> ModelFacts:
    """Facts that statistics of this model must match."""
    return model_facts(moe_layers(model), model_type(model))
