"""moebudget: fewer distinct experts a Mixture-of-Experts decode batch, chosen so that the output changes least.

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
    from moebudget.integrations.transformers import attach as attach
    from moebudget.policy import Policy as Policy
    from moebudget.presets import parse as parse
    from moebudget.router import RouterSpec as RouterSpec
    from moebudget.stats import Stats as Stats
    from moebudget.stats import load_stats as load_stats
    from moebudget.types import RouterBatch as RouterBatch

_WHERE = {
    "attach": "moebudget.integrations.transformers:attach",
    "load_stats": "moebudget.stats:load_stats",
    "parse": "moebudget.presets:parse",
    "Policy": "moebudget.policy:Policy",
    "presets": "moebudget.presets:",
    "RouterBatch": "moebudget.types:RouterBatch",
    "RouterSpec": "moebudget.router:RouterSpec",
    "Stats": "moebudget.stats:Stats",
}

__all__ = ["Policy", "RouterBatch", "RouterSpec", "Stats", "attach", "load_stats", "parse", "presets"]


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
