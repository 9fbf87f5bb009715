"""Time that a policy adds to a layer's router, in CUDA graphs on one GPU: fused kernels, torch form, torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moebudget.core import provenance
from moebudget.core.placement import Placement
from moebudget.core.policy import Policy
from moebudget.core.router import RouterSpec
from moebudget.core.types import LayerStats, Routing, RowKind
from moebudget.kernels import FusedRouter
from moebudget.methods.base import PredictedEnergy
from moebudget.methods.registry import parse

ROWS, POLICIES = (1, 8, 16, 32, 64, 128), ("base:budget={M}",)  # the defaults
LAYERS = 48  # calls in one graph, each with separate inputs and statistics, as in a model
FLUSH = 2**27  # bytes, more than the L2 cache of any GPU
REPLAYS = 40
DEVICES = 4  # hold equal blocks of experts, for policies that read a placement


@dataclass(frozen=True, slots=True)
class Shape:
    """The router of one model."""

    model: str
    spec: RouterSpec
    hidden: int
    budget: int
    bias: bool = False


SHAPES = {
    s.model: s
    for s in (
        Shape("qwen3-30b", RouterSpec(128, 8), 2048, 10),
        Shape("qwen1.5-moe", RouterSpec(60, 4, renormalize=False), 2048, 14),
        Shape("deepseek-v2-lite", RouterSpec(64, 6, renormalize=False), 2048, 12),
        Shape(
            "deepseek-v3",
            RouterSpec(256, 8, "sigmoid", scale=2.5, groups=8, open_groups=4, group_score="top2"),
            7168,
            32,
            bias=True,
        ),
        Shape("gpt-oss-120b", RouterSpec(128, 4), 2880, 12),
    )
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of one layer in one step."""

    hidden: Tensor  # [T, d]
    logits: Tensor  # [T, N]
    kind: Tensor  # [T] int8 RowKind
    bias: Tensor | None
    stats: LayerStats


def make_inputs(shape: Shape, rows: int, device: str, layers: int, dtype: torch.dtype, seed: int = 0) -> list[Inputs]:
    """Random inputs of every layer; the logits come from a random router, so experts differ in popularity."""
    g = torch.Generator(device).manual_seed(seed)
    n, d = shape.spec.num_experts, shape.hidden

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, device=device)

    inputs = []
    for _ in range(layers):
        hidden = (normal(rows, d) + normal(d)).to(dtype)
        logits = (hidden.float() @ normal(d, n) * 1.5 / d**0.5).to(dtype)
        stats = {
            "predictor_weight": normal(n, d),
            "predictor_bias": normal(n),
            "energy_mean": normal(n).exp(),
        }
        kind = torch.full((rows,), RowKind.DECODE, dtype=torch.int8, device=device)
        bias = normal(n) * 0.1 if shape.bias else None
        batch = shape.spec(hidden, logits, bias=bias, kind=kind)
        costs = PredictedEnergy()(batch, LayerStats(stats)).sum(0, dtype=torch.float64)
        stats |= {"layer_budget": torch.arange(1, n + 1, device=device), "layer_price": prices(costs)}
        stats["placement_device"] = Placement.contiguous(n, DEVICES).device.to(device)
        inputs.append(Inputs(hidden, logits, kind, bias, LayerStats(stats)))
    return inputs


def prices(costs: Tensor) -> Tensor:
    """Removal costs [N] -> prices [N] at which 1 to N experts are fetched, as the selection `Price` reads them."""
    falling = costs.sort(descending=True).values
    return torch.cat([(falling[1:] + falling[:-1]) / 2, falling.new_full((1,), -torch.inf)])


def graph_us(calls: Sequence[Callable[[], Any]], replays: int = REPLAYS) -> float:
    """Median microseconds per call, with all calls captured in one CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(5):
        graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(1e3 * start.elapsed_time(end) / len(calls)))
    return sorted(times)[len(times) // 2]


def torch_form(shape: Shape, policy: Policy, x: Inputs) -> Routing:
    """The definition that the kernels must reproduce."""
    batch = shape.spec(x.hidden, x.logits, bias=x.bias, kind=x.kind)
    return policy(batch, x.stats)


def measure(
    shape: Shape, policy: Policy, rows: int, device: str = "cuda", compiled: bool = False, layers: int = LAYERS
) -> dict[str, Any]:
    """One row: microseconds per layer of the native router, the fused policy, the torch form, and the floor.

    `us_added` is the fused policy, native routing included, minus the native router's kernel. `us_routed` is the
    policy alone, which receives the native routes, as in vLLM. `us_cold` is the time it adds there after FLUSH bytes
    have evicted its code and buffers from the cache, as a layer's experts do. `us_floor` is the time of an empty
    kernel plus the bytes of logits, hidden states, routed predictor rows and outputs at the measured copy bandwidth.
    Raises AssertionError if the kernel's ids differ from those of the torch form.
    """
    from moebudget.kernels.native import native_rows

    spec = shape.spec
    inputs = make_inputs(shape, rows, device, layers, torch.bfloat16)
    fused = [FusedRouter(policy, spec, x.stats, hidden=shape.hidden, max_rows=rows, device=device) for x in inputs]
    outs = [f(x.hidden, x.logits, x.kind, x.bias) for f, x in zip(fused, inputs, strict=True)]
    for x, out in zip(inputs, outs, strict=True):
        assert torch.equal(out.ids, torch_form(shape, policy, x).ids), "the kernel's ids differ from the torch form's"
    router = fused[0].router

    def native(x: Inputs, out: Routing, f: FusedRouter) -> None:
        native_rows[(rows,)](
            x.logits, x.logits if x.bias is None else x.bias, out.ids, out.weights, x.logits.stride(0),
            spec.num_experts, HAS_BIAS=x.bias is not None, num_warps=f.warps, **router,
        )  # fmt: skip

    def torch_native(x: Inputs) -> Tensor:
        return spec.scores(x.logits, x.bias)[0].topk(spec.top_k, -1).values

    each = list(zip(inputs, outs, fused, strict=True))
    us_native = graph_us([partial(native, x, o, f) for x, o, f in each])
    us_total = graph_us([partial(f, x.hidden, x.logits, x.kind, x.bias, o) for x, o, f in each])
    batches = [spec(x.hidden, x.logits, bias=x.bias) for x in inputs]
    native_routes = [Routing(b.ids.int(), b.weights) for b in batches]
    us_routed = graph_us(
        [
            partial(f, x.hidden, x.logits, x.kind, x.bias, o, r)
            for (x, o, f), r in zip(each, native_routes, strict=True)
        ]
    )
    flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)

    def cold(x: Inputs, out: Routing, f: FusedRouter, routes: Routing | None) -> None:
        flush.zero_()
        x.hidden.mul_(1)  # in the cache, as just written by the step
        native(x, out, f)
        if routes is not None:
            f(x.hidden, x.logits, x.kind, x.bias, out, routes)

    with_policy, without = (
        graph_us(
            [partial(cold, x, o, f, r if applied else None) for (x, o, f), r in zip(each, native_routes, strict=True)]
        )
        for applied in (True, False)
    )
    few = inputs[: max(1, layers // 6)]
    us_torch = graph_us([partial(torch_form, shape, policy, x) for x in few])
    us_compiled = None
    if compiled:
        form = torch.compile(partial(torch_form, shape, policy), dynamic=False)
        us_compiled = graph_us([partial(form, x) for x in few])
    scalar = torch.zeros(1, device=device)
    us_empty = graph_us([scalar.zero_] * layers)
    budget = policy.budget if isinstance(policy.budget, int) else 0
    return {
        "bench": "routing", "policy": policy.name, "model": shape.model, "T": rows, "N": spec.num_experts,
        "K": spec.top_k, "d": shape.hidden, "M": budget,
        "us_native": round(us_native, 3), "us_total": round(us_total, 3), "us_added": round(us_total - us_native, 3),
        "us_routed": round(us_routed, 3), "us_cold": round(with_policy - without, 3), "us_torch": round(us_torch, 3),
        "us_compiled": None if us_compiled is None else round(us_compiled, 3),
        "us_torch_native": round(graph_us([partial(torch_native, x) for x in few]), 3),
        "us_floor": round(us_empty + moved_bytes(shape, policy, rows) / bandwidth(device) * 1e6, 3),
        "us_empty": round(us_empty, 3), "pdl": fused[0].pdl,
    }  # fmt: skip


def moved_bytes(shape: Shape, policy: Policy, rows: int) -> int:
    """Bytes that any implementation must read and write per layer; predictor rows count at most once each."""
    spec = shape.spec
    touched = min(spec.num_experts, rows * spec.top_k) if "predictor_weight" in policy.needs else 0
    return 2 * rows * (spec.num_experts + shape.hidden) + 4 * touched * shape.hidden + 12 * rows * spec.top_k


_BANDWIDTH: dict[str, float] = {}


def bandwidth(device: str) -> float:
    """Bytes per second of a large copy on the device, counting reads and writes."""
    if device not in _BANDWIDTH:
        source = torch.empty(2**30, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        us = graph_us([partial(target.copy_, source)], 10)
        _BANDWIDTH[device] = 2 * source.numel() / us * 1e6
    return _BANDWIDTH[device]


def run_routing(
    models: Sequence[str],
    rows: Sequence[int] = ROWS,
    policies: Sequence[str] = POLICIES,
    device: str = "cuda",
    compiled: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """Rows for benchmarks/results/routing.jsonl. `{M}` in a policy is replaced by the model's budget.

    Raises ValueError without a CUDA device or for an unknown model.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench routing times CUDA graphs, and there is no CUDA device")
    unknown = [m for m in models if m not in SHAPES]
    if unknown:
        raise ValueError(f"unknown model {unknown[0]!r}; known: {', '.join(SHAPES)}")
    result = []
    for model in models:
        for text in policies:
            for t in rows:
                policy = parse(text.replace("{M}", str(SHAPES[model].budget)))
                row = measure(SHAPES[model], policy, t, device, compiled=t in compiled)
                result.append({**row, "gpu": provenance.device_name(device), **provenance.stamp(device)})
    return result
