"""Loading of transformers models for the command line; what can be refused is checked before the weights load."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from moebudget.core.stats import ModelFacts, Stats
from moebudget.engines.transformers.families import facts_of, require_family

DTYPES = ("auto", "float32", "bfloat16", "float16")


class MissingExtraError(ImportError):
    """A package of an optional extra is not installed."""


def transformers_module() -> Any:
    """The transformers package; MissingExtraError that names the extra if it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("this command needs transformers: pip install 'moebudget[hf]'") from error
    return transformers


def preflight(model: str) -> ModelFacts:
    """Facts of a checkpoint from its config alone; `router_hash` is empty, because no weights are read.

    Raises UnsupportedModelError for dense and unknown architectures, FileNotFoundError if there is no checkpoint.
    """
    return facts_of(skeleton(model))


def skeleton(model: str) -> nn.Module:
    """The model of a checkpoint without its weights, on the meta device. Raises as `preflight`."""
    transformers = transformers_module()
    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"no transformers model at {model!r}: {error}") from error
    require_family(config)
    with torch.device("meta"):
        empty: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return empty


def load_tokenizer(model: str) -> Any:
    """The tokenizer of a checkpoint, without a maximum length. Raises FileNotFoundError."""
    try:
        tokenizer = transformers_module().AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"no tokenizer for the model {model!r}: {error}") from error
    tokenizer.model_max_length = int(1e9)  # moebudget cuts documents, not the tokenizer
    return tokenizer


def require_memory(needed: float, device: str, what: str) -> None:
    """Raise MemoryError if `needed` bytes exceed the device's total memory. `what` names the weights."""
    place = torch.device(device)
    if place.type == "cuda":
        total = float(torch.cuda.mem_get_info(place)[1])
    elif place.type == "cpu" and hasattr(os, "sysconf"):
        total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    else:
        return
    if needed > total:
        raise MemoryError(
            f"{what} does not fit: its weights take {needed / 1e9:,.1f} GB, {place} has {total / 1e9:,.1f} GB in all; "
            "use a larger device, or `moebudget diagnose MODEL --gpu NAME` for an estimate without weights"
        )


def weight_bytes(empty: nn.Module, dtype: str) -> int:
    """Bytes that the parameters of a skeleton need in memory; "auto" is the dtype that its config names."""
    named = getattr(empty.config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    size = named.itemsize if isinstance(named, torch.dtype) else 2
    return size * sum(p.numel() for p in empty.parameters())


def load_model(model: str, *, device: str, dtype: str, stats: Stats | None = None) -> tuple[nn.Module, Any]:
    """(model in eval mode, tokenizer). `dtype` is "auto" or the name of a torch dtype; `stats` are checked first."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} is not available: torch sees no GPU; use --device cpu")
    empty = skeleton(model)
    if stats is not None:
        stats.check(facts_of(empty))
    if getattr(empty.config, "quantization_config", None) is None:
        require_memory(weight_bytes(empty, dtype), device, f"{model} in {dtype}")
    transformers, tokenizer = transformers_module(), load_tokenizer(model)
    transformers.utils.logging.disable_progress_bar()
    chosen = dtype if dtype == "auto" else getattr(torch, dtype)
    loaded: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=chosen).to(device).eval()
    return loaded, tokenizer


def default_device() -> str:
    """`cuda` if torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    """float32 on the CPU, where bf16 arithmetic is slow; the checkpoint's dtype on a GPU."""
    return "float32" if torch.device(device).type == "cpu" else "auto"


def vocabulary(model: nn.Module) -> int:
    """Rows of the model's token embedding."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])
