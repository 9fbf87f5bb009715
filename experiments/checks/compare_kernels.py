"""Comparison of the fused kernels of two source trees: equal ids and weights, and microseconds side by side.

    python -m experiments.checks.compare_kernels OLD_SRC NEW_SRC --rows 1 16 64 128 --model qwen3-30b
    python -m experiments.checks.compare_kernels OLD_SRC NEW_SRC --check-only --device cpu

Every measurement runs in a separate process whose PYTHONPATH is one of the trees; the trees take turns (A B A B). On
the CPU, Triton's interpreter runs a small layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

POLICIES = (
    "base:budget=10", "oea:k0=1", "xshare:k0=1,m=8", "price:budget=10", "base_ep:budget=4", "base:budget=10,level=yes",
)  # fmt: skip
BYPASS = "base:budget=999"  # leaves nothing out; compared, but not timed
TIMES = ("us_added", "us_total")
DEVICES = 4  # that hold equal blocks of experts


def outputs(policies: list[str], rows: list[int], model: str, device: str) -> dict[str, torch.Tensor]:
    """Ids, weights and counters of every policy and number of rows on seeded inputs, without and with native routes.

    Row 1 is padding, row 2 keeps its native routes and row 3 holds a NaN, if there are more rows than that.
    """
    from moebudget.bench.routing import SHAPES, prices
    from moebudget.kernels import FusedRouter

    try:
        from moebudget.core.router import RouterSpec
        from moebudget.core.types import LayerStats, Routing
        from moebudget.methods.registry import parse
    except ModuleNotFoundError:  # the modules of trees before the package was divided into rooms
        from moebudget.router import RouterSpec
        from moebudget.types import LayerStats, Routing

        from moebudget.presets import parse
    shape = SHAPES[model]
    spec, d = (RouterSpec(16, 2), 32) if device == "cpu" else (shape.spec, shape.hidden)
    n, tensors = spec.num_experts, {}
    for t in rows:
        g = torch.Generator().manual_seed(t)
        hidden, logits = torch.randn(t, d, generator=g), 1.5 * torch.randn(t, n, generator=g)
        kind = torch.ones(t, dtype=torch.int8)
        if t > 4:
            kind[1], kind[2], hidden[3, 0] = 0, 2, float("nan")
        stats = {
            "predictor_weight": torch.randn(n, d, generator=g),
            "predictor_bias": torch.randn(n, generator=g),
            "layer_price": prices(t / n * torch.randn(n, generator=g).exp()),
            "layer_budget": torch.arange(1, n + 1),
            "placement_device": torch.arange(n) * DEVICES // n,
        }
        placed = LayerStats({name: tensor.to(device) for name, tensor in stats.items()})
        bias = 0.1 * torch.randn(n, generator=g).to(device) if shape.bias and device != "cpu" else None
        hidden, logits, kind = hidden.to(device), logits.to(device), kind.to(device)
        batch = spec(hidden, logits, bias=bias)
        routes = Routing(batch.ids.int(), batch.weights)
        for text in policies:
            router = FusedRouter(parse(text), spec, placed, hidden=d, max_rows=t, device=device)
            for name, native in (("", None), (", native routes", routes)):
                routing = router(hidden, logits, kind, bias, None, native)
                tensors[f"{text}, {t} rows{name}: ids"] = routing.ids.cpu()
                tensors[f"{text}, {t} rows{name}: weights"] = routing.weights.cpu()
            tensors[f"{text}, {t} rows: counters"] = router.totals.cpu()
    return tensors


def work(a: argparse.Namespace) -> None:
    """What a process of one tree does: write its outputs, or print its timed rows as JSON."""
    import moebudget

    if not Path(moebudget.__file__).is_relative_to(a.trees[0].resolve()):
        raise SystemExit(f"moebudget was imported from {moebudget.__file__}, not from {a.trees[0]}")
    if a.save:
        torch.save(outputs([*a.policies, BYPASS], a.rows, a.model, a.device), a.save)
        return
    from moebudget.bench.routing import run_routing

    print(json.dumps(run_routing([a.model], a.rows, a.policies, a.device)))


def run_tree(tree: Path, a: argparse.Namespace, *more: str) -> str:
    """Run this file in a process of one tree and return what it prints."""
    command = [sys.executable, str(Path(__file__).resolve()), str(tree), str(tree), "--worker", "--model", a.model]
    command += ["--device", a.device, "--rows", *map(str, a.rows), "--policies", *a.policies, *more]
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    if a.device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def compare_outputs(a: argparse.Namespace) -> list[str]:
    """Names of the outputs that differ between the trees, bit for bit; NaN equals NaN."""
    with tempfile.TemporaryDirectory() as folder:
        saved = []
        for i, tree in enumerate(a.trees):
            path = Path(folder) / f"{i}.pt"
            run_tree(tree, a, "--save", str(path))
            saved.append(torch.load(path))
    old, new = saved
    if not old or old.keys() != new.keys():
        raise SystemExit("the trees made different outputs, so nothing can be compared")
    differ = [name for name in old if not same_bits(old[name], new[name])]
    print(f"{len(old)} outputs compared, {len(differ)} differ", *differ, sep="\n  ", flush=True)
    return differ


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """torch.equal, with NaN in the same places."""
    if x.is_floating_point():
        return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num())
    return torch.equal(x, y)


def compare_times(a: argparse.Namespace) -> None:
    """Time both trees in turns, append the rows to the results file and print medians and ratios."""
    rows: list[dict[str, Any]] = []
    for turn in range(a.repeats):
        for name, tree in zip(("old", "new"), a.trees, strict=True):
            timed = json.loads(run_tree(tree, a).splitlines()[-1])
            for row, (text, _) in zip(timed, itertools.product(a.policies, a.rows), strict=True):
                row |= {"tree": name, "turn": turn, "text": text}  # a tree may print the policy differently
            with a.results.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in timed)
            rows += timed
            print(f"turn {turn + 1} of {a.repeats}: {name} tree timed", flush=True)
    width = max(map(len, a.policies))
    print(f"{'policy':{width}} {'rows':>5}", *(f"{f'{key} old':>14} {'new':>8} {'ratio':>6}" for key in TIMES))
    for text in a.policies:
        for t in a.rows:
            cells = []
            for key in TIMES:
                old, new = (
                    statistics.median(r[key] for r in rows if (r["tree"], r["T"], r["text"]) == (name, t, text))
                    for name in ("old", "new")
                )
                cells.append(f"{old:14.2f} {new:8.2f} {new / old:6.3f}")
            print(f"{text:{width}} {t:5}", *cells)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("trees", nargs=2, type=Path, metavar="SRC", help="folders that hold moebudget: the old, the new")
    ap.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 128])
    ap.add_argument("--model", default="qwen3-30b", help="a model of `moebudget bench routing`")
    ap.add_argument("--policies", nargs="+", default=list(POLICIES))
    ap.add_argument("--repeats", type=int, default=2, help="turns of each tree")
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--check-only", action="store_true", help="compare outputs, time nothing")
    ap.add_argument("--results", type=Path, default=Path("compare_kernels.jsonl"), help="file to append timed rows to")
    ap.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    ap.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.worker:
        work(a)
        return
    differ = compare_outputs(a)
    if not a.check_only:
        compare_times(a)
    if differ:
        raise SystemExit("the trees differ in ids, weights or counters")


if __name__ == "__main__":
    main()
