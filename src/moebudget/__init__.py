"""moebudget: limit how many distinct experts a Mixture-of-Experts decode batch fetches, at the least quality loss.

import moebudget

policy = moebudget.parse("base:budget=10")
with moebudget.attach(model, policy, moebudget.load_stats("stats.safetensors")) as run:
    model.generate(**batch)
print(run.counters)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moebudget import presets as presets
    from moebudget.core.policy import Policy as Policy
    from moebudget.core.router import RouterSpec as RouterSpec
    from moebudget.core.stats import Stats as Stats
    from moebudget.core.stats import load_stats as load_stats
    from moebudget.core.types import RouterBatch as RouterBatch
    from moebudget.engines.transformers.attach import attach as attach
    from moebudget.methods.registry import parse as parse
    from moebudget.methods.registry import register as register

_WHERE = {
    "attach": "moebudget.engines.transformers.attach:attach",
    "load_stats": "moebudget.core.stats:load_stats",
    "parse": "moebudget.methods.registry:parse",
    "Policy": "moebudget.core.policy:Policy",
    "presets": "moebudget.presets:",
    "register": "moebudget.methods.registry:register",
    "RouterBatch": "moebudget.core.types:RouterBatch",
    "RouterSpec": "moebudget.core.router:RouterSpec",
    "Stats": "moebudget.core.stats:Stats",
}

__all__ = [
    "Policy", "RouterBatch", "RouterSpec", "Stats", "attach", "load_stats", "parse", "presets", "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that `import moebudget` costs nothing."""
    if name == "__version__":
        from importlib.metadata import version

        return version("moebudget")
    if name not in _WHERE:
        raise AttributeError(f"module 'moebudget' has no attribute {name!r}; public names: {', '.join(__all__)}")
    module, _, attribute = _WHERE[name].partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
