"""Tables of docs/offload.md: measured times, losses and the simulation, from their rows alone."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from study_tables import last_run, loss
from tables import above, origin, table

Row = dict[str, Any]
BASE_COST = re.compile(r"worth:least=[\d.]+")
PAGE = "docs/offload.md"
NONE_YET = "No rows yet: run `python scripts/bench_offload.py stack demo` on a machine with a GPU."


def blocks(rows: list[Row]) -> dict[tuple[str, str], str]:
    """(page, place) -> text."""
    return {
        (PAGE, "offload-times"): times_table([r for r in rows if r["bench"] == "offload"]),
        (PAGE, "offload-quality"): quality_table(newest(rows, "offload_quality")),
        (PAGE, "devices-offload"): devices_table(last_run(rows, "devices"), "offload"),
        (PAGE, "devices-device"): devices_table(last_run(rows, "devices"), "device"),
    }


def newest(rows: list[Row], bench: str) -> list[Row]:
    """The last row of every setting."""
    return list({(r["model"], r["B"], r["slots"], r["policy"]): r for r in rows if r["bench"] == bench}.values())


def named(policy: str) -> str:
    return {"lfu": "LFU alone", "dense": "LFU alone"}.get(policy, f"`{policy}`")


def times_table(rows: list[Row]) -> str:
    if not rows:
        return NONE_YET
    rows, parts = newest(rows, "offload"), []
    heads = [
        "policy",
        "batch",
        "slots",
        "ms a step",
        "against LFU",
        "hits",
        "misses",
        "MB a step",
        "copies by fit",
    ]
    for model in dict.fromkeys(r["model"] for r in rows):
        mine = [r for r in rows if r["model"] == model]
        first, cells = mine[0], []
        for r in mine:
            label = "dense, with hooks" if r["policy"] == "dense" else named(r["policy"])
            cells.append([label, str(r["B"]), str(r["slots"]), f"{r['tpot_ms']:.2f}"])
            cells[-1] += [
                "" if r["policy"] == "lfu" else f"{-100 * r['reduction']:+.0f} %",
                f"{r['hits']:.1f}",
                f"{r['misses']:.1f}",
            ]
            cells[-1] += [f"{r['mb_a_step']:,.1f}", "" if r["copies_ms"] is None else f"{r['copies_ms']:.2f} ms"]
        parts += [
            f"**{model}**: {first['layers']} layers of {first['N']} experts, {first['K']} a token, "
            f"{first['expert_bytes'] / 1e6:.2f} MB each; torch {first['versions']['torch']}, transformers "
            f"{first['versions']['transformers']}, {first['steps']} steps, the fastest of "
            f"{len(first['tpot_rounds_ms'])} rounds; hits and misses a layer and step.",
            table(heads, cells),
        ]
    return "\n\n".join([*parts, origin(*rows)])


def quality_table(rows: list[Row]) -> str:
    rows, cells = sorted(rows, key=lambda r: (r["B"], r["slots"], -r["misses"])), []
    for r in rows:
        alone = r["policy"] == "dense"
        cells.append([named(r["policy"]), str(r["B"]), str(r["slots"]), f"{r['hits']:.2f}", f"{r['misses']:.2f}"])
        cells[-1].append("" if alone else f"{100 * (r['misses'] / r['lfu_misses'] - 1):+.0f} %")
        cells[-1] += [f"{1e3 * r['mb_a_step']:,.0f}", f"0 (loss {r['nll']:.3f})" if alone else loss(r)]
    heads = ["policy", "batch", "slots", "hits", "misses", "against LFU", "kB a step", "loss above dense"]
    return "\n\n".join(
        [
            f"The embedded model (64 experts a layer, 8 a token), decode mode, {rows[0]['tokens']:,} held-out tokens "
            "a row; ± is half of a 95 % interval over the windows. Hits and misses a layer and step, bytes in bf16.",
            table(heads, cells),
            reading(rows),
            origin(rows[-1]),
        ]
    )


def reading(rows: list[Row]) -> str:
    """What `worth` loses at the misses of CAEE, linear between its own settings."""
    parts = []
    for batch, slots in dict.fromkeys((r["B"], r["slots"]) for r in rows):
        mine = [r for r in rows if (r["B"], r["slots"]) == (batch, slots)]
        own = sorted(
            (r["misses"], above(r)) for r in mine if r["policy"] == "dense" or BASE_COST.fullmatch(r["policy"])
        )
        for theta in (0.7, 0.5):
            caee = next(r for r in mine if r["theta"] == theta)
            for (low, more), (high, less) in pairwise(own):
                if low <= caee["misses"] < high:
                    there = more + (caee["misses"] - low) / (high - low) * (less - more)
                    parts.append(
                        f"batch {batch}, {slots} slots, theta {theta:g}: {there:.3f} against {above(caee):.3f}"
                    )
    return "`worth` at the misses of `caee_offload`, linear between its rows, " + "; ".join(parts) + "."


def devices_table(rows: list[Row], deployment: str) -> str:
    rows = [r for r in rows if r["deployment"] == deployment]
    first, offloaded = rows[0], deployment == "offload"
    cells, alike = [], []
    for batch, devices in dict.fromkeys((r["B"], r["devices"]) for r in rows):
        mine = [r for r in rows if (r["B"], r["devices"]) == (batch, devices)]
        if len({(r["straggler"], r["straggler_misses"]) for r in mine}) == 1:
            what = f"copies {mine[0]['straggler_misses']:.0f}" if offloaded else f"runs {mine[0]['straggler']:.0f}"
            alike.append(f"batch {batch} on {devices} devices, where the slowest device always {what}")
            continue
        for r in mine:
            label = named(r["policy"]) if offloaded or r["policy"] != "dense" else "unchanged model"
            cells.append([label, str(batch), str(devices), f"{r['experts']:.1f}", f"{r['straggler']:.2f}"])
            cells[-1] += [f"{r['misses']:.1f}", f"{r['straggler_misses']:.2f}"] if offloaded else []
            cells[-1].append(f"{r['step_ms']:.1f}" if offloaded else f"{r['step_ms']:.2f}")
            cells[-1].append(f"{100 * r['against_dense']:+.1f} %")
    heads = ["policy", "batch", "devices", "experts", "slowest device's"]
    heads += ["misses", "slowest device's misses"] if offloaded else []
    return "\n\n".join(
        [
            f"**Simulated.** {first['steps']} recorded steps of the embedded model; experts and misses a layer and "
            f"step; times from constants of {first['constants']}.",
            table([*heads, "simulated ms a step", "against the first"], cells),
            *([f"No setting makes a difference at {'; '.join(alike)}."] if alike else []),
            origin(rows[-1]),
        ]
    )
