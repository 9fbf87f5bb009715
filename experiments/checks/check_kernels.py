"""Check of the fused kernels against the torch form on a GPU: fresh inputs, ties, padding, NaN, graph replays.

    python -m experiments.checks.check_kernels
    compute-sanitizer --tool racecheck python -m experiments.checks.check_kernels --dry \\
        --only "softmax_renorm (5, 60, 4, 96)"
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from moebudget.bench.routing import prices
from moebudget.core import provenance
from moebudget.core.counters import COUNTERS, count_step
from moebudget.core.ops import at_average, demand, largest_first
from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.core.types import LayerStats, RouterBatch, Routing, RowKind
from moebudget.kernels import FusedRouter
from moebudget.methods.base import DeviceBudget, PredictedEnergy
from moebudget.methods.common import TopBudget
from moebudget.methods.devices import Level
from moebudget.methods.registry import parse
from moebudget.methods.spread import LayerBudget, Price

ROOT = Path(__file__).resolve().parents[2]

KINDS = {
    "softmax_renorm": {"scoring": "softmax"},
    "softmax": {"scoring": "softmax", "renormalize": False, "scale": 1.5},
    "sigmoid_bias": {"scoring": "sigmoid", "scale": 2.5},
    "groups_max": {"renormalize": False, "scale": 16.0, "groups": 4, "open_groups": 2, "group_score": "max"},
    "groups_top2": {"scoring": "sigmoid", "scale": 2.5, "groups": 4, "open_groups": 2, "group_score": "top2"},
}
SHAPES = (  # T, N, K, d
    (16, 128, 8, 2048), (5, 60, 4, 96), (40, 256, 8, 512), (130, 160, 6, 64), (3, 512, 16, 8192), (256, 64, 6, 256),
)  # fmt: skip
POLICIES = (
    "base:budget=10", "base:budget=32,fill=executed", "base:budget=24,fill=geometric", "base:budget=6,fill=drop",
    "base:budget=999", "spread:budget=9", "price:budget=11",
    "base_ep:budget=3", "base:budget=12,level=yes", "spread:budget=9,level=yes", "price:budget=11,level=yes",
    "squared:budget=12", "static:budget=8", "router_mass:budget=9", "oea:k0=1", "xshare:k0=1,m=8",
)  # fmt: skip
TIE = 1e-6  # sums closer than this, relative, are equal up to the rounding of float32 weights
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make(
    spec: RouterSpec, t: int, d: int, turn: int, sigmoid: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden, logits, row kinds, bias. Every second turn has logits on a coarse grid, so that ties are frequent."""
    g = torch.Generator("cuda").manual_seed(turn)
    logits = torch.randn(t, spec.num_experts, generator=g, device="cuda") * 1.5
    logits = (logits * 2).round() / 2 if turn % 2 else logits
    hidden = torch.randn(t, d, generator=g, device="cuda").to(dtype)
    kinds = (torch.rand(t, generator=g, device="cuda") < 0.8).to(torch.int8)  # DECODE or PAD
    if t > 3 and turn % 4 == 3:
        hidden[2, d // 2], logits[3, 1] = float("nan"), float("inf")
    bias = (torch.randn(spec.num_experts, generator=g, device="cuda") * 0.3) if sigmoid else None
    return hidden, logits.to(dtype), kinds, bias


def poisoned(t: int, k: int) -> Routing:
    return Routing(
        torch.full((t, k), 1 << 40, device="cuda"),
        torch.full((t, k), float("nan"), device="cuda", dtype=torch.float32),
    )


def ties(policy: Policy, batch: RouterBatch, stats: LayerStats) -> bool:
    """Whether the last sum kept and the first left out are equal up to rounding, so that either may be kept.

    For a price: whether a sum is equal to it. If devices have a load each: whether it holds for one of them.
    """
    select = policy.select.must if isinstance(policy.select, Level) else policy.select
    total, candidate = demand(policy.score(batch, stats), batch)
    tie = False
    if isinstance(select, Price):
        price = at_average(stats["layer_price"], select.budget)
        tie = bool((candidate & ((total - price).abs() <= TIE * price)).any())
    elif isinstance(select, TopBudget):
        tie = ties_at(total, candidate, select.budget)
    elif isinstance(select, LayerBudget):
        tie = ties_at(total, candidate, at_average(stats["layer_budget"], select.budget))
    if isinstance(policy.select, Level | DeviceBudget):
        device, mask = stats["placement_device"], policy.active(batch, stats).mask
        held = [device == i for i in range(int(device.max()) + 1)]
        most = select.budget if isinstance(select, DeviceBudget) else max(int((mask & on).sum()) for on in held)
        tie = tie or any(ties_at(total, candidate & on, most) for on in held)
    return tie


def ties_at(total: Tensor, candidate: Tensor, budget: int | Tensor) -> bool:
    """Whether the budget-th largest sum and the next are equal up to rounding."""
    sums, budget = largest_first(total, candidate).values, int(budget)
    if sums.shape[0] <= budget or sums[budget] == -torch.inf:
        return False
    kept, left = sums[budget - 1], sums[budget]
    return bool(kept - left <= TIE * kept)


def check(case: tuple[int, tuple[int, int, int, int], str, str], turns: int) -> dict[str, float]:
    """Number of steps, of those with other ids, of those with tied sums; and the largest error of a weight."""
    number, (t, n, k, d), kind, text = case
    spec, policy, dtype = RouterSpec(n, k, **KINDS[kind]), parse(text), DTYPES[number % 3]
    g = torch.Generator("cuda").manual_seed(7)
    made = {
        "predictor_weight": torch.randn(n, d, generator=g, device="cuda"),
        "predictor_bias": torch.randn(n, generator=g, device="cuda"),
        "energy_mean": torch.randn(n, generator=g, device="cuda").exp(),
    }
    hidden, logits, kinds, bias = make(spec, t, d, 0, spec.scoring == "sigmoid", dtype)
    first = PredictedEnergy()(spec(hidden, logits, bias=bias, kind=kinds), LayerStats(made))
    table = torch.randint(1, n, (n,), generator=g, device="cuda")
    home = torch.randint(0, 2 + number // len(POLICIES) % 7, (n,), generator=g, device="cuda")  # of 2 to 8 devices
    made |= {"layer_budget": table, "layer_price": prices(first.sum(0, dtype=torch.float64)), "placement_device": home}
    stats = LayerStats(made)
    router = FusedRouter(policy, spec, stats, hidden=d, max_rows=t, device="cuda")
    after_native = FusedRouter(policy, spec, stats, hidden=d, max_rows=t, device="cuda", count=False)
    other, tied, worst, counts = 0, 0, 0.0, torch.zeros(len(COUNTERS), dtype=torch.float64, device="cuda")
    for turn in range(turns):
        hidden, logits, kinds, bias = make(spec, t, d, turn, spec.scoring == "sigmoid", dtype)
        batch = spec(hidden, logits, bias=bias, kind=kinds)
        wanted = policy(batch, stats)
        fused = router(hidden, logits, kinds, bias, poisoned(t, k))
        counts += count_step(batch, wanted)
        routes = Routing(batch.ids.int(), batch.weights)
        again = after_native(hidden, logits, kinds, bias, poisoned(t, k), routes)
        assert torch.equal(fused.weights.isnan(), wanted.weights.isnan())
        if not torch.equal(fused.ids, wanted.ids) or not torch.equal(again.ids, wanted.ids):
            other, tied = other + 1, tied + ties(policy, batch, stats)
            continue
        for weights in (fused.weights, again.weights):
            gap = (weights - wanted.weights).abs() / wanted.weights.abs().clamp_min(1e-6)
            worst = max(worst, float(gap.nan_to_num().max()))
    if not other:
        torch.testing.assert_close(router.totals, counts, rtol=1e-5, atol=1e-5)
    return {"steps": turns, "other": other, "tied": tied, "worst": worst}


def replays(times: int) -> int:
    """Number of replays of a captured graph whose ids are not those of the first."""
    spec = RouterSpec(128, 8)
    hidden, logits, kinds, _ = make(spec, 16, 2048, 0, False, torch.bfloat16)
    stats = LayerStats(
        {"predictor_weight": torch.randn(128, 2048, device="cuda"), "predictor_bias": torch.randn(128, device="cuda")}
    )
    router = FusedRouter(parse("base:budget=10"), spec, stats, hidden=2048, max_rows=16, device="cuda")
    out = router(hidden, logits, kinds)
    graph, first = torch.cuda.CUDAGraph(), out.ids.clone()
    with torch.cuda.graph(graph):
        router(hidden, logits, kinds, None, out)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        out.ids.fill_(-1)
        graph.replay()
        differ += (out.ids != first).any()
    router.set_budget(4)
    graph.replay()
    wanted = parse("base:budget=4")(spec(hidden, logits, kind=kinds), stats)
    assert torch.equal(out.ids, wanted.ids), "a replay does not see a changed budget"
    logits.copy_(torch.randn_like(logits.float()))
    kinds.fill_(RowKind.DECODE)
    graph.replay()
    wanted = parse("base:budget=4")(spec(hidden, logits, kind=kinds), stats)
    assert torch.equal(out.ids, wanted.ids), "a replay does not see changed contents"
    return int(differ)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--turns", type=int, default=24)
    ap.add_argument("--replays", type=int, default=10_000)
    ap.add_argument("--workers", type=int, default=12, help="processes that compile and run cases; 0: this one")
    ap.add_argument("--only", default="", help="cases whose 'kind (T, N, K, d) policy' contains this")
    ap.add_argument("--dry", action="store_true", help="write no row and replay no graph, for a sanitizer")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/routing.jsonl")
    a = ap.parse_args()
    every = list(enumerate(itertools.product(SHAPES, KINDS, POLICIES)))
    cases = [(i, *case) for i, case in every if a.only in f"{case[1]} {case[0]} {case[2]}"]
    if a.workers and not a.dry:
        with ProcessPoolExecutor(a.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            results = list(pool.map(check, cases, [a.turns] * len(cases)))
    else:
        results = [check(case, a.turns) for case in cases]
    for (_, shape, kind, text), result in zip(cases, results, strict=True):
        if result["other"]:
            print(f"{kind} {shape} {text}: {result}")
    totals = {name: sum(r[name] for r in results) for name in ("steps", "other", "tied")}
    print(len(cases), "cases", totals)
    if a.dry:
        return
    row = {
        "bench": "routing_check", "cases": len(cases), "all_cases": len(every), "steps": totals["steps"],
        "steps_with_other_ids": totals["other"], "of_them_with_tied_sums": totals["tied"],
        "largest_weight_error": max(r["worst"] for r in results),
        "replays": a.replays, "replays_with_other_ids": replays(a.replays), **provenance.stamp("cuda"),
    }  # fmt: skip
    provenance.append_rows(a.results, [row])
    print(row)


if __name__ == "__main__":
    main()
