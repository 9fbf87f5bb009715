"""Plot of a comparison: quality lost against experts fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moebudget.methods.registry import parse

STYLE = {
    "base": ("#c1121f", "o", "BASE: predicted energy"),
    "oracle": ("#7a7a7a", "*", "true energy (bound)"),
    "static": ("#e09f3e", "s", "mean energy"),
    "squared": ("#2a6f97", "^", "squared weights"),
    "router_mass": ("#61a5c2", "v", "router mass"),
    "oea": ("#386641", "D", "OEA: union of top-k0"),
    "topk": ("#6d597a", "X", "plain top-k"),
}


def plot_quality(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw rows of `bench="quality"` (one model and batch size): loss and, if measured, task accuracy.

    Methods with several rows become lines, others points; bars are 95 % intervals.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    native = next(r for r in rows if r["policy"] == "native")
    with_tasks = native["task_avg"] is not None
    figure, axes = plt.subplots(1, 2 if with_tasks else 1, figsize=(11 if with_tasks else 6, 4.3), squeeze=False)
    left = axes[0][0]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        preset = row["policy"].partition(":")[0]
        if preset in STYLE and parse(row["policy"]).name == row["policy"]:
            groups.setdefault(preset, []).append(row)
    for preset, (color, marker, label) in STYLE.items():
        points = sorted(groups.get(preset, []), key=lambda r: r["fetched"])
        if not points:
            continue
        style = {"color": color, "marker": marker, "label": label, "capsize": 2, "markersize": 6}
        style["linestyle"] = "-" if len(points) > 1 else "none"
        increase = [r["nll"] - r["native_nll"] for r in points]
        left.errorbar([r["fetched"] for r in points], increase, [r["nll_delta_ci95"] or 0 for r in points], **style)
        if with_tasks:
            x, y, bar = ([r[k] for r in points] for k in ("task_fetched", "task_avg", "task_ci95"))
            axes[0][1].errorbar(x, y, bar, **style)
    left.set(xlabel="distinct experts fetched per layer per step", ylabel="loss increase over native (nats per token)")
    left.set_title(f"held-out text, batch {native['B']} (native fetches {native['fetched']:.1f})", fontsize=10)
    left.set_ylim(bottom=0)
    left.grid(alpha=0.25)
    if left.get_legend_handles_labels()[0]:
        left.legend(fontsize=8, frameon=False)
    if with_tasks:
        right = axes[0][1]
        right.axhline(native["task_avg"], color="black", linewidth=1, linestyle=":")
        right.annotate(
            f"native {native['task_avg']:.1f} % at {native['task_fetched']:.1f} experts",
            (0.98, native["task_avg"]), xycoords=("axes fraction", "data"), xytext=(0, 3),
            textcoords="offset points", ha="right", fontsize=8,
        )  # fmt: skip
        right.set(xlabel="distinct experts fetched per layer per step", ylabel="tasks correct, %")
        right.set_title("nine tasks, answers decoded in a constant batch", fontsize=10)
        right.grid(alpha=0.25)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
