"""Every method by name. A preset is a Score, a Select and a Fill; `parse` reads `base:budget=10`.

>>> from moebudget import presets
>>> presets.base(budget=10) == presets.parse("base:budget=10")
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moebudget import fill, rivals, score, select
from moebudget.device_selects import CostInvariant, DeviceBudget, Level, WorthFetching
from moebudget.policy import Policy
from moebudget.rivals import (
    YES_NO,
    acceptmoe,
    caee,
    caee_offload,
    des_vote,
    dmoe,
    exfold,
    exfold_prefill,
    exfold_static,
    lynx,
    lynx_lat,
    moe_spec,
    oea,
    reap,
    reap_static,
    sere,
    skip,
    xshare,
    xshare_balanced,
    xshare_ep,
)
from moebudget.spelling import choice, count, fill_of, number, read, spell


def _budgeted(preset: str, rule: score.Score, budget: int, fill: str) -> Policy:
    budget = count(preset, "budget", budget)
    name = spell(preset, {"fill": "original"}, budget=budget, fill=fill)
    return Policy(rule, select.TopBudget(budget), fill_of(preset, fill), name)


def _relative(preset: str, exponent: float) -> score.Score:
    """BASE's removal costs, relative to the row's sum to the power of `exponent`."""
    exponent = number(preset, "relative", exponent, most=1.0, zero=True)
    rule = score.PredictedEnergy()
    return score.Relative(rule, exponent) if exponent else rule


def _leveled(preset: str, rule: select.Select, level: str) -> select.Select:
    """With `level` the devices that fetch fewer than the fullest one are filled up (CAEE)."""
    return Level(rule) if choice(preset, "level", level, YES_NO) == "yes" else rule


def dense() -> Policy:
    """The model as it is; every route of every row."""
    return Policy(score.RouterMass(), select.Union(), fill.Drop(), "dense")


def topk(k: int) -> Policy:
    """Plain top-k reduction: k routes a token instead of K, renormalised where the model renormalises."""
    rule = score.RouteRank(count("topk", "k", k))
    return Policy(rule, select.Voted(), fill.OwnRoutes(rule), f"topk:k={k}")


def router_mass(budget: int, fill: str = "original") -> Policy:
    """The `budget` experts with the largest sum of router weights over the batch's routes, sum_t w_tu."""
    return _budgeted("router_mass", score.RouterMass(), budget, fill)


def squared(budget: int, fill: str = "original") -> Policy:
    """The `budget` experts with the largest sum_t w_tu^2."""
    return _budgeted("squared", score.SquaredWeight(), budget, fill)


def static(budget: int, fill: str = "original") -> Policy:
    """The `budget` experts with the largest sum_t w_tu^2 mu_u, mu_u the expert's mean output energy."""
    return _budgeted("static", score.StaticEnergy(), budget, fill)


def base(budget: int, fill: str = "original", relative: float = 0.0, level: str = "no") -> Policy:
    """BASE: the `budget` experts with the largest predicted removal cost, sum_t w_tu^2 e_u(z_t).

    https://arxiv.org/abs/2609.36222, sections 3.2 and 3.3. `fill` is "original" in the paper; "executed", "drop" and
    "substitute" are its ablations. `relative` (ours): each row's costs are divided by their sum to this power.
    `level=yes` fills up the devices that fetch fewer than the fullest one, as CAEE does; it reads a placement.
    """
    rule, budget = _relative("base", relative), count("base", "budget", budget)
    chosen = _leveled("base", select.TopBudget(budget), level)
    defaults = {"fill": "original", "relative": 0.0, "level": "no"}
    name = spell("base", defaults, budget=budget, fill=fill, relative=relative, level=level)
    return Policy(rule, chosen, fill_of("base", fill), name)


def base_ep(budget: int, fill: str = "original", relative: float = 0.0) -> Policy:
    """BASE for expert parallelism (ours): of every device the `budget` experts with the largest removal costs.

    A step waits for the device that fetches most, and that one fetches at most `budget`. Reads a placement.
    """
    rule, budget = _relative("base_ep", relative), count("base_ep", "budget", budget)
    name = spell("base_ep", {"fill": "original", "relative": 0.0}, budget=budget, fill=fill, relative=relative)
    return Policy(rule, DeviceBudget(budget), fill_of("base_ep", fill), name)


def spread(budget: int, fill: str = "half", relative: float = 0.0, floor: str = "no", level: str = "no") -> Policy:
    """BASE's removal costs with more experts in the layers that need them, `budget` a layer on average (ours).

    Each layer's number is read from the statistics (`moebudget allocate`). `floor=yes` keeps every row's best expert
    while the layer's number allows; `relative` and `level` are those of `base`.
    """
    rule, budget = _relative("spread", relative), count("spread", "budget", budget)
    on = choice("spread", "floor", floor, YES_NO) == "yes"
    chosen = _leveled("spread", select.LayerBudget(budget, on), level)
    defaults = {"fill": "half", "relative": 0.0, "floor": "no", "level": "no"}
    name = spell("spread", defaults, budget=budget, fill=fill, relative=relative, floor=floor, level=level)
    return Policy(rule, chosen, fill_of("spread", fill), name)


def price(
    budget: int,
    fill: str = "half",
    relative: float = 0.0,
    floor: str = "no",
    ceiling: int | None = None,
    hold: float = 0.0,
    level: str = "no",
) -> Policy:
    """Every expert whose removal cost times the layer's gain exceeds one price, `budget` a layer on average (ours).

    Price and gains are read from the statistics (`moebudget allocate`) and hold for the batch size they were made at.
    `floor=yes` adds every row's best expert; `ceiling` is the most that a layer fetches in a step. `hold`, the share
    of an excess that each step corrects, say .02, keeps the average at `budget` when text or batch size change.
    `level`, which is that of `base`, comes after the ceiling; `hold` counts its experts, too.
    """
    rule, budget = _relative("price", relative), count("price", "budget", budget)
    on = choice("price", "floor", floor, YES_NO) == "yes"
    ceiling = None if ceiling is None else count("price", "ceiling", ceiling)
    hold = number("price", "hold", hold, most=1.0, zero=True)
    chosen = _leveled("price", select.Price(budget, on, ceiling, hold), level)
    defaults = {"fill": "half", "relative": 0.0, "floor": "no", "ceiling": None, "hold": 0.0, "level": "no"}
    name = spell(
        "price", defaults, budget=budget,
        fill=fill, relative=relative, floor=floor, ceiling=ceiling, hold=hold, level=level,
    )  # fmt: skip
    return Policy(rule, chosen, fill_of("price", fill), name)


def worth(least: float, cost: str = "base", fill: str = "half") -> Policy:
    """Offloading (ours): what is at hand, missing experts worth a fetch, and others that make no device slower.

    A missing expert is worth it if its removal cost is `least` times the mean of the experts that the batch routes to.
    `cost`: the removal cost by the score of base, static, squared or router_mass. Reads a placement.
    """
    least, rule = number("worth", "least", least), score.COSTS[choice("worth", "cost", cost, score.COSTS)]
    name = spell("worth", {"cost": "base", "fill": "half"}, least=least, cost=cost, fill=fill)
    return Policy(rule, CostInvariant(WorthFetching(least)), fill_of("worth", fill), name)


def nonlinear(budget: int, fill: str = "original") -> Policy:
    """BASE with a nonlinear energy predictor: random features beside the linear ones (its ablation, our form)."""
    return _budgeted("nonlinear", score.NonlinearEnergy(), budget, fill)


def oracle(budget: int, fill: str = "original") -> Policy:
    """BASE with true instead of predicted output energies: the bound of any energy predictor. Analysis only."""
    return _budgeted("oracle", score.TrueEnergy(), budget, fill)


_ALL: tuple[Callable[..., Policy], ...] = (
    dense, topk, oea, sere, lynx, lynx_lat, exfold, exfold_static, exfold_prefill, xshare, xshare_balanced, xshare_ep,
    caee, caee_offload, skip, reap, reap_static, moe_spec, des_vote, dmoe, acceptmoe, router_mass, squared, static,
    base, nonlinear, oracle, base_ep, spread, price, worth,
)  # fmt: skip
PRESETS: dict[str, Callable[..., Policy]] = {f.__name__: f for f in _ALL}
EXAMPLES: dict[str, str] = {
    "dense": "dense",
    "topk": "topk:k=2",
    **rivals.EXAMPLES,
    **{name: f"{name}:budget=8" for name in ("router_mass", "squared", "static", "base", "nonlinear", "oracle")},
    "base_ep": "base_ep:budget=4",
    "spread": "spread:budget=8",
    "price": "price:budget=8",
    "worth": "worth:least=0.5",
}


def parse(text: str) -> Policy:
    """Read `preset` or `preset:field=value,field=value`; `str(policy)` writes the same.

    Raises ValueError that lists what is known for an unknown preset or field, and names the missing field.
    """
    return read(text, PRESETS, EXAMPLES)


def parse_many(texts: Iterable[str]) -> list[Policy]:
    """Policies from texts that may hold several, separated by commas: `sere,exfold:budget=10,reap`.

    A name without settings stands for any policy of that preset. Raises ValueError as `parse` does.
    """
    return [parse(EXAMPLES.get(text, text)) for text in split_many(texts)]


def split_many(texts: Iterable[str]) -> list[str]:
    """The single spellings in texts that may hold several, as `parse_many` reads them."""
    spelled: list[str] = []
    for part in (p.strip() for text in texts for p in text.split(",")):
        if "=" in part and ":" not in part and spelled:
            spelled[-1] += f",{part}"
        else:
            spelled.append(part)
    return spelled
