"""Tables of docs/results/spread.md and spread-large.md, from the rows of `study_spread` and `study_pieces`."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from experiments.tables.tables import Blocks, Row, increase, loss, of_model, origin, table, tasks
from moebudget.demo.run import NAME
from moebudget.evaluate.quality import pm

SMALL_PAGE = "docs/results/spread.md"
LARGE_PAGE = "docs/results/spread-large.md"
SMALL = {"": NAME, "equal-": "equal-loads-8m"}  # models by prefix of the blocks
LARGE = {"one-": "qwen3-moe-80m-seed1", "two-": "qwen3-moe-80m-seed2", "first-": "qwen3-moe-80m"}
TRAININGS = {"82M, one": LARGE["one-"], "82M, two": LARGE["two-"], "82M, the first": LARGE["first-"]}

ALLOCATED = (
    "spread", "spread, native denominator", "spread, mean direction", "price", "price, native denominator",
    "price, mean direction",
)  # fmt: skip
RULES = (
    "BASE", "BASE, geometric", "BASE, mean direction", "BASE, relative", "BASE, geometric, relative", *ALLOCATED,
    "mean energies", "true energies (bound)",
)  # fmt: skip
LOSS = "loss increase over native"


def blocks(quality: list[Row], analysis: list[Row]) -> Blocks:
    """The blocks of the two pages."""
    trainings = {name: of_model(quality, model) for name, model in TRAININGS.items()}
    return {
        **{(SMALL_PAGE, name): text for name, text in model_blocks(quality, SMALL).items()},
        **{(LARGE_PAGE, name): text for name, text in model_blocks(quality, LARGE).items()},
        (SMALL_PAGE, "trainings-table"): trainings_table(trainings),
        (SMALL_PAGE, "hold-table"): hold_table([r for r in analysis if r["bench"] == "hold"]),
    }


def model_blocks(quality: list[Row], models: dict[str, str]) -> dict[str, str]:
    """Block -> text, for models by prefix; a table without rows is left out."""
    texts = {}
    for prefix, model in models.items():
        rows = of_model(quality, model)
        for block, make in TABLES.items():
            bench = BENCHES.get(block, f"spread_{block.removesuffix('-table')}")
            if measured := newest(rows, bench):
                texts[prefix + block] = make(measured)
        singles = [r for r in rows if r["bench"] == "pieces2"]
        if singles:
            texts[prefix + "singles-table"] = singles_table(singles)
    return texts


def newest(rows: list[Row], bench: str) -> list[Row]:
    """The rows of a study at its last commit, of sketches of each rank, whatever the number of runs."""
    measured = [r for r in rows if r["bench"] == bench]
    last = {r.get("rank"): r["commit"] for r in measured}
    return [r for r in measured if r["commit"] == last[r.get("rank")]]


def counted(row: Row) -> str:
    """Loss increase over native, and the experts fetched if they are not the target's within .05."""
    missed = abs(row["fetched"] - row["target"]) >= 0.05
    return loss(row) + (f" (at {row['fetched']:.1f})" if missed else "")


def experts_at(rows: list[Row], target: float) -> float | None:
    """Experts fetched at which a rule's loss falls to a target, linear between its rows; None outside them."""
    points = sorted((r["fetched"], increase(r)) for r in rows)
    for (low, more), (high, less) in pairwise(points):
        if less <= target <= more and more > less:
            return float(low + (more - target) / (more - less) * (high - low))
    return None


def loss_at(rows: list[Row], count: float) -> float | None:
    """A rule's loss at a number of fetched experts, linear between its rows; None outside them."""
    points = sorted((r["fetched"], increase(r)) for r in rows)
    for (low, more), (high, less) in pairwise(points):
        if low <= count <= high and low < high:
            return float(more + (count - low) / (high - low) * (less - more))
    return None


def shares(by: dict[tuple[str, int], Row], target: int) -> str:
    """The losses of the other rules that fetch about the target, over that of BASE."""
    base = increase(by["BASE", target])
    others = {rule: by[rule, target] for rule in RULES[1:] if (rule, target) in by}
    parts = [f"{rule} {increase(r) / base:.2f}" for rule, r in others.items() if abs(r["fetched"] - target) < 0.5]
    return f"at {target} experts per layer: {'; '.join(parts)}"


def targets_table(rows: list[Row]) -> str:
    """Loss by rule and average, the experts of equal loss, the losses over BASE's, and rules without a budget."""
    native = next(r for r in rows if r["policy"] == "native")
    by = {(r["method"], r["target"]): r for r in rows}
    targets = sorted({r["target"] for r in rows if r["target"]})
    cells = []
    for rule in RULES:
        measured = [by[rule, m] for m in targets if (rule, m) in by]
        if not measured:
            continue
        equal = experts_at(measured, increase(by["BASE", 16]))
        cells.append([rule, *(counted(by[rule, m]) if (rule, m) in by else "" for m in targets)])
        cells[-1].append("16.0" if rule == "BASE" else "" if equal is None else f"{equal:.1f}")
    ratios = [f"Loss over BASE's {shares(by, m)}." for m in (10, 16) if ("BASE", m) in by]
    return "\n\n".join(
        [
            f"{native['model']}, batch {native['B']}, decode mode, {native['tokens']:,} held-out tokens per row. "
            f"Native routing fetches {native['fetched']:.1f} experts per layer per step (loss {native['nll']:.3f}). "
            "The columns are experts fetched per layer on average; the cells are loss increases over native in nats "
            "per token, ± half of a 95 % interval. The last column is the number of experts at which a rule has the "
            "loss of BASE at 16.",
            table(["rule", *map(str, targets), "as BASE at 16"], cells),
            *ratios,
            *unions_table(rows),
            origin(native),
        ]
    )


def unions_table(rows: list[Row]) -> list[str]:
    """Rules without a budget, beside other rules at equal fetched experts."""
    unions = [r for r in rows if not r["target"] and r["policy"] != "native"]
    others = ("BASE", "BASE, mean direction", "spread", "spread, mean direction")
    cells = []
    for r in unions:
        cells.append([r["method"], f"`{r['policy']}`", f"{r['fetched']:.1f}", loss(r)])
        for rule in others:
            equal = loss_at([x for x in rows if x["method"] == rule], r["fetched"])
            cells[-1].append("" if equal is None else f"{equal:.3f}")
    heads = ["rule", "policy", "experts fetched", LOSS, *(f"{rule} at equal experts" for rule in others)]
    return [table(heads, cells, left=2)] if cells else []


def pieces_table(rows: list[Row]) -> str:
    """At 10 experts: every rule and every part left out or added, with agreement and retained energy."""
    cells = [
        [r["method"], f"`{r['policy']}`", f"{r['fetched']:.2f}", loss(r),
         pm(r["agreement"], r["agreement_ci95"], 1), f"{r['retained_energy']:.3f}"]
        for r in sorted((r for r in rows if r["target"] == 10), key=increase)
    ]  # fmt: skip
    heads = ["rule", "policy", "experts fetched", LOSS, "same token, %", "retained energy"]
    return "\n\n".join([table(heads, cells, left=2), origin(rows[0])])


def tasks_table(rows: list[Row]) -> str:
    """Task accuracy, one row per rule."""
    cells = [[r["method"], f"`{r['policy']}`", f"{r['task_fetched']:.1f}", tasks(r)] for r in rows]
    heads = ["rule", "policy", "experts fetched on tasks", "tasks, %"]
    return "\n\n".join([f"{rows[0]['items']:,} items.", table(heads, cells, left=2), origin(rows[0])])


def pivot(rows: list[Row], label: Callable[[Row], str], column: Callable[[Row], str], head: str) -> str:
    """Loss increase over native, one line per label and one column per value, both in the order of the rows."""
    measured = [r for r in rows if r["target"]]
    columns = list(dict.fromkeys(map(column, measured)))
    by = {(label(r), column(r)): counted(r) for r in measured}
    cells = [[name, *(by.get((name, c), "") for c in columns)] for name in dict.fromkeys(map(label, measured))]
    return "\n\n".join([table([head, *columns], cells), origin(rows[0])])


def sizes_table(rows: list[Row]) -> str:
    """Loss by batch size."""

    def label(r: Row) -> str:
        at_size = r["method"] in ALLOCATED and r["allocated_at"] == r["B"]
        return r["method"] + (", allocated at that size" if at_size else "")

    ordered = sorted(rows, key=lambda r: r["B"])
    return pivot(ordered, label, lambda r: f"batch {r['B']}" + f", at {r['target']}" * (r["target"] != 10), "rule")


def domains_table(rows: list[Row]) -> str:
    """Loss by the domain of the text."""

    def label(r: Row) -> str:
        return r["method"] + (f", allocated on {r['allocated_on']}" if r["method"] in ALLOCATED else "")

    return pivot(rows, label, lambda r: r["domain"], "rule")


def text_and_tasks(rows: list[Row], rule: Callable[[Row], str], *where: tuple[str, Callable[[Row], str]]) -> str:
    """Loss on the text and accuracy on the tasks at each target; `where` are further columns (head, value)."""
    cells = {}
    for r in rows:
        names = (rule(r), *(value(r) for _, value in where))
        more = counted(r) if r["target"] else "0"
        cells[r["target"], names] = [
            str(r["target"] or ""), names[0], f"`{r['policy']}`", *names[1:], more, f"{r['task_fetched']:.1f}",
            tasks(r),
        ]  # fmt: skip
    heads = ["at", "rule", "policy", *(head for head, _ in where), LOSS, "experts fetched on tasks", "tasks, %"]
    ordered = [cells[key] for key in sorted(cells, key=lambda key: key[0])]
    return table(heads, ordered, left=3 + len(where))


def mixed_table(rows: list[Row]) -> str:
    """Budgets of several allocations; rules without an allocation appear once."""
    where = ("allocated on", lambda r: r["allocated_on"] if r["method"] in ALLOCATED else "")
    return "\n\n".join([text_and_tasks(rows, lambda r: r["method"], where), origin(rows[0])])


def hold_table(rows: list[Row]) -> str:
    """Experts fetched in each quarter of a run, by batch size; the last row of each setting."""
    rows = list({(r["B"], r["policy"]): r for r in rows}.values())
    cells = [
        [str(r["B"]), f"`{r['policy']}`", *(f"{f:.1f}" for f in r["fetched_by_quarter"]), f"{r['nll']:.3f}"]
        for r in rows
    ]
    heads = ["batch", "policy", "first quarter", "second", "third", "fourth", "loss of all"]
    return "\n\n".join([table(heads, cells, left=2), origin(rows[0])])


def singles_table(rows: list[Row]) -> str:
    """Rows of `study_pieces`: the newest of each rule and target, with differences on the same windows."""
    by = {(r["method"], r["target"]): r for r in rows}
    targets = sorted({target for _, target in by})
    cells = []
    for rule in dict.fromkeys(method for method, _ in by):
        cells.append([rule])
        for m in targets:
            r = by.get((rule, m), {})
            cells[-1].append(f"{increase(r):.3f}" if r else "")
            for k in ("over_base", "over_mean_direction"):
                cells[-1].append(f"{r[k]:+.3f} ± {r[f'{k}_ci95']:.3f}" if k in r else "")
        sizes = [
            f"{by[rule, m]['sketches_in_experts']:.1f}"
            for m in targets
            if "sketches_in_experts" in by.get((rule, m), {})
        ]
        cells[-1].append(", ".join(sizes))
    heads = ["rule", *(h for m in targets for h in (f"loss at {m}", "over BASE", "over mean direction"))]
    last = list(by.values())[-1]
    return "\n\n".join(
        [
            f"{last['model']}, batch {last['B']}, decode mode, {last['tokens']:,} held-out tokens per row. Loss "
            "increase over native at that many experts in every layer; differences on the same windows, ± half of a "
            "95 % interval. The last column is the size of the sketches of a step's lost experts, in experts of this "
            "model.",
            table([*heads, "sketches"], cells),
            origin(last),
        ]
    )


def ranked(r: Row) -> str:
    """The rule, with the rank of its sketches."""
    return f"{r['method']} of rank {r['rank']}" if "sketch" in r["method"] else r["method"]


def sketch_table(rows: list[Row]) -> str:
    """Sketches of lost experts with and without an allocation."""
    about = f"Sketches fitted on {rows[0].get('sketched_on', 'text')}; {rows[0]['items']:,} items."
    return "\n\n".join([about, text_and_tasks(rows, ranked), origin(rows[-1])])


def answers_table(rows: list[Row]) -> str:
    """Tasks answered at 10 experts, and the difference to BASE item by item."""
    cells = []
    for method, r in sorted({ranked(r): r for r in rows}.items()):
        over = [f"{r['over_base']:+.1f}", f"{r['over_base_low']:+.1f} to {r['over_base_high']:+.1f}"]
        cells.append([method, tasks(r), *(("", "") if method == "BASE" else over)])
    heads = ["rule", "tasks, %", "over BASE, points", "95 %, same items"]
    return "\n\n".join([f"{rows[0]['items']:,} items.", table(heads, cells), origin(rows[-1])])


def orders_table(rows: list[Row]) -> str:
    """Loss over BASE's if the same windows share batches in other ways."""
    cells = [[ranked(r), *(f"{share:.3f}" for share in r["share_of_base"])] for r in rows]
    heads = ["rule", *(f"batches {i + 1}" for i in range(len(rows[0]["share_of_base"])))]
    return "\n\n".join([f"{rows[0]['windows']} windows.", table(heads, cells), origin(rows[-1])])


def trainings_table(of: dict[str, list[Row]]) -> str:
    """A line per training and text of the allocation: `spread` over BASE, on text and on the tasks."""
    cells = []
    for name, rows in of.items():
        plain = {(r["method"], r["target"]): r for r in newest(rows, "spread")}
        answers = {(r["method"], r["target"]): r for r in newest(rows, "spread_tasks")}
        by_text = {"text": (plain, answers)}
        for r in newest(rows, "spread_mixed"):
            for part in by_text.setdefault(r["allocated_on"], ({}, {})):
                part[r["method"], r["target"]] = r
        for where, (losses, accuracies) in by_text.items():
            cells.append([name, where])
            cells[-1] += [
                f"{increase(losses['spread', m]) / increase(losses['BASE', m]):.2f}" if ("spread", m) in losses else ""
                for m in (10, 16)
            ]
            for m in (10, 16):
                for method in ("BASE", "spread"):
                    r = accuracies.get((method, m))
                    cells[-1].append("" if r is None else tasks(r))
            cells[-1].append(f"{next(iter(accuracies.values()))['items']:,}")
    heads = ["training", "allocated on", "loss over BASE's at 10", "at 16"]
    heads += [f"tasks, %: {method} at {m}" for m in (10, 16) for method in ("BASE", "spread")]
    return table([*heads, "items"], cells, left=2)


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "spread-table": targets_table,
    "pieces-table": pieces_table,
    "tasks-table": tasks_table,
    "sizes-table": sizes_table,
    "domains-table": domains_table,
    "mixed-table": mixed_table,
    "sketch-table": sketch_table,
    "answers-table": answers_table,
    "orders-table": orders_table,
}  # by block, after the prefix of the model
BENCHES = {"spread-table": "spread", "pieces-table": "spread"}  # of a table, if it is not `spread_` and its name
