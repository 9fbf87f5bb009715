"""The one number of every preset that a search may turn, and where it lies."""

from __future__ import annotations

from moebudget.evaluate.match import Family
from moebudget.presets import EXAMPLES, PRESETS, parse
from moebudget.select import LayerBudget, TopBudget
from moebudget.spelling import unknown
from moebudget.stats import ModelFacts

# Field, least, most ("N" experts, "K" routes a token); whole numbers where these are. The first that is not given.
FREE: dict[str, tuple[tuple[str, float, float | str], ...]] = {
    "topk": (("k", 1, "K"),),
    "oea": (("k0", 1, "K"), ("p", 0.02, 0.98)),
    "sere": (("s", 1, "K"), ("rho", 0.02, 1.0)),
    "lynx": (("alpha", 0.05, 8.0),),
    "lynx_lat": (("drop", 0, "N"),),
    "exfold_prefill": (("p", 1, "K"),),
    "xshare": (("m", 0, "N"),),
    "xshare_balanced": (("m", 1, "N"),),
    "xshare_ep": (("m_device", 0, "N"),),
    "caee": (("theta", 0.02, 8.0),),
    "caee_offload": (("theta", 0.02, 1.0),),
    "worth": (("least", 0.02, 8.0),),
    "skip": (("scale", 0.1, 6.0),),
    "des_vote": (("beta", 0.12, 0.5),),
    "dmoe": (("share", 0.05, 0.99),),
    "acceptmoe": (("scale", 0.05, 2.0),),
}

# Fetch as many as their budget says while the union is larger.
COUNTS = {"router_mass", "squared", "static", "base", "nonlinear", "oracle", "exfold", "reap", "spread"}


def family(text: str, facts: ModelFacts) -> Family | None:
    """`base`, `base:fill=half` or `oea:k0=2` -> the policies that differ in the preset's free number.

    Other fields that a preset needs are those of its example. None for a policy with nothing left to turn. ValueError
    for a preset that has no number at all, and as `parse`.
    """
    preset, _, rest = text.strip().partition(":")
    if preset not in PRESETS:
        raise ValueError(unknown("policy", preset, list(PRESETS)))
    if preset == "dense":
        raise ValueError("policy 'dense' has nothing to search; it is in every table by itself")
    given = _fields(rest)
    for field, low, high in FREE.get(preset, (("budget", 1, "N"),)):
        if field in given:
            continue
        example = {k: v for k, v in _fields(EXAMPLES[preset].partition(":")[2]).items() if k != field}
        fields = {field: "{}", **example, **given}
        most = {"N": facts.experts, "K": facts.top_k}.get(high, high) if isinstance(high, str) else high
        template = preset + ":" + ",".join(f"{k}={v}" for k, v in fields.items())
        found = Family(template, low, float(most), whole=isinstance(low, int) and isinstance(high, str))
        found.policy(found.high)
        return found
    parse(text)
    return None


def near(found: Family, target: float) -> Family:
    """The family without the settings that cannot fetch `target` experts, where the number is the count."""
    if found.template.partition(":")[0] not in COUNTS:
        return found
    low = min(max(found.low, float(int(target))), found.high)
    return Family(found.template, low, min(found.high, low + 2), whole=True)


def caps(found: Family) -> bool:
    """Whether the family's number bounds what a layer fetches, on average over the layers."""
    return isinstance(found.policy(found.high).select, TopBudget | LayerBudget)


def _fields(text: str) -> dict[str, str]:
    return {k.strip(): v.strip() for k, _, v in (part.partition("=") for part in text.split(",") if part.strip())}
