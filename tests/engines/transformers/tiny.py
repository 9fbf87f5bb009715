"""Tiny random models of every supported architecture, made from the real config and model classes of transformers.

This module looks up modules by name and writes out the experts' arithmetic, so it does not depend on moebudget.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moebudget import attach
from moebudget.core.stats import Stats

VOCAB = 64
BOS, EOS, PAD, POISON = range(4)  # tests may set the embedding of POISON to NaN; words are the ids above
EXPERTS, TOP_K = 12, 3
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": TOP_K,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_MLA = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}
_DEEPSEEK = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Case:
    """One architecture with one kind of router. `requires`: a class that its modelling file must have."""

    name: str
    model_type: str
    settings: dict[str, Any] = field(hash=False)
    requires: str = ""

    def __str__(self) -> str:
        return self.name


CASES = {
    case.name: case
    for case in (
        Case("qwen3_moe", "qwen3_moe", {"num_experts": EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}),
        Case(
            "qwen2_moe",
            "qwen2_moe",
            {
                "num_experts": EXPERTS,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 40,
                "norm_topk_prob": False,
                "layer_types": ["full_attention"] * 3,
                "num_hidden_layers": 3,
                "mlp_only_layers": [1],  # a dense layer in the middle
            },
        ),
        Case(
            "qwen3_next",
            "qwen3_next",
            {
                "num_experts": EXPERTS,
                "moe_intermediate_size": 24,
                "shared_expert_intermediate_size": 24,
                "norm_topk_prob": True,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
            },
        ),
        Case("olmoe", "olmoe", {"num_experts": EXPERTS, "norm_topk_prob": False}),
        Case("mixtral", "mixtral", {"num_local_experts": EXPERTS}),
        Case(
            "gpt_oss",
            "gpt_oss",
            {
                "num_local_experts": EXPERTS,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        Case("granitemoe", "granitemoe", {"num_local_experts": EXPERTS}, requires="GraniteMoeExperts"),
        Case(
            "deepseek_v2-greedy",
            "deepseek_v2",
            {**_DEEPSEEK, **_MLA, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.5},
        ),
        Case(
            "deepseek_v2-groups",
            "deepseek_v2",
            {
                **_DEEPSEEK,
                **_MLA,
                "q_lora_rank": 16,
                "topk_method": "group_limited_greedy",
                "n_group": 4,
                "topk_group": 2,
                "routed_scaling_factor": 4.0,
                "first_k_dense_replace": 1,
                "num_hidden_layers": 3,
            },
        ),
        Case(
            "deepseek_v3",
            "deepseek_v3",
            {
                **_DEEPSEEK,
                **_MLA,
                "q_lora_rank": 16,
                "n_group": 4,
                "topk_group": 2,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "first_k_dense_replace": 1,
                "num_hidden_layers": 3,
            },
        ),
        Case(
            "glm4_moe",
            "glm4_moe",
            {**_DEEPSEEK, "first_k_dense_replace": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
        ),
        Case(
            "dots1",
            "dots1",
            {
                **_DEEPSEEK,
                "first_k_dense_replace": 0,
                "norm_topk_prob": False,
                "routed_scaling_factor": 2.0,
                "sliding_window": None,
                "layer_types": ["full_attention"] * 2,
            },
        ),
    )
}


def build(
    case: Case, *, experts: str = "eager", dtype: torch.dtype = torch.float32, seed: int = 0, **more: Any
) -> Any:
    """A random model in eval mode. Weights are redrawn: the usual initialisation leaves routers near a tie."""
    config = CONFIG_MAPPING[case.model_type](**{**_COMMON, **case.settings, **more})
    config._experts_implementation = experts
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
    numbers = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            std = _spread(name, tensor)
            if std:
                tensor.copy_(torch.randn(tensor.shape, generator=numbers) * std)
    model = model.to(dtype).eval()
    assert model.config._experts_implementation == experts
    return model


def _spread(name: str, tensor: Tensor) -> float:
    """Standard deviation of a random tensor; 0 keeps the tensor unchanged."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf == "e_score_correction_bias":
        return 0.2
    if name.endswith(("gate.weight", "router.weight")):
        return 1.5 / tensor.shape[-1] ** 0.5  # logits of about 1.5
    if leaf == "sinks" or "bias" in leaf:
        return 0.2 if leaf != "dt_bias" else 0.0
    if tensor.ndim < 2 or "norm" in name or "rotary" in name:
        return 0.0
    if "embed_tokens" in name:
        return 1.0
    return 1.0 / tensor.shape[1 if leaf.endswith("proj") and tensor.ndim == 3 else -1] ** 0.5


@functools.cache
def missing(case: Case) -> str:
    """Why this release of transformers cannot run the case, determined by a trial; empty if it can."""
    release = f"transformers {transformers.__version__}"
    if case.model_type not in CONFIG_MAPPING:
        return f"{release} has no {case.model_type}"
    code = importlib.import_module(f"transformers.models.{case.model_type}.modeling_{case.model_type}")
    if case.requires and not hasattr(code, case.requires):
        return f"{release} has no {case.requires}: router and experts of {case.model_type} are not separate"
    try:
        with torch.no_grad():
            build(case)(input_ids=prompts(1, 3))
    except AttributeError as error:
        return f"{release} cannot run {case.name} at all: {error}"
    return ""


def available(name: str) -> Case:
    """The case with this name; skips the test if this release of transformers cannot run it."""
    case = CASES[name]
    if reason := missing(case):
        pytest.skip(reason)
    return case


def prompts(rows: int, length: int, seed: int = 0) -> Tensor:
    """[rows, length] words, without special tokens."""
    return torch.randint(POISON + 1, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def experts_modules(model: nn.Module) -> list[nn.Module]:
    """The routed experts of every layer, by name."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


@dataclass(frozen=True)
class Call:
    """Arguments of one call of an experts module."""

    layer: int
    hidden: Tensor  # [T, d]
    ids: Tensor  # [T, K]
    weights: Tensor  # [T, K]

    def fetched(self, rows: Tensor | None = None) -> frozenset[int]:
        ids = self.ids if rows is None else self.ids[rows]
        return frozenset(ids.flatten().tolist())

    def over_experts(self, rows: Tensor) -> Tensor:
        """The weights of these rows by expert [T, N], so that the order of the slots does not matter."""
        return self.weights.new_zeros(len(rows), EXPERTS).scatter_add(-1, self.ids[rows], self.weights[rows])


@contextmanager
def recorded(model: nn.Module) -> Iterator[list[Call]]:
    """Every call that reaches the forward of an experts module, with its final arguments."""
    calls: list[Call] = []
    modules = experts_modules(model)

    def record(layer: int, module: nn.Module) -> None:
        signature = inspect.signature(type(module).forward)

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            inputs = list(signature.bind(module, *args, **kwargs).arguments.values())[1:4]
            calls.append(Call(layer, *(t.detach().clone() for t in inputs)))
            return type(module).forward(module, *args, **kwargs)

        module.forward = forward

    for layer, module in enumerate(modules):
        record(layer, module)
    try:
        yield calls
    finally:
        for module in modules:
            del module.forward


def passes(model: nn.Module, calls: list[Call]) -> list[list[Call]]:
    """Calls by forward pass: [passes][layers], without calls of single routes, which only measure."""
    layers = len(experts_modules(model))
    routed = [call for call in calls if call.ids.shape[1] == TOP_K]
    assert [call.layer for call in routed] == [*range(layers)] * (len(routed) // layers)
    return [routed[i : i + layers] for i in range(0, len(routed), layers)]


@torch.no_grad()
def native_routes(model: nn.Module, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Native ids and weights [T, K] of a layer for hidden [T, d], from a run of its block alone."""
    name = [name for name, _ in model.named_modules() if name.endswith(".experts")][layer]
    block = model.get_submodule(name.removesuffix(".experts"))
    experts = block.experts
    seen: list[tuple[Tensor, Tensor]] = []
    outer = experts.__dict__.get("forward")
    hooks, experts._forward_pre_hooks = experts._forward_pre_hooks, OrderedDict()

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        seen.append((ids, weights))
        return torch.zeros_like(hidden)

    experts.forward = forward
    try:
        block(hidden[None])
    finally:
        experts._forward_pre_hooks = hooks
        if outer is None:
            del experts.forward
        else:
            experts.forward = outer
    return seen[0]


def expert_alone(experts: Any, hidden: Tensor, expert: int) -> Tensor:
    """hidden [d] -> the output of one expert [d], with the arithmetic written out."""
    if hasattr(experts, "gate_up_proj_bias"):  # gpt-oss
        gate_up = hidden @ experts.gate_up_proj[expert] + experts.gate_up_proj_bias[expert]
        gate, up = gate_up[0::2].clamp(max=7.0), gate_up[1::2].clamp(-7.0, 7.0)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        return inner @ experts.down_proj[expert] + experts.down_proj_bias[expert]
    gate, up = (experts.gate_up_proj[expert] @ hidden).chunk(2)
    return experts.down_proj[expert] @ (F.silu(gate) * up)


def snapshot(model: nn.Module) -> dict[str, object]:
    """All state of the model that `attach` could fail to restore."""
    state: dict[str, object] = {"generation_config": copy.deepcopy(vars(model.generation_config))}
    state["config"] = model.config.to_dict()
    state["forward of the class"] = type(model).forward
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            state[f"{name}.{key}"] = dict(value) if isinstance(value, dict) else value
    return state


def start(model: nn.Module, policy: str, stats: Stats | None = None) -> None:
    """Attach to a model that must be refused; fails the test if that succeeds."""
    with attach(model, policy, stats):
        pytest.fail("attached")


def cache_name(model: nn.Module) -> str:
    """Name of the key-value cache in this release."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


@torch.no_grad()
def forward(model: Any, ids: Tensor, cache: Any = None, **more: Any) -> tuple[Tensor, Any]:
    """(logits, cache) of one forward pass; without `cache` it makes one."""
    past = {} if cache is None else {cache_name(model): cache}
    out = model(input_ids=ids, use_cache=True, **past, **more)
    return out.logits, out[cache_name(model)]


@torch.no_grad()
def generate(model: Any, ids: Tensor, new: int, **more: Any) -> Any:
    """Greedy tokens and their logits; no row ends by itself."""
    settings = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": new,
        "do_sample": False,
        "suppress_tokens": [*range(POISON + 1)],
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    out = model.generate(ids, **{**settings, **more})
    return out.sequences, torch.stack(out.logits, 1)
