"""Plot of `study_spread`: the gain of an allocation over the layers, on text and on tasks."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.studies.study_spread import BOTH
from experiments.tables.spread_tables import newest
from experiments.tables.tables import Row, increase

TEXT = {  # rule -> colour, marker
    "BASE": ("#c1121f", "o"), "BASE, geometric": ("#e5989b", "o"), "spread": ("#5a189a", "P"),
    "spread, mean direction": ("#b185db", "P"), "OEA": ("#386641", "D"),
}  # fmt: skip
NAMES = {"OEA": ("OEA, k0 = 1", "OEA, k0 = 2")}  # rules of several rows
LABELS = {"BASE": "BASE", "BASE, geometric": "BASE, geometric denominator", "spread": "spread over the layers",
          "spread, mean direction": "spread, with mean directions", "OEA": "OEA"}  # fmt: skip
LINES = ("-", "--")  # of the trainings


def plot_layers(of: dict[str, list[Row]], path: Path) -> None:
    """Rows of each training by its name: loss on text by experts fetched, and tasks by experts fetched."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.3))
    for line, rows in zip(LINES, of.values(), strict=True):
        text, mixed = newest(rows, "spread"), newest(rows, "spread_mixed")
        for rule, (color, marker) in TEXT.items():
            points = sorted((r for r in text if r["method"] in NAMES.get(rule, (rule,))), key=lambda r: r["fetched"])
            if not points:  # a training whose study was stopped before these rules
                continue
            label = LABELS[rule] if line == "-" else None
            left.errorbar(
                [r["fetched"] for r in points], [increase(r) for r in points], [r["nll_delta_ci95"] for r in points],
                color=color, marker=marker, linestyle=line, capsize=2, markersize=5, label=label,
            )  # fmt: skip
        drawn = {
            "BASE": (TEXT["BASE"], [r for r in mixed if (r["method"], r["allocated_on"]) == ("BASE", BOTH)]),
            "spread, allocated on text and tasks": (
                TEXT["spread"],
                [r for r in mixed if (r["method"], r["allocated_on"]) == ("spread", BOTH)],
            ),
            "spread, allocated on text alone": (
                (TEXT["spread"][0], "x"),
                [r for r in newest(rows, "spread_tasks") if r["method"] == "spread"],
            ),
            "OEA": (TEXT["OEA"], [r for r in newest(rows, "spread_tasks") if r["method"] in NAMES["OEA"]]),
        }
        for label, ((color, marker), points) in drawn.items():
            points.sort(key=lambda r: r["task_fetched"])
            x, y, bar = ([r[k] for r in points] for k in ("task_fetched", "task_avg", "task_ci95"))
            right.errorbar(
                x, y, bar, color=color, marker=marker, linestyle=line if len(points) > 1 else "none", capsize=2,
                markersize=5, label=label if line == "-" else None,
            )  # fmt: skip
        native = next(r for r in mixed if r["policy"] == "native")
        right.axhline(native["task_avg"], color="black", linewidth=1, linestyle=":")
    left.set_title("held-out text, two trainings of 82M parameters (solid, dashed)", fontsize=10)
    left.set(xlabel="experts fetched per layer per step", ylabel="loss increase over native, nats per token")
    right.set_title("nine tasks (dotted: native routing)", fontsize=10)
    right.set(xlabel="experts fetched per layer per step", ylabel="tasks correct, %")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        axes.legend(fontsize=8, frameon=False)
    left.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
