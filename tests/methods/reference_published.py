"""The other papers' methods, from sections 2 to 8 of the specification, in plain Python loops and float64.

A set of experts is a `set[int]`. Sums over rows are exact (`fsum`), so that equal columns tie as they do in the torch
forms. Values that decide by a threshold (shares, bins, entropies) are nowhere on their edge in the tests' random
steps, except Lynx's bins, whose logits lie on a grid that float32 holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from moebudget.core.router import RouterSpec
from tests.methods.reference import Routes, Row, Vector, best_first, drop, first_union, over
from tests.methods.reference import backfill as backfill_row

UNSEEN = 1e30


@dataclass(frozen=True)
class Step:
    """One step of voting rows, and what the methods read beside it."""

    spec: RouterSpec
    rows: Sequence[Row]
    logits: Sequence[Vector]  # what Lynx bins: the router's numbers, or what it ranks by where a bias enters
    stats: Mapping[str, Any] = field(default_factory=dict)
    request: Sequence[int] | None = None
    accept: Sequence[float] | None = None

    @property
    def experts(self) -> int:
        return self.spec.num_experts

    def union(self) -> set[int]:
        return first_union(self.rows, self.experts)

    def column_sums(self, among: Iterable[int] | None = None) -> list[float]:
        """Router scores over all experts, routed to or not, of these rows; closed groups count nothing."""
        rows = [self.rows[t] for t in among] if among is not None else self.rows
        return [math.fsum(r.probs[u] for r in rows if r.choice[u] > -math.inf) for u in range(self.experts)]

    def route_sums(self, value: Callable[[Row, int], float]) -> list[float]:
        """Sums over the rows that route to an expert; value(row, slot)."""
        parts: list[list[float]] = [[] for _ in range(self.experts)]
        for row in self.rows:
            for slot, u in enumerate(row.ids):
                parts[u].append(value(row, slot))
        return [math.fsum(part) for part in parts]


def refill(step: Step, active: set[int], denominator: str = "executed") -> list[Routes]:
    return [backfill_row(step.spec, row, active, denominator) for row in step.rows]


# OEA, section 2.1


def oea_base(step: Step, k0: int, p: float) -> list[list[int]]:
    """Phase 1: every row's guaranteed experts."""
    guaranteed = []
    for row in step.rows:
        order = best_first(row.choice, step.experts)
        reached, n = 0.0, step.experts
        if p < 1:
            for rank, u in enumerate(order, 1):
                reached += row.probs[u]
                if reached >= p * sum(row.probs):
                    n = rank
                    break
        guaranteed.append(order[: min(k0, n, step.spec.top_k)])
    return guaranteed


def oea(step: Step, k0: int, p: float = 1.0, k_max: int | None = None, max_rank: int | None = None) -> list[Routes]:
    guaranteed = oea_base(step, k0, p)
    base = {u for own in guaranteed for u in own}
    result = []
    for row, own in zip(step.rows, guaranteed, strict=True):
        order, chosen = best_first(row.choice, step.experts), list(own)
        for j in range(len(own), max_rank or step.experts):
            if len(chosen) == (k_max or step.spec.top_k):
                break
            if j < len(order) and order[j] in base and row.choice[order[j]] > -math.inf:
                chosen.append(order[j])
        result.append(over(step.spec, row, chosen, "executed"))
    return result


# SERE, section 3.2


def sere_set(step: Step, s: int, rho: float, similarity: Sequence[Vector]) -> set[int]:
    return {u for routes in sere(step, s, rho, similarity) for u, _ in routes}


def sere(step: Step, s: int, rho: float, similarity: Sequence[Vector]) -> list[Routes]:
    primary = [False] * step.experts
    for row in step.rows:
        for u in row.ids[:s]:
            primary[u] = True
    result = []
    for row in step.rows:
        routes = []
        for slot, u in enumerate(row.ids):
            if slot >= s and not primary[u]:
                best, alike = -1, -math.inf
                for v in range(step.experts):
                    if primary[v] and similarity[u][v] > alike:
                        best, alike = v, similarity[u][v]
                u = u if rho > 0 and alike < rho else best
            routes.append((u, row.weights[slot]))
        result.append(routes)
    return result


# Lynx, section 4


def lynx_set(step: Step, alpha: float, beta: int | None) -> set[int]:
    batch = len(step.rows)
    if batch == 1:
        return step.union()  # our guard: the rule would pick by index
    bins: list[list[int | None]] = []
    for row, logits in zip(step.rows, step.logits, strict=True):
        opened = [u for u in range(step.experts) if row.choice[u] > -math.inf]
        top = max(logits[u] for u in opened)
        bins.append([None] * step.experts)
        for u in opened:
            q = math.ceil(alpha * (logits[u] - top))
            bins[-1][u] = q if beta is None else max(q, -beta)
    keep = set[int]()
    for t in range(batch):
        modified = {}
        for u, q in enumerate(bins[t]):
            if q is not None:
                others = [bins[o][u] for o in range(batch) if o != t]
                popular = sum((Fraction(batch) ** o for o in others if o is not None), Fraction(0))
                modified[u] = q + popular / batch
        keep.update(sorted(modified, key=lambda u, m=modified: (-m[u], u))[: step.spec.top_k])
    return keep


def lynx_lat_set(step: Step, dropped: int) -> set[int]:
    votes, left = step.route_sums(lambda _row, _slot: 1.0), step.union()
    for _ in range(dropped):
        if len(left) > 1:
            left.remove(min(left, key=lambda u: (votes[u], -u)))
    return left


# ExFold, section 5


def fold(step: Step, kept_of: Callable[[Row], list[int]], pool: set[int] | None = None) -> list[Routes]:
    """Routes outside `kept_of(row)` go to argmin of loss over `pool`, or over the row's kept ones without a pool."""
    loss, scale = step.stats["fold_loss"], step.stats["fold_scale"]
    result = []
    for row in step.rows:
        kept, routes = kept_of(row), []
        for u, w in row.routes:
            if u in kept:
                routes.append((u, w))
                continue
            target, least = -1, UNSEEN
            for v in sorted(kept if pool is None else pool):
                if loss[u][v] < least:
                    target, least = v, loss[u][v]
            if target >= 0:
                routes.append((target, w * scale[u][target]))
        if not routes:  # our rescue
            best = best_first(row.probs, 1, pool)[0]
            routes = [(best, row.probs[best] * row.factor)]
        result.append(routes)
    return result


def norm_mass(step: Step) -> list[float]:
    return step.route_sums(lambda row, slot: row.weights[slot] * step.stats["output_norm"][row.ids[slot]])


def best_of_union(step: Step, total: Vector, size: int) -> set[int]:
    return set(best_first(total, size, step.union()))


def everyone(step: Step, value: Vector, size: int) -> set[int]:
    return set(best_first(value, size)) if step.rows else set()


def heaviest(row: Row, p: int) -> list[int]:
    return [row.ids[slot] for slot in best_first(row.weights, p)]


# XShare, section 6


def greedy(chosen: set[int], total: Vector, m: int, among: Iterable[int]) -> set[int]:
    """m times: add the argmax outside the set."""
    chosen, among = set(chosen), sorted(among)
    for _ in range(m):
        best = None
        for u in among:
            if u not in chosen and total[u] > 0 and (best is None or total[u] > total[best]):
                best = u
        if best is None:
            break
        chosen.add(best)
    return chosen


def xshare_set(step: Step, k0: int, m: int, m_request: int = 0, additive: bool = True) -> set[int]:
    warm = first_union(step.rows, k0) if k0 else set()
    request = step.request if step.request is not None else range(len(step.rows))
    chosen = set(warm)
    for r in sorted(set(request)):
        rows = [t for t, of in enumerate(request) if of == r]
        chosen |= greedy(warm, step.column_sums(rows), m_request, range(step.experts))
    room = m if additive else max(0, m - len(chosen))
    return greedy(chosen, step.column_sums(), room, range(step.experts))


def devices_of(step: Step) -> list[list[int]]:
    """The experts of every device."""
    device = step.stats["placement_device"]
    return [[u for u in range(step.experts) if device[u] == d] for d in range(max(device) + 1)]


def xshare_balanced_set(step: Step, m: int) -> set[int]:
    chosen, total = set[int](), step.column_sums()
    while len(chosen) < min(m, sum(x > 0 for x in total)):
        for experts in devices_of(step):
            if len(chosen) < m:
                chosen = greedy(chosen, total, 1, experts)
    return chosen


def xshare_ep_set(
    step: Step, k0: int, m_device: int, additive: bool = True, total: list[float] | None = None
) -> set[int]:
    """`total` in the place of the paper's sums of router scores; then only routed experts are candidates."""
    allowed = set(range(step.experts)) if total is None else step.union()
    warm = first_union(step.rows, k0) if k0 else set()
    chosen = set(warm)
    for experts in devices_of(step):
        room = m_device if additive else max(0, m_device - len(warm & set(experts)))
        chosen = greedy(chosen, total or step.column_sums(), room, [u for u in experts if u in allowed])
    return chosen


# CAEE, section 7


def slowest(step: Step, experts: Iterable[int]) -> float:
    """F_cost: the largest sum of costs on a device."""
    load = [0.0] * (max(step.stats["placement_device"]) + 1)
    for u in experts:
        load[step.stats["placement_device"][u]] += step.stats["placement_cost"][u]
    return max(load)


def importance(step: Step) -> list[float]:
    return step.route_sums(lambda row, slot: row.probs[row.ids[slot]])


def caee_must(step: Step, theta: float, guard: bool = True) -> set[int]:
    total = importance(step)
    reached = {u for u in step.union() if total[u] >= theta}
    if guard:
        return reached | first_union(step.rows, 1)
    return reached or best_of_union(step, total, 1)


def caee_offload_must(step: Step, theta: float) -> set[int]:
    must = set[int]()
    for row in step.rows:
        scores = sorted(((row.probs[u], -slot, u) for slot, u in enumerate(row.ids)), reverse=True)
        reached = 0.0
        for score, _, u in scores:
            must.add(u)
            reached += score
            if reached >= theta * math.fsum(row.probs[v] for v in row.ids):
                break
    return must


def expand(step: Step, must: set[int]) -> set[int]:
    """Cost-invariant expansion, most important first."""
    total, base, chosen = importance(step), slowest(step, must), set(must)
    for u in sorted(step.union() - must, key=lambda u: (-total[u], u)):
        if slowest(step, chosen | {u}) <= base:
            chosen.add(u)
    return chosen


def compensate(step: Step, active: set[int]) -> list[Routes]:
    """Each row's K best of the set by score alone, whatever the bias and the groups say (section 7, compensation)."""
    result = []
    for row in step.rows:
        kept_all = set(row.ids) <= active
        ids = row.ids if kept_all else best_first(row.probs, step.spec.top_k, active)
        result.append(over(step.spec, row, ids, "executed"))
    return result


# Section 8


def skip(step: Step, scale: float) -> list[Routes]:
    result = []
    for row in step.rows:
        by_weight, kept = best_first(row.weights, len(row.weights)), set()
        for j, slot in enumerate(by_weight):
            if j == 0 or row.weights[slot] >= scale * step.stats["route_ratio"][j] * row.weights[by_weight[0]]:
                kept.add(slot)
        result.append(over(step.spec, row, [u for slot, u in enumerate(row.ids) if slot in kept], "executed"))
    return result


def super_first(step: Step, budget: int) -> set[int]:
    value, kept = step.stats["output_norm_weighted"], step.stats["super_expert"]
    order = sorted(range(step.experts), key=lambda u: (not kept[u], -value[u], u))
    return set(order[:budget]) if step.rows else set()


def weight_sums(step: Step) -> list[float]:
    return step.route_sums(lambda row, slot: row.weights[slot])


def dmoe_set(step: Step, share: float) -> set[int]:
    total, chosen, reached = weight_sums(step), set[int](), 0.0
    for u in best_first(total, step.experts, step.union()):
        if reached >= share * math.fsum(total):
            break
        chosen.add(u)
        reached += total[u]
    return chosen


def acceptmoe_set(step: Step, scale: float) -> set[int]:
    accept = step.accept if step.accept is not None else [1.0] * len(step.rows)
    demand = [
        math.fsum(a * row.probs[u] for a, row in zip(accept, step.rows, strict=True) if row.choice[u] > -math.inf)
        for u in range(step.experts)
    ]
    shares = [x / math.fsum(demand) for x in demand if x > 0]
    size = math.ceil(scale * math.exp(-math.fsum(q * math.log(q) for q in shares)))
    return set(best_first(demand, max(1, size), [u for u in range(step.experts) if demand[u] > 0]))


def substitute(step: Step, active: set[int], similarity: Sequence[Vector]) -> list[Routes]:
    """Each route outside goes to the most similar expert of the set; the first of equals."""
    nearest = [best_first(similarity[u], 1, active)[0] if active else -1 for u in range(step.experts)]
    return [[(u if u in active else nearest[u], w) for u, w in row.routes] for row in step.rows]


def routes_of(
    step: Step,
    name: str,
    fields: Mapping[str, str],
    budget_set: Callable[[], set[int]],
    base_total: Callable[[], list[float]],
) -> list[Routes]:
    """What a preset executes; set and sums of BASE-like presets, whose scores `tests.reference` has, are given."""
    f: dict[str, Any] = {k: float(v) if "." in v else int(v) if v.isdigit() else v for k, v in fields.items()}
    on_top, m = f.get("additive", "yes") == "yes", f.get("budget", f.get("m", 0))
    sets: dict[str, Callable[[], set[int]]] = {
        "lynx_lat": lambda: lynx_lat_set(step, f["drop"]),
        "xshare": lambda: xshare_set(step, f["k0"], m, f.get("m_request", 0), on_top),
        "xshare_balanced": lambda: xshare_balanced_set(step, m),
        "xshare_ep": lambda: xshare_ep_set(step, f["k0"], f["m_device"], on_top),
        "caee": lambda: expand(step, caee_must(step, f["theta"], f.get("guard", "yes") == "yes")),
        "caee_offload": lambda: expand(step, caee_offload_must(step, f["theta"])),
        "reap": lambda: best_of_union(step, norm_mass(step), m),
        "reap_static": lambda: super_first(step, m),
        "moe_spec": lambda: everyone(step, step.column_sums(), m),
        "des_vote": lambda: best_of_union(
            step, weight_sums(step), max(step.spec.top_k, round(f.get("beta", 0.15) * step.experts))
        ),
        "dmoe": lambda: dmoe_set(step, f.get("share", 0.6)),
        "acceptmoe": lambda: acceptmoe_set(step, f.get("scale", 1.0)),
    }
    if not step.rows:
        return []
    if f.get("score") == "base":
        return refill(step, xshare_ep_set(step, f["k0"], f["m_device"], on_top, base_total()))
    if name in sets:
        active = sets[name]()
        if name.startswith("caee"):
            return compensate(step, active)
        return [drop(row, active) for row in step.rows] if f.get("fill") == "drop" else refill(step, active)
    if name == "oea":
        return oea(step, f["k0"], f.get("p", 1.0), f.get("k_max"), f.get("max_rank"))
    if name == "sere":
        return sere(step, f["s"], f.get("rho", 0.0), step.stats[f"similarity_{f.get('metric', 'frobenius')}"])
    if name == "lynx":
        return refill(step, lynx_set(step, f["alpha"], f.get("beta") or None), "preserved")
    if name.startswith("exfold"):
        if name == "exfold_prefill":
            return fold(step, lambda row: heaviest(row, f["p"]))
        pool = (
            best_of_union(step, norm_mass(step), m)
            if name == "exfold"
            else everyone(step, step.stats["output_norm"], m)
        )
        return fold(step, lambda row: [u for u in row.ids if u in pool], pool)
    if name == "skip":
        return skip(step, f.get("scale", 1.0))
    active, rule = budget_set(), f.get("fill", "native")
    if rule == "substitute":
        return substitute(step, active, step.stats["similarity_frobenius"])
    return refill(step, active, rule)
