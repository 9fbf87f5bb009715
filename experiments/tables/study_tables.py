"""Tables of `compare_methods`: every method at equal fetched experts, and the studies of `moebudget analyse`."""

from __future__ import annotations

from experiments.tables.tables import Blocks, Row, increase, last_run, loss, origin, table, tasks
from moebudget.evaluate.quality import pm
from moebudget.methods.registry import METHODS

COMPARISON = "docs/results/comparison.md"
ANALYSES = "docs/results/analyses.md"
BASE_FAMILY = ("base", "nonlinear", "oracle", "static", "squared", "router_mass")  # BASE and its ablations, by name
PUBLISHED = {  # retained energy and accuracy of BASE's table 2
    "top-1 union": "85.9 % / 58.7", "weight sum": "82.6 % / 42.9", "squared sum": "91.0 % / 55.5",
    "static": "92.7 % / 64.5", "linear": "96.5 % / 73.5", "nonlinear": "98.2 % / 72.1", "oracle": "100 % / 73.6",
}  # fmt: skip


def blocks(quality: list[Row], analysis: list[Row]) -> Blocks:
    """The blocks of the two pages."""
    return {
        (COMPARISON, "methods-table"): methods_table(quality),
        (ANALYSES, "geometry-table"): geometry_table(analysis),
        (ANALYSES, "selection-table"): study_table(analysis, "selection", PUBLISHED),
        (ANALYSES, "fill-table"): study_table(analysis, "fill"),
        (ANALYSES, "batch-table"): batch_table(analysis),
        (ANALYSES, "draining-table"): draining_table(analysis),
    }


def methods_table(rows: list[Row]) -> str:
    """One table per target: methods that reach it by their loss, then the others."""
    rows = last_run(rows, "methods")
    native = rows[0]
    parts = [
        f"The embedded model, batch {native['B']}, decode mode, {native['tokens']:,} held-out tokens and "
        f"{native['items']:,} task items per row. Native routing fetches {native['fetched']:.1f} experts per layer "
        f"per step on the text (loss {native['nll']:.3f}) and {native['task_fetched']:.1f} on the tasks "
        f"({tasks(native)} % correct). The loss increase over native is in nats per token; ± is half of a 95 % "
        "interval. Settings were searched on other windows for the target number of experts, to within 0.5; of those "
        "within it, the setting with the lowest loss there was taken. **Bold counts** missed the target, mostly "
        "because the method has no such setting; they come last.",
    ]
    heads = ["method", "policy", "experts fetched", "loss increase over native", "same token, %", "retained energy"]
    for target in targets_of(rows):
        cells = []
        for r in sorted((r for r in rows if r["target"] == target), key=lambda r: (not r["matched"], increase(r))):
            count = f"{r['fetched']:.1f}" if r["matched"] else f"**{r['fetched']:.1f}**"
            cells.append([r["method"], f"`{r['policy']}`", count, loss(r)])
            cells[-1] += [pm(r["agreement"], r["agreement_ci95"], 1), f"{r['retained_energy']:.3f}"]
            cells[-1] += [f"{r['task_fetched']:.1f}", tasks(r)]
        parts += [
            f"### About {target} experts",
            table([*heads, "experts fetched on tasks", "tasks, %"], cells, left=2),
        ]
    return "\n\n".join([*parts, reading(rows), origin(native)])


def targets_of(rows: list[Row]) -> list[int]:
    """The target numbers of experts, rising."""
    return sorted({r["target"] for r in rows if r["target"]})


def reading(rows: list[Row]) -> str:
    """What the tables say, from their numbers."""
    ours = (name for name, method in METHODS.items() if method.source.startswith("ours"))
    family = {label for name in (*BASE_FAMILY, *ours) for label in METHODS[name].variants}
    sentences = []
    for target in targets_of(rows):
        matched = {r["method"]: r for r in rows if r["target"] == target and r["matched"]}
        loses = {method: f"{increase(r):.3f}" for method, r in matched.items()}
        published = sorted((m for m in matched if m not in family), key=lambda m: increase(matched[m]))
        best, worst = published[0], published[-1]
        sentences.append(
            f"At {target} experts BASE loses {loses['BASE']} nats per token. Of the other papers' methods that reach "
            f"this count, {best} loses least, {loses[best]}, and {worst} most, {loses[worst]}. Mean energies lose "
            f"{loses['mean energy']}, the nonlinear predictor {loses['BASE, nonlinear']}, true energies "
            f"{loses['true energy (bound)']}."
        )
    return " ".join(sentences) + (
        " The tasks' prompts are alike, so unions are small on them, and a rule whose active set follows the batch "
        "fetches far fewer experts on the tasks than on the text. The task accuracies of such rules and of fixed "
        "budgets are therefore not at equal fetched experts (see the column, and [constant and draining "
        "batches](analyses.md#constant-and-draining-batches))."
    )


def geometry_table(rows: list[Row]) -> str:
    """Cosines, the fit of exact over additive error, and additive against greedy selection."""
    (row,) = last_run(rows, "geometry")
    ratio = row["ratio"]
    cells = [
        ["mean \\|cosine\\| of co-routed experts, weighted by w_u w_v", f"{row['cosine_abs']:.3f}", ".040 to .045"],
        ["the same by layer", ", ".join(f"{c:.3f}" for c in row["cosine_abs_by_layer"]), ""],
        ["cbar, slope of rho − 1 over U_eff − 1", f"{row['cbar']:.4f}", ".021 to .032"],
        ["largest error of the one-parameter fit of rho", f"{100 * row['fit_error']:.2f} %", ".65 %"],
        ["largest error of the identity rho − 1 = cbar_t (U_eff − 1)", f"{row['identity_error']:.1e}", "exact"],
        [f"Err(additive) / Err(greedy) at {row['budget']} experts, median", f"{ratio['p50']:.3f}", ""],
        ["the same, 95th percentile", f"{ratio['p95']:.3f}", "1.018 to 1.032 (at 12)"],
        ["the same, 99th percentile", f"{ratio['p99']:.3f}", ""],
    ]
    omitted = [[str(k), f"{n:,}", f"{size:.2f}", f"{rho:.3f}"] for k, n, rho, size in row["omitted"]]
    return "\n\n".join(
        [
            f"Batch {row['B']}, {row['tokens']:,} held-out tokens, native routing; the first and the last layer are "
            "left out of cosines and fit, as in the paper. Published: three large models.",
            table(["quantity", "here", "published"], cells),
            table(["omitted experts of a token", "tokens", "U_eff", "rho = exact / additive"], omitted),
            origin(row),
        ]
    )


def study_table(rows: list[Row], bench: str, published: dict[str, str] | None = None) -> str:
    """Policies with experts fetched, loss, agreement, retained energy and tasks."""
    rows = last_run(rows, bench)
    heads = [
        "policy",
        "experts fetched",
        "retained energy",
        "same token, %",
        "loss increase over native",
        "experts fetched on tasks",
        "tasks, %",
    ]
    cells = []
    for r in rows:
        cells.append([r["policy"], f"{r['fetched']:.2f}", f"{100 * r['retained_energy']:.1f} %"])
        cells[-1] += [pm(r["agreement"], r["agreement_ci95"], 1), loss(r), f"{r['task_fetched']:.2f}", tasks(r)]
        cells[-1] += [published.get(r["policy"], "")] if published else []
    return "\n\n".join([table([*heads, *(["published"] if published else [])], cells), origin(rows[0])])


def batch_table(rows: list[Row]) -> str:
    """Loss by batch size, one column per rule."""
    rows = last_run(rows, "batch_size")
    rules = ("oea", "squared", "static", "base")
    cells = []
    for size in sorted({r["B"] for r in rows}):
        by_name = {r["policy"].partition(":")[0]: r for r in rows if r["B"] == size}
        counts = [
            f"{by_name['native']['fetched']:.1f}",
            f"{by_name['oea']['fetched']:.1f}",
            f"{by_name['base']['fetched']:.0f}",
        ]
        cells.append([str(size), *counts, *(loss(by_name[rule]) for rule in rules)])
    heads = ["batch", "native union", "OEA's union", "budget", "OEA, k0 = 1", "squared", "static", "BASE"]
    return "\n\n".join([table(heads, cells), origin(rows[0])])


def draining_table(rows: list[Row]) -> str:
    """Constant and draining batches side by side."""
    rows = last_run(rows, "draining")
    both = {b: {r["policy"]: r for r in rows if r["batching"] == b} for b in ("constant", "draining")}
    cells = []
    for policy, constant in both["constant"].items():
        draining = both["draining"][policy]
        cells.append([f"`{policy}`", f"{constant['fetched']:.2f}", tasks(constant)])
        cells[-1] += [f"{draining['fetched']:.2f}", tasks(draining)]
    heads = ["policy", "experts fetched, constant", "tasks, constant, %"]
    heads += ["experts fetched, draining", "tasks, draining, %"]
    constant, draining = (next(iter(both[b].values())) for b in ("constant", "draining"))
    return "\n\n".join(
        [
            f"{constant['items']} items, {constant['B']} in flight: {constant['rows_per_step']:.1f} rows per step if "
            f"the next item takes a finished item's place, {draining['rows_per_step']:.1f} if the batch drains.",
            table(heads, cells),
            origin(constant),
        ]
    )
