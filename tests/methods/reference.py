"""The methods, written from the specification in plain Python loops and float64, to hold the torch forms against.

One step is a list of rows; a row's executed routes are a list of (expert, weight) in slot order, without unused ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebudget.core.router import RouterSpec

Vector = Sequence[float]
Routes = list[tuple[int, float]]
Cost = Callable[[int, int, float], float]  # row, expert, the model's weight -> cost of losing it


@dataclass(frozen=True)
class Row:
    """What native routing makes of one row."""

    choice: list[float]
    probs: list[float]
    factor: float
    ids: list[int]
    weights: list[float]

    @property
    def routes(self) -> Routes:
        return list(zip(self.ids, self.weights, strict=True))


def best_first(values: Vector, k: int, among: Iterable[int] | None = None) -> list[int]:
    """The k positions with the largest values, ties to the lower position."""
    return sorted(range(len(values)) if among is None else among, key=lambda u: (-values[u], u))[:k]


def native(spec: RouterSpec, logits: Vector, bias: Vector | None = None) -> Row:
    """The model's own routing of one row, for the four kinds of routers (section 0.1)."""
    if spec.scoring == "softmax":
        powers = [math.exp(x - max(logits)) for x in logits]
        probs = [x / sum(powers) for x in powers]
    else:
        probs = [1 / (1 + math.exp(-x)) for x in logits]
    choice = [p + b for p, b in zip(probs, bias or [0.0] * len(probs), strict=True)]
    if spec.groups > 1:
        size = len(choice) // spec.groups
        parts = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(spec.groups)]
        scores = [part[0] if spec.group_score == "max" else part[0] + part[1] for part in parts]
        opened = best_first(scores, spec.open_groups)
        choice = [c if u // size in opened else -math.inf for u, c in enumerate(choice)]
    ids = best_first(choice, spec.top_k)
    mass = sum(probs[u] for u in ids) if spec.renormalize else 1.0
    return Row(choice, probs, spec.scale / mass, ids, [probs[u] / mass * spec.scale for u in ids])


def squared_cost(_row: int, _expert: int, weight: float) -> float:
    return weight * weight


def mass_cost(_row: int, _expert: int, weight: float) -> float:
    return weight


def static_cost(energy_mean: Vector) -> Cost:
    return lambda _row, expert, weight: weight**2 * energy_mean[expert]


def base_cost(hidden: Sequence[Vector], a: Sequence[Vector], b: Vector) -> Cost:
    """w^2 exp(a . z/|z| + b) (BASE, eq. 7)."""

    def cost(row: int, expert: int, weight: float) -> float:
        norm = math.sqrt(sum(x * x for x in hidden[row]))
        predicted = sum(x / norm * y for x, y in zip(hidden[row], a[expert], strict=True)) + b[expert]
        return weight**2 * math.exp(predicted)

    return cost


def nonlinear_cost(hidden: Sequence[Vector], stats: Mapping[str, Any]) -> Cost:
    """w^2 exp(c . [z/|z|, relu(F z/|z|)] + b), the form of our reading."""

    def cost(row: int, expert: int, weight: float) -> float:
        norm = math.sqrt(sum(x * x for x in hidden[row]))
        z = [x / norm for x in hidden[row]]
        seen = [max(0.0, sum(x * y for x, y in zip(z, f, strict=True))) for f in stats["nonlinear_features"]]
        predicted = sum(x * y for x, y in zip(z + seen, stats["nonlinear_weight"][expert], strict=True))
        return weight**2 * math.exp(predicted + stats["nonlinear_bias"][expert])

    return cost


def oracle_cost(energies: Sequence[Vector]) -> Cost:
    return lambda row, expert, weight: weight**2 * energies[row][expert]


def demand(rows: Sequence[Row], experts: int, cost: Cost) -> list[float]:
    """D_u = sum over the rows that route to u."""
    total = [0.0] * experts
    for t, row in enumerate(rows):
        for expert, weight in row.routes:
            total[expert] += cost(t, expert, weight)
    return total


def relative(rows: Sequence[Row], cost: Cost, exponent: float) -> Cost:
    """A cost over the row's total to a power."""
    totals = [sum(cost(t, u, w) for u, w in row.routes) for t, row in enumerate(rows)]
    return lambda t, u, w: cost(t, u, w) / totals[t] ** exponent


def first_first(rows: Sequence[Row], total: Vector, floor: bool) -> list[int]:
    """Routed experts, the largest demand first; with a floor the rows' first routes come before all others."""
    routed = first_union(rows, len(total))
    first = first_union(rows, 1) if floor else set[int]()
    return [*best_first(total, len(total), first), *best_first(total, len(total), routed - first)]


def first_union(rows: Sequence[Row], k0: int) -> set[int]:
    """Union of every row's first k0 routes; with k0 = K the native union."""
    return {expert for row in rows for expert in row.ids[:k0]}


def top_budget(rows: Sequence[Row], total: Vector, budget: int) -> set[int]:
    """The M largest demands among the experts that the model would fetch."""
    return set(best_first(total, budget, first_union(rows, len(total))))


def _over_executed(spec: RouterSpec, row: Row, ids: Sequence[int]) -> Routes:
    """The model's own rule on the executed experts: p / sum of p over them (OEA, eq. 1)."""
    mass = sum(row.probs[u] for u in ids) if spec.renormalize else 1.0
    return [(u, row.probs[u] / mass * spec.scale) for u in ids]


def _over_original(row: Row, ids: Sequence[int]) -> Routes:
    return [(u, row.probs[u] * row.factor) for u in ids]


def _weighed_highest(row: Row, active: set[int]) -> list[int]:
    return best_first(row.probs, 1, active)


def backfill(spec: RouterSpec, row: Row, active: set[int], denominator: str) -> Routes:
    """The K experts of the set that the row ranks highest (its open groups only), or the one it weighs highest."""
    ids = [u for u in best_first(row.choice, spec.top_k, active) if row.choice[u] > -math.inf]
    ids = ids or _weighed_highest(row, active)
    return over(spec, row, ids, denominator)


def over(spec: RouterSpec, row: Row, ids: Sequence[int], denominator: str) -> Routes:
    """The row's weights of these experts, normalised over the model's own routes or over what runs."""
    if denominator == "preserved":  # what runs adds up to what the model's own routes did (Lynx)
        mass = sum(row.probs[u] for u in ids)
        return [(u, row.probs[u] / mass * sum(row.weights)) for u in ids]
    if denominator == "geometric":  # root of the product of both denominators
        both = zip(_over_original(row, ids), _over_executed(spec, row, ids), strict=True)
        return [(u, math.sqrt(a * b)) for (u, a), (_, b) in both]
    return _over_executed(spec, row, ids) if denominator == "executed" else _over_original(row, ids)


def energy_gain(t: int, row: Row, routes: Routes, cost: Cost, cap: float = 1.25) -> Routes:
    """Routes of row t scaled so that the sum of their removal costs is that of the model's own, by `cap` at most."""
    if [u for u, _ in routes] == row.ids:
        return routes
    native, ran = (sum(cost(t, u, w) for u, w in which) for which in (row.routes, routes))
    factor = min(cap, math.sqrt(native / ran))
    return [(u, w * factor) for u, w in routes]


def drop(row: Row, active: set[int]) -> Routes:
    """The row's own routes inside the set with the model's weights, or the one expert it weighs highest."""
    kept = [(u, w) for u, w in row.routes if u in active]
    return kept or _over_original(row, _weighed_highest(row, active))


def first_routes(spec: RouterSpec, row: Row, k: int) -> Routes:
    """Plain top-k reduction, renormalised where the model renormalises."""
    return _over_executed(spec, row, row.ids[:k])
