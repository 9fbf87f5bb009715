"""Charts of the studies: batch size, draining batches, geometry of expert outputs, experts by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moebudget.evaluate.quality import pm
from moebudget.report.rows import Group, Row, above, of
from moebudget.report.style import ACCENT, MUTED, Chart, colour, panel, spread_labels


def batch_sizes(groups: Sequence[Group]) -> list[Chart]:
    """Loss increase against rows per step, one line per rule."""
    rows = [row for group in groups for row in group.restricted]
    if not rows:
        return []
    figure, axis = panel("rows per decode step", "loss increase over native, nats per token")
    labels = []
    rules = list(dict.fromkeys(row["policy"].partition(":")[0] for row in rows))
    for place, rule in enumerate(rules):
        of_rule = sorted((r for r in rows if r["policy"].partition(":")[0] == rule), key=lambda r: r["B"])
        tone = colour(rule, place)
        sizes, losses = [r["B"] for r in of_rule], [above(r) for r in of_rule]
        axis.errorbar(sizes, losses, [r["nll_delta_ci95"] or 0 for r in of_rule], fmt="o-", color=tone, label=rule)
        labels.append((sizes[-1], losses[-1], rule, tone))
    axis.set_xscale("log")
    ticks = sorted({row["B"] for row in rows})
    axis.set_xticks(ticks, [f"{t:.0f}" for t in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlim(min(ticks) * 0.88, max(ticks) * 1.8)
    spread_labels(axis, labels)
    least = [min((r for r in rows if r["B"] == size), key=above)["policy"].partition(":")[0] for size in ticks]
    title = (
        f"{least[0]} loses least at every batch size"
        if len(set(least)) == 1
        else "The rule that loses least depends on the batch size: "
    )
    if len(set(least)) > 1:
        title += ", ".join(f"{rule} at {size:.0f}" for rule, size in zip(least, ticks, strict=True)) + " rows"
    text = (
        f"{groups[0].model}, {groups[0].tokens:,} held-out tokens per policy; at each batch size every rule fetches "
        "as many experts as OEA with k0=1. Bars are 95 % intervals."
    )
    cells = tuple(
        (f"{r['B']:.0f}", r["policy"], f"{r['fetched']:.2f}", pm(above(r), r["nll_delta_ci95"], 4))
        for r in sorted(rows, key=lambda r: (r["B"], above(r)))
    )
    heads = ("rows", "policy", "experts fetched", "loss increase over native")
    return [Chart("batch-size", title, text, figure, heads, cells)]


def draining(rows: Sequence[Row]) -> list[Chart]:
    """Task accuracy of the same answers decoded in a constant and in a draining batch."""
    newest = {(r["policy"], r["batching"]): r for r in sorted(of(rows, "draining"), key=lambda r: r["date"])}
    names = dict.fromkeys(policy for policy, _ in newest)
    policies = [p for p in names if (p, "constant") in newest and (p, "draining") in newest]
    if not policies:
        return []
    policies.sort(key=lambda p: newest[p, "constant"]["task_avg"])
    figure, axis = panel("tasks correct, %", "", 1.2 + 0.36 * len(policies))
    for batching, tone, shift in (("constant", ACCENT, 0.12), ("draining", MUTED, -0.12)):
        drawn = [newest[p, batching] for p in policies]
        places = [i + shift for i in range(len(policies))]
        axis.errorbar(
            [r["task_avg"] for r in drawn], places, xerr=[r["task_ci95"] for r in drawn], fmt="o", color=tone,
            label=f"{batching}, {sum(r['rows_per_step'] for r in drawn) / len(drawn):.1f} rows per step",
        )  # fmt: skip
    axis.set_yticks(range(len(policies)), policies)
    axis.grid(axis="y", visible=False)
    axis.legend(frameon=False, loc="upper left", fontsize=9)
    gains = {p: newest[p, "draining"]["task_avg"] - newest[p, "constant"]["task_avg"] for p in policies}
    most = max(policies, key=lambda p: gains[p])
    title = f"Draining batches overstate task accuracy by up to {gains[most]:.1f} points ({most})"
    text = "The same items and policies; finished rows are refilled at once (constant) or not at all (draining)."
    cells = tuple(
        (p, b, f"{r['rows_per_step']:.2f}", f"{r['fetched']:.2f}", pm(r["task_avg"], r["task_ci95"], 1))
        for p in policies for b in ("constant", "draining") for r in (newest[p, b],)
    )  # fmt: skip
    heads = ("policy", "batching", "rows per step", "experts fetched", "tasks correct, %")
    return [Chart("draining", title, text, figure, heads, cells)]


def geometry(rows: Sequence[Row]) -> list[Chart]:
    """Ratio of exact to additive error of omitted experts, and its one-parameter fit."""
    made = []
    for row in of(rows, "geometry")[-1:]:
        figure, axis = panel("effective number of omitted experts", "exact / additive error")
        sizes, rhos = [o[3] for o in row["omitted"]], [o[2] for o in row["omitted"]]
        axis.plot(sizes, [1 + row["cbar"] * (size - 1) for size in sizes], color=MUTED, linewidth=1.2, label="fit")
        axis.plot(sizes, rhos, "o", color=ACCENT, label="measured")
        for omitted, _, rho, size in row["omitted"]:
            axis.annotate(
                f"{omitted:.0f} omitted", (size, rho), xytext=(7, -9), textcoords="offset points", fontsize=9
            )
        axis.margins(x=0.12)
        worst = max(rhos)
        title = f"Adding up the errors of single experts is off by at most {100 * (worst - 1):.0f} % on average"
        text = (
            f"{row['model']}, {row['B']} rows, native routes. The outputs of one token's experts are nearly "
            f"orthogonal (mean |cosine| {row['cosine_abs']:.3f}), so their removal costs may be added."
        )
        cells = tuple((f"{o:.0f}", f"{n:,.0f}", f"{size:.2f}", f"{rho:.4f}") for o, n, rho, size in row["omitted"])
        heads = ("omitted experts", "tokens", "effective number", "exact / additive")
        made.append(Chart("geometry", title, text, figure, heads, cells))
    return made


def layers(rows: Sequence[Row]) -> list[Chart]:
    """Fetched experts by layer, for rows that hold them."""
    by_layer = [row for row in rows if isinstance(row.get("fetched_by_layer"), list) and row["fetched_by_layer"]]
    newest: dict[tuple[str, int, str], dict[tuple[str, Any], Row]] = {}
    for row in sorted(by_layer, key=lambda row: row["date"]):
        key = (row["model"], row["B"], row["bench"])
        newest.setdefault(key, {})[row["policy"], row.get("M")] = row
    charts = []
    for (model, batch, bench), of_bench in newest.items():
        figure, axis = panel("Mixture-of-Experts layer", "experts fetched per step")
        labels = []
        for place, ((policy, budget), row) in enumerate(of_bench.items()):
            name = policy if bench != "decode" else f"budget {budget}"
            tone, counts = colour(name, place), row["fetched_by_layer"]
            axis.plot(range(len(counts)), counts, "o-", markersize=3.5, color=tone, label=name)
            labels.append((len(counts) - 1, counts[-1], name, tone))
        axis.set_ylim(bottom=0)
        left, right = axis.get_xlim()
        axis.set_xlim(left, right + 0.35 * (right - left))
        most = max(len(row["fetched_by_layer"]) for row in of_bench.values())
        axis.set_xticks(range(0, most, 1 + most // 16))
        spread_labels(axis, labels)
        spans = {name: max(r["fetched_by_layer"]) - min(r["fetched_by_layer"]) for (name, _), r in of_bench.items()}
        widest = max(spans, key=lambda name: spans[name])
        title = f"Layers differ by up to {spans[widest]:.1f} experts ({widest})"
        cells = tuple(
            (p, f"{i}", f"{c:.2f}") for (p, _), r in of_bench.items() for i, c in enumerate(r["fetched_by_layer"])
        )
        name = "".join(c if c.isalnum() else "-" for c in f"layers-{bench}-{model}-{batch}").lower()
        text = f"{model}, {batch} rows per step, mean over the decode steps."
        charts.append(Chart(name, title, text, figure, ("policy", "layer", "experts fetched"), cells))
    return charts
