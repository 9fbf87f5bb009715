"""Tables of docs/offload.md: measured times, losses and the simulation."""

from __future__ import annotations

import re
from itertools import pairwise

from experiments.tables.tables import Blocks, Row, increase, last_run, loss, origin, table

BASE_COST = re.compile(r"worth:least=[\d.]+")
PAGE = "docs/offload.md"
NONE_YET = "No rows yet: run `python -m experiments.studies.bench_offload stack demo` on a machine with a GPU."


def blocks(rows: list[Row]) -> Blocks:
    """The blocks of the page."""
    devices = last_run(rows, "devices")
    return {
        (PAGE, "offload-times"): times_table([r for r in rows if r["bench"] == "offload"]),
        (PAGE, "offload-quality"): quality_table(newest(rows, "offload_quality")),
        (PAGE, "devices-offload"): devices_table(devices, "offload"),
        (PAGE, "devices-device"): devices_table(devices, "device"),
    }


def newest(rows: list[Row], bench: str) -> list[Row]:
    """The last row of every setting."""
    return list({(r["model"], r["B"], r["slots"], r["policy"]): r for r in rows if r["bench"] == bench}.values())


def named(policy: str) -> str:
    """The label of a policy beside an LFU cache."""
    return {"lfu": "LFU alone", "native": "LFU alone"}.get(policy, f"`{policy}`")


def times_table(rows: list[Row]) -> str:
    """Step times, hits, misses and bytes copied, one table per model."""
    if not rows:
        return NONE_YET
    rows, parts = newest(rows, "offload"), []
    heads = [
        "policy",
        "batch",
        "slots",
        "ms per step",
        "against LFU",
        "hits",
        "misses",
        "MB per step",
        "copies by fit",
    ]
    for model in dict.fromkeys(r["model"] for r in rows):
        of_one = [r for r in rows if r["model"] == model]
        first, cells = of_one[0], []
        for r in of_one:
            label = "native, with hooks" if r["policy"] == "native" else named(r["policy"])
            cells.append([label, str(r["B"]), str(r["slots"]), f"{r['tpot_ms']:.2f}"])
            cells[-1] += [
                "" if r["policy"] == "lfu" else f"{-100 * r['reduction']:+.0f} %",
                f"{r['hits']:.1f}",
                f"{r['misses']:.1f}",
            ]
            cells[-1] += [f"{r['mb_per_step']:,.1f}", "" if r["copies_ms"] is None else f"{r['copies_ms']:.2f} ms"]
        parts += [
            f"**{model}**: {first['layers']} layers of {first['N']} experts, {first['K']} per token, "
            f"{first['expert_bytes'] / 1e6:.2f} MB each; torch {first['versions']['torch']}, transformers "
            f"{first['versions']['transformers']}; {first['steps']} steps, the fastest of "
            f"{len(first['tpot_rounds_ms'])} rounds. Hits and misses are per layer per step.",
            table(heads, cells),
        ]
    return "\n\n".join([*parts, origin(*rows)])


def quality_table(rows: list[Row]) -> str:
    """Loss, hits and misses by batch size and slots."""
    rows, cells = sorted(rows, key=lambda r: (r["B"], r["slots"], -r["misses"])), []
    for r in rows:
        alone = r["policy"] == "native"
        cells.append([named(r["policy"]), str(r["B"]), str(r["slots"]), f"{r['hits']:.2f}", f"{r['misses']:.2f}"])
        cells[-1].append("" if alone else f"{100 * (r['misses'] / r['lfu_misses'] - 1):+.0f} %")
        cells[-1] += [f"{1e3 * r['mb_per_step']:,.0f}", f"0 (loss {r['nll']:.3f})" if alone else loss(r)]
    heads = ["policy", "batch", "slots", "hits", "misses", "against LFU", "kB per step", "loss increase over native"]
    return "\n\n".join(
        [
            f"The embedded model (64 experts per layer, 8 per token), decode mode, {rows[0]['tokens']:,} held-out "
            "tokens per row; ± is half of a 95 % interval over the windows. Hits and misses are per layer per step, "
            "bytes in bf16, the loss increase in nats per token.",
            table(heads, cells),
            reading(rows),
            origin(rows[-1]),
        ]
    )


def reading(rows: list[Row]) -> str:
    """The loss of `worth` at the misses of CAEE, linear between the settings of `worth`."""
    parts = []
    for batch, slots in dict.fromkeys((r["B"], r["slots"]) for r in rows):
        setting = [r for r in rows if (r["B"], r["slots"]) == (batch, slots)]
        worth = sorted(
            (r["misses"], increase(r)) for r in setting if r["policy"] == "native" or BASE_COST.fullmatch(r["policy"])
        )
        for theta in (0.7, 0.5):
            caee = next(r for r in setting if r["theta"] == theta)
            for (low, more), (high, less) in pairwise(worth):
                if low <= caee["misses"] < high:
                    equal = more + (caee["misses"] - low) / (high - low) * (less - more)
                    parts.append(
                        f"batch {batch}, {slots} slots, theta {theta:g}: {equal:.3f} against {increase(caee):.3f}"
                    )
    return (
        "Loss increase of `worth` against that of `caee_offload` at equal misses, linear between the rows of `worth`: "
        + "; ".join(parts)
        + "."
    )


def devices_table(rows: list[Row], deployment: str) -> str:
    """Simulated loads and step times, by batch size and number of devices."""
    rows = [r for r in rows if r["deployment"] == deployment]
    first, offloaded = rows[0], deployment == "offload"
    cells, alike = [], []
    for batch, devices in dict.fromkeys((r["B"], r["devices"]) for r in rows):
        setting = [r for r in rows if (r["B"], r["devices"]) == (batch, devices)]
        if len({(r["straggler"], r["straggler_misses"]) for r in setting}) == 1:
            slowest = setting[0]
            load = f"copies {slowest['straggler_misses']:.0f}" if offloaded else f"runs {slowest['straggler']:.0f}"
            alike.append(f"batch {batch} on {devices} devices, where the slowest device always {load}")
            continue
        for r in setting:
            label = named(r["policy"]) if offloaded or r["policy"] != "native" else "native"
            cells.append([label, str(batch), str(devices), f"{r['experts']:.1f}", f"{r['straggler']:.2f}"])
            cells[-1] += [f"{r['misses']:.1f}", f"{r['straggler_misses']:.2f}"] if offloaded else []
            cells[-1].append(f"{r['step_ms']:.1f}" if offloaded else f"{r['step_ms']:.2f}")
            cells[-1].append(f"{100 * r['over_native']:+.1f} %")
    heads = ["policy", "batch", "devices", "experts fetched", "by the slowest device"]
    heads += ["misses", "misses of the slowest device"] if offloaded else []
    return "\n\n".join(
        [
            f"**Simulated.** {first['steps']} recorded steps of the embedded model. Experts and misses are per layer "
            f"per step; times use constants of {first['constants']}.",
            table([*heads, "simulated ms per step", "against the first"], cells),
            *([f"No setting makes a difference at {'; '.join(alike)}."] if alike else []),
            origin(rows[-1]),
        ]
    )
