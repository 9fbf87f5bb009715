"""Tables of docs/results/quality.md: rules on the embedded model, and on a model with equal expert loads."""

from __future__ import annotations

from experiments.tables.tables import Blocks, Row, increase, last_run, loss, of_model, origin, table, tasks
from moebudget.demo.run import NAME

PAGE = "docs/results/quality.md"
EQUAL_LOADS = "equal-loads-8m"
LABELS = {
    "native": "native",
    "topk": "plain top-k",
    "oea": "OEA",
    "router_mass": "router mass",
    "squared": "squared weights",
    "static": "mean energy",
    "base": "**BASE**",
    "oracle": "true energy (bound)",
}


def blocks(rows: list[Row]) -> Blocks:
    """The blocks of the page."""
    return {(PAGE, "quality-table"): quality_table(demo_rows(rows)), (PAGE, "equal-loads"): contrast(rows)}


def demo_rows(rows: list[Row]) -> list[Row]:
    """The rows of the embedded model's last run."""
    return last_run(of_model(rows, NAME), "quality")


def quality_table(rows: list[Row]) -> str:
    """One row per policy, and the reading of them."""
    native, cells = rows[0], []
    for r in rows:
        cells.append([LABELS[r["policy"].partition(":")[0]], f"`{r['policy']}`", f"{r['fetched']:.1f}"])
        cells[-1] += [f"{r['expert_mb_per_step']:.1f}", f"0 (loss {r['nll']:.3f})" if r is native else loss(r)]
        cells[-1] += [f"{r['agreement']:.1f}", f"{r['retained_energy']:.3f}", f"{r['task_fetched']:.1f}", tasks(r)]
    heads = ["rule", "policy", "experts fetched", "MB per step", "loss increase over native", "same token, %"]
    heads += ["retained energy", "experts fetched on tasks", "tasks, %"]
    return "\n\n".join(
        [
            f"The embedded model (8M parameters, 6 layers of 64 experts, 8 per token), batch {native['B']}, decode "
            f"mode, {native['tokens']:,} held-out tokens and {native['items']:,} task items per row. Experts fetched "
            "are per layer per step, the loss increase is in nats per token, and ± is half of a 95 % interval (for "
            "the loss, paired with native routing).",
            table(heads, cells, left=2),
            reading({r["policy"]: r for r in rows}),
            origin(native),
        ]
    )


def reading(rows: dict[str, Row]) -> str:
    """What the table says about BASE at 10 experts, from its numbers."""

    def more(policy: str) -> str:
        return f"{increase(rows[policy]):.2f}"

    base, static = rows["base:budget=10"], rows["static:budget=10"]
    gap, width = base["task_avg"] - static["task_avg"], base["task_ci95"] + static["task_ci95"]
    apart = "the tasks do not tell the two apart" if abs(gap) < width else f"on the tasks the difference is {gap:+.1f}"
    return (
        f"At 10 of {rows['native']['fetched']:.1f} experts BASE loses {more('base:budget=10')} nats per token. If "
        f"router weights alone choose the 10, the loss is {more('router_mass:budget=10')}; if their squares choose, "
        f"{more('squared:budget=10')}. A weight says how much a token wants an expert, not how large that expert's "
        "output is for it, and the layer's output changes by the product. With only each expert's mean energy the "
        f"loss is {more('static:budget=10')} ({apart}); with the true energies it would be "
        f"{more('oracle:budget=10')}. The tasks' prompts are alike, so their unions are small: rules that take a "
        "union (`oea`, `topk`) fetch fewer experts on the tasks than a fixed budget does, and the task accuracies are "
        "not at equal fetched experts."
    )


def contrast(rows: list[Row]) -> str:
    """The same rules on the model with equal loads, which is not shipped."""
    equal = {r["policy"]: r for r in of_model(rows, EQUAL_LOADS) if r["bench"] == "quality"}
    losses = [
        f"{name} {increase(equal[policy]):.2f}"
        for name, policy in (
            ("BASE", "base:budget=10"),
            ("mean energies", "static:budget=10"),
            ("squared weights", "squared:budget=10"),
            ("router mass", "router_mass:budget=10"),
            ("true energies", "oracle:budget=10"),
        )
    ]
    return (
        "The embedded model was trained towards unequal expert loads, as large models have. The skew was chosen so "
        "that the predictor retains .96 of the energy at 10 experts (model card: "
        "`src/moebudget/demo/model/README.md`). A model of the same size with equal loads fetches "
        f"{equal['native']['fetched']:.1f} experts and retains {equal['base:budget=10']['retained_energy']:.3f}; "
        f"on it, 10 experts lose: {', '.join(losses)}. Measure your own model."
    )
