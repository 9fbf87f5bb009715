"""Load a transformers model for the command line, with everything that can be refused checked before the weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from moebudget.integrations.families import model_facts, moe_layers, require_family
from moebudget.integrations.transformers import model_type
from moebudget.stats import ModelFacts, Stats

DTYPES = ("auto", "float32", "bfloat16", "float16")


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


def transformers_module() -> Any:
    """The transformers package, or an error that names the extra."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("this needs transformers: pip install 'moebudget[hf]'") from error
    return transformers


def preflight(model: str) -> ModelFacts:
    """Facts of a checkpoint from its config alone; `router_hash` is empty because no weights are read.

    Raises UnsupportedModelError for dense and unknown architectures, FileNotFoundError for a missing checkpoint.
    """
    transformers = transformers_module()
    try:
        config = transformers.AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"no transformers model at {model!r}: {error}") from error
    require_family(config)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    return model_facts(moe_layers(skeleton), model_type(skeleton))


def load_model(model: str, *, device: str, dtype: str, stats: Stats | None = None) -> tuple[nn.Module, Any]:
    """(model in eval mode, tokenizer). `dtype` is "auto" or a torch dtype name; statistics are checked first."""
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but torch sees no GPU; use --device cpu")
    facts = preflight(model)
    if stats is not None:
        stats.check(facts)
    transformers = transformers_module()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"no tokenizer beside the model {model!r}: {error}") from error
    transformers.utils.logging.disable_progress_bar()
    tokenizer.model_max_length = int(1e9)  # documents are cut by us, not by the tokenizer
    chosen = dtype if dtype == "auto" else getattr(torch, dtype)
    loaded: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=chosen).to(device).eval()
    return loaded, tokenizer


def default_device() -> str:
    """`cuda` if torch sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> str:
    """float32 on the CPU, where bf16 arithmetic is slow; the checkpoint's own dtype on a GPU."""
    return "float32" if torch.device(device).type == "cpu" else "auto"


def vocabulary(model: nn.Module) -> int:
    """Rows of the model's token embedding."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    return int(embedding.weight.shape[0])
