#!/usr/bin/env python3
"""Hold the fused kernels against the torch form on a GPU: fresh inputs, ties, padding, NaN, graph replays.

python scripts/check_kernels.py
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from moebudget import provenance
from moebudget.kernels import FusedRouter
from moebudget.policy import Policy
from moebudget.presets import parse
from moebudget.router import RouterSpec
from moebudget.runtime import count_step
from moebudget.types import LayerStats, Routing

KINDS = {
    "softmax_renorm": {"scoring": "softmax"},
    "softmax": {"scoring": "softmax", "renormalize": False, "scale": 1.5},
    "sigmoid_bias": {"scoring": "sigmoid", "scale": 2.5},
    "groups_max": {"renormalize": False, "scale": 16.0, "groups": 4, "open_groups": 2, "group_score": "max"},
    "groups_top2": {"scoring": "sigmoid", "scale": 2.5, "groups": 4, "open_groups": 2, "group_score": "top2"},
}
SHAPES = ((16, 128, 8, 2048), (5, 60, 4, 96), (40, 256, 8, 512), (130, 160, 6, 64))  # T, N, K, d
POLICIES = (
    "base:budget=10", "base:budget=32,fill=executed", "base:budget=6,fill=drop", "base:budget=999",
    "squared:budget=12", "oea:k0=1",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make(spec: RouterSpec, t: int, d: int, turn: int, sigmoid: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden, logits, live, bias. Every second turn has logits on a coarse grid, so that ties are many."""
    g = torch.Generator("cuda").manual_seed(turn)
    dtype = DTYPES[turn % 3]
    logits = torch.randn(t, spec.num_experts, generator=g, device="cuda") * 1.5
    logits = (logits * 2).round() / 2 if turn % 2 else logits
    hidden = torch.randn(t, d, generator=g, device="cuda").to(dtype)
    live = torch.rand(t, generator=g, device="cuda") < 0.8
    if t > 3 and turn % 4 == 3:
        hidden[2, d // 2], logits[3, 1] = float("nan"), float("inf")
    bias = (torch.randn(spec.num_experts, generator=g, device="cuda") * 0.3) if sigmoid else None
    return hidden, logits.to(dtype), live, bias


def poisoned(t: int, k: int) -> Routing:
    return Routing(
        torch.full((t, k), 1 << 40, device="cuda"),
        torch.full((t, k), float("nan"), device="cuda", dtype=torch.float32),
    )


def check(policy: Policy, kind: str, shape: tuple[int, int, int, int], turns: int) -> tuple[int, int, float]:
    """(steps, steps whose ids differ, largest relative error of a weight)."""
    t, n, k, d = shape
    spec = RouterSpec(n, k, **KINDS[kind])
    g = torch.Generator("cuda").manual_seed(7)
    stats = LayerStats(
        {
            "predictor_weight": torch.randn(n, d, generator=g, device="cuda"),
            "predictor_bias": torch.randn(n, generator=g, device="cuda"),
        }
    )
    router = FusedRouter(policy, spec, stats, hidden=d, max_rows=t, device="cuda")
    wrong, worst, counts = 0, 0.0, torch.zeros(10, dtype=torch.float64, device="cuda")
    for turn in range(turns):
        hidden, logits, live, bias = make(spec, t, d, turn, "sigmoid" in str(KINDS[kind]))
        batch = spec(hidden, logits, bias=bias, live=live)
        wanted = policy(batch, stats)
        found = router(hidden, logits, live, bias, poisoned(t, k))
        counts += count_step(batch, wanted)
        wrong += not torch.equal(found.ids, wanted.ids)
        assert torch.equal(found.weights.isnan(), wanted.weights.isnan())
        gap = (found.weights - wanted.weights).abs() / wanted.weights.abs().clamp_min(1e-6)
        worst = max(worst, float(gap.nan_to_num().max())) if torch.equal(found.ids, wanted.ids) else worst
    if not wrong:
        torch.testing.assert_close(router.totals, counts, rtol=1e-5, atol=1e-5)
    return turns, wrong, worst


def replays(times: int) -> int:
    """Replays of one captured graph whose ids are not those of the first."""
    spec = RouterSpec(128, 8)
    hidden, logits, live, _ = make(spec, 16, 2048, 0, False)
    stats = LayerStats(
        {"predictor_weight": torch.randn(128, 2048, device="cuda"), "predictor_bias": torch.randn(128, device="cuda")}
    )
    router = FusedRouter(parse("base:budget=10"), spec, stats, hidden=2048, max_rows=16, device="cuda")
    out = router(hidden, logits, live)
    graph, first = torch.cuda.CUDAGraph(), out.ids.clone()
    with torch.cuda.graph(graph):
        router(hidden, logits, live, None, out)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(times):
        out.ids.fill_(-1)
        graph.replay()
        differ += (out.ids != first).any()
    router.set_budget(4)
    graph.replay()
    wanted = parse("base:budget=4")(spec(hidden, logits, live=live), stats)
    assert torch.equal(out.ids, wanted.ids), "a changed budget is not seen by a replay"
    logits.copy_(torch.randn_like(logits.float()))
    live.fill_(True)
    graph.replay()
    wanted = parse("base:budget=4")(spec(hidden, logits, live=live), stats)
    assert torch.equal(out.ids, wanted.ids), "changed contents are not seen by a replay"
    return int(differ)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--turns", type=int, default=24)
    ap.add_argument("--replays", type=int, default=10_000)
    ap.add_argument("--seconds", type=float, default=120, help="stop beginning new cases after this")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/routing.jsonl")
    a = ap.parse_args()
    started, steps, wrong, worst, cases = time.perf_counter(), 0, 0, 0.0, 0
    for shape, kind, text in itertools.product(SHAPES, KINDS, POLICIES):
        if time.perf_counter() - started > a.seconds:
            break
        n, bad, error = check(parse(text), kind, shape, a.turns)
        steps, wrong, worst, cases = steps + n, wrong + bad, max(worst, error), cases + 1
        if bad:
            print(f"{kind} {shape} {text}: ids of {bad} of {n} steps differ")
    row = {
        "bench": "routing_check", "cases": cases, "all_cases": len(SHAPES) * len(KINDS) * len(POLICIES),
        "steps": steps, "steps_with_other_ids": wrong, "largest_weight_error": worst,
        "replays": a.replays, "replays_with_other_ids": replays(a.replays), **provenance.stamp("cuda"),
    }  # fmt: skip
    provenance.append_rows(a.results, [row])
    print(row)


if __name__ == "__main__":
    main()
