"""Simulation of experts on 8, 16 and 64 devices, from the embedded model's recorded routing and measured costs.

    python -m experiments.studies.simulate_devices --stats out/stats.safetensors

No machine with so many devices was used. Counts come from routing recorded on one CPU. Times are those counts times
constants measured on one H200 (benchmarks/results): a step's fixed part and its part for each expert that a layer
reads (`decode_fit` of qwen3-30b at the batch size), and a host-to-device copy of one of its experts (`transfers`). A
layer waits for its slowest device:

    on the device   a + b mean_l max_d experts
    offloaded       a + b mean_l max_d experts + 48 mean_l max_d misses * (t0 + bytes / bandwidth)

Left out: communication between devices, other requests, links that share a host, copies that overlap with computing,
the effect of a policy's error in one layer on the routing of the next. Appends rows with "simulated": true to
benchmarks/results/offload.jsonl.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from experiments.studies.device_simulation import DeviceLoads, record_steps, simulate_devices
from experiments.studies.study_offload import demo
from moebudget import parse
from moebudget.core import provenance
from moebudget.core.stats import Stats
from moebudget.core.types import RouterBatch
from moebudget.demo.run import NAME, heldout_windows
from moebudget.engines.transformers.loading import vocabulary
from moebudget.engines.transformers.transfers import TransferFit
from moebudget.report.rows import several_devices

ROOT = Path(__file__).resolve().parents[2]

DEVICES, BATCHES = (8, 16, 64), (16, 64)
SHARE = 0.25  # of all experts that the caches hold together
MODEL_LAYERS, EXPERT_BYTES, TENSORS = 48, 3 * 2048 * 768 * 2, 2  # Qwen3-30B-A3B, bf16; gate and up are one tensor
OFFLOADED = ("native", "caee_offload:theta=0.9", "caee_offload:theta=0.8", "caee_offload:theta=0.7", "worth:least=0.5")
THETAS = (0.2, 0.4, 0.8)  # of CAEE on the device, at 16 rows; a bound of a sum over rows, scaled by the number of rows


def constants(results: Path, batch: int) -> dict[str, float]:
    """The measured constants, from the newest rows."""

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (results / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]

    decode = [r for r in rows("decode") if r["bench"] == "decode_fit" and not several_devices(r)]
    fits = [r for r in decode if (r["model"], r["B"]) == ("qwen3-30b", batch)]
    link = rows("transfers")[-1]
    fit = TransferFit(link["t0_us"] * 1e-6, link["gb_per_s"] * 1e9)
    miss = 1e3 * (TENSORS * fit.t0 + EXPERT_BYTES / fit.bandwidth)
    return {"a_ms": fits[-1]["a_ms"], "b_ms": fits[-1]["b_ms"], "miss_ms": miss}


def matched(
    layers: list[RouterBatch], stats: Stats, devices: int, total: float, warm: int
) -> list[tuple[str, DeviceLoads]]:
    """BASE and XShare per device at the settings closest to `total` experts per layer on all devices."""
    candidates = (
        [f"base:budget={m}" for m in range(max(1, round(total) - 1), round(total) + 2)],
        [f"xshare_ep:k0={k},m_device={m}" for k in (0, 1) for m in range(1 - k, 9)],
    )
    best = []
    for policies in candidates:
        runs = [(p, simulate_devices(layers, parse(p), stats, devices, warm=warm)) for p in policies]
        best.append(min(runs, key=lambda run: abs(run[1].total - total)))
    return best


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--stats", type=Path, required=True)
    ap.add_argument("--warm", type=int, default=127, help="steps that fill the caches")
    ap.add_argument("--results", type=Path, default=ROOT / "benchmarks/results")
    a = ap.parse_args()
    model, tokenizer, stats = demo(a.stats)
    started, stamp, rows = time.perf_counter(), provenance.stamp("cpu"), []
    for batch in BATCHES:
        windows = heldout_windows(tokenizer, vocabulary(model), batch)
        layers, costs = record_steps(model, windows, batch), constants(a.results, batch)
        experts = layers[0].probs.shape[-1]
        for devices in DEVICES:
            slots = max(1, round(SHARE * experts * len(layers) / devices))
            on_device = ["native", *(f"caee:theta={theta * batch / 16:g}" for theta in THETAS)]
            settings = [(p, slots) for p in OFFLOADED] + [(p, 0) for p in on_device]
            runs = [(p, s, simulate_devices(layers, parse(p), stats, devices, s, a.warm)) for p, s in settings]
            total = {policy: loads.total for policy, _, loads in runs}
            base = f"base:budget={round(total[OFFLOADED[2]])}"  # at equal experts, without knowledge of the caches
            runs.append((base, slots, simulate_devices(layers, parse(base), stats, devices, slots, a.warm)))
            runs += [(p, 0, loads) for p, loads in matched(layers, stats, devices, total[on_device[2]], a.warm)]
            alone: dict[bool, float] = {}
            for policy, s, loads in runs:
                ms = costs["a_ms"] + costs["b_ms"] * loads.straggler
                ms += MODEL_LAYERS * loads.straggler_misses * costs["miss_ms"]
                first = alone.setdefault(s > 0, ms)
                rows.append({
                    "bench": "devices", "simulated": True, "model": NAME, "B": batch, "devices": devices,
                    "deployment": "offload" if s else "device", "slots_per_device": s or None, "policy": policy,
                    "experts": round(loads.total, 3), "straggler": round(loads.straggler, 3),
                    "misses": round(loads.total_misses, 3), "straggler_misses": round(loads.straggler_misses, 3),
                    "step_ms": round(ms, 3), "over_native": round(ms / first - 1, 4),
                    "steps": len(loads.experts), "layers": len(layers), **{k: round(v, 5) for k, v in costs.items()},
                    "constants": f"qwen3-30b on one H200, {MODEL_LAYERS} layers", **stamp,
                })  # fmt: skip
            print(f"batch {batch}, {devices} devices: {time.perf_counter() - started:.0f} s", flush=True)
    provenance.append_rows(a.results / "offload.jsonl", rows)


if __name__ == "__main__":
    main()
