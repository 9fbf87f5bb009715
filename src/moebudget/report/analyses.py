"""Tables and plots of the studies of `moebudget analyse`, made from their rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from moebudget.evaluate.quality import pm

Row = dict[str, Any]
COLUMNS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "selection": (("fetched", "experts\nfetched", 2), ("retained_energy", "retained\nenergy", 4)),
    "fill": (("fetched", "experts\nfetched", 2), ("agreement", "same token\nas native, %", 1)),
    "batch_size": (("B", "batch", 0), ("fetched", "experts\nfetched", 2), ("native_union", "native\nunion", 2)),
    "draining": (
        ("batching", "batching", 0),
        ("rows_per_step", "rows\nper step", 1),
        ("fetched", "experts\nfetched", 2),
    ),
}
TITLES = {
    "selection": "selection rule, budget = size of the top-1 union at every step",
    "fill": "fill, with BASE's active set",
    "batch_size": "batch size, budget = experts that OEA k0=1 fetches",
    "draining": "constant and draining batches",
}


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table per study."""
    made = [_geometry(row) for row in rows if row["bench"] == "geometry"]
    for bench, columns in COLUMNS.items():
        of_study = [row for row in rows if row["bench"] == bench]
        if not of_study:
            continue
        table = Table(title=TITLES[bench])
        table.add_column("policy", no_wrap=True)
        for _, heading, _ in columns:
            table.add_column(heading, justify="right")
        with_loss, with_tasks = "nll" in of_study[0], of_study[0].get("task_avg") is not None
        if with_loss:
            table.add_column("loss increase\nover native", justify="right")
        if with_tasks:
            table.add_column("tasks\ncorrect, %", justify="right")
        for row in of_study:
            cells = [row["policy"], *(_cell(row[name], digits) for name, _, digits in columns)]
            if with_loss:
                cells.append(pm(row["nll"] - row["native_nll"], row["nll_delta_ci95"], 3))
            if with_tasks:
                cells.append(pm(row["task_avg"], row["task_ci95"], 1))
            table.add_row(*cells)
        made.append(table)
    return made


def _cell(value: Any, digits: int) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}f}"


def _geometry(row: Row) -> Table:
    table = Table(title=f"geometry of co-routed experts, batch {row['B']}, {row['tokens']:,} tokens")
    table.add_column("quantity")
    table.add_column("value", justify="right")
    table.add_row("mean |cosine| of co-routed experts, weighted", f"{row['cosine_abs']:.3f}")
    table.add_row("  by layer", " ".join(f"{c:.3f}" for c in row["cosine_abs_by_layer"]))
    table.add_row("cbar, slope of rho - 1 over U_eff - 1", f"{row['cbar']:.4f}")
    table.add_row("largest error of the fitted rho", f"{100 * row['fit_error']:.2f} %")
    table.add_row("largest error of the identity, rounding", f"{row['identity_error']:.1e}")
    for omitted, tokens, rho, size in row["omitted"]:
        table.add_row(f"  {omitted} omitted: U_eff {size:.2f}, {tokens:,} tokens", f"rho {rho:.3f}")
    for name, value in row["ratio"].items():
        table.add_row(f"Err(additive) / Err(greedy) at {row['budget']} experts, {name}", f"{value:.3f}")
    return table


def plot_studies(rows: Sequence[Row], path: Path) -> None:
    """One panel per measured study: cosines, exact against additive error, loss increase against batch size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    geometry = [row for row in rows if row["bench"] == "geometry"]
    sweep = [row for row in rows if row["bench"] == "batch_size" and row["policy"] != "native"]
    panels = 2 * bool(geometry) + bool(sweep)
    if not panels:
        return
    figure, axes = plt.subplots(1, panels, figsize=(5.2 * panels, 4), squeeze=False)
    free = list(axes[0])
    if geometry:
        row = geometry[-1]
        bins = len(row["cosine_histogram"])
        centres = [-1 + (2 * i + 1) / bins for i in range(bins)]
        axis = free.pop(0)
        axis.bar(centres, row["cosine_histogram"], width=2 / bins, color="#2a6f97")
        axis.set(xlim=(-1, 1), xlabel="cosine of two co-routed experts' outputs", ylabel="share, weighted by w_u w_v")
        axis.set_title(f"mean |cosine| {row['cosine_abs']:.3f}", fontsize=10)
        axis = free.pop(0)
        sizes, rhos = [o[3] for o in row["omitted"]], [o[2] for o in row["omitted"]]
        axis.plot(sizes, rhos, "o", color="#c1121f", label="mean over tokens")
        axis.plot(
            sizes, [1 + row["cbar"] * (e - 1) for e in sizes], color="black", linewidth=1, label="one-parameter fit"
        )
        for omitted, _, rho, size in row["omitted"]:
            axis.annotate(str(omitted), (size, rho), xytext=(4, -10), textcoords="offset points", fontsize=8)
        axis.set(xlabel="effective number of omitted experts (labels: number)", ylabel="exact / additive error")
        axis.set_title(f"rho - 1 = {row['cbar']:.3f} (U_eff - 1)", fontsize=10)
        axis.legend(fontsize=8, frameon=False)
    if sweep:
        axis = free.pop(0)
        for rule in dict.fromkeys(row["policy"].partition(":")[0] for row in sweep):
            of_rule = [row for row in sweep if row["policy"].startswith(rule)]
            losses = [row["nll"] - row["native_nll"] for row in of_rule]
            halves = [row["nll_delta_ci95"] or 0 for row in of_rule]
            axis.errorbar([row["B"] for row in of_rule], losses, halves, marker="o", label=rule)
        axis.set_xscale("log", base=2)
        ticks = sorted({row["B"] for row in sweep})
        axis.set_xticks(ticks, [str(t) for t in ticks])
        axis.set(xlabel="rows per decode step", ylabel="loss increase over native, nats per token")
        axis.set_title("at equal fetched experts, those of OEA k0=1", fontsize=10)
        axis.legend(fontsize=8, frameon=False)
    for axis in axes[0]:
        axis.grid(alpha=0.25)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
