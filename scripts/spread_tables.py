"""Tables of `scripts/study_spread.py`, from their rows alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from tables import Row, above, origin, table

from moebudget.evaluate.report import pm

RULES = (
    "BASE", "BASE, half", "BASE, stand-in", "BASE, relative", "BASE, half, relative", "spread", "spread, original",
    "spread, stand-in", "price", "price, original", "price, stand-in", "mean energies", "true energies (bound)",
)  # fmt: skip
ALLOCATED = ("spread", "spread, original", "spread, stand-in", "price", "price, original", "price, stand-in")


def counted(row: Row) -> str:
    """Loss above dense, and the experts fetched where they are not the target's within .05."""
    missed = abs(row["fetched"] - row["target"]) >= 0.05
    return pm(above(row), row["nll_delta_ci95"], 3) + (f" (at {row['fetched']:.1f})" if missed else "")


def reaches(rows: list[Row], loss: float) -> float | None:
    """Experts at which a rule's loss falls to `loss`, linear between its rows; None outside of them."""
    points = sorted((r["fetched"], above(r)) for r in rows)
    for (low, more), (high, less) in pairwise(points):
        if less <= loss <= more and more > less:
            return float(low + (more - loss) / (more - less) * (high - low))
    return None


def at_count(rows: list[Row], count: float) -> float | None:
    """A rule's loss at a number of experts, linear between its rows; None outside of them."""
    points = sorted((r["fetched"], above(r)) for r in rows)
    for (low, more), (high, less) in pairwise(points):
        if low <= count <= high and low < high:
            return float(more + (count - low) / (high - low) * (less - more))
    return None


def shares(by: dict[tuple[str, int], Row], target: int) -> str:
    """What the other rules that fetch about the target lose there, over what BASE loses."""
    base = above(by["BASE", target])
    mine = {rule: by[rule, target] for rule in RULES[1:] if (rule, target) in by}
    parts = [f"{rule} {above(r) / base:.2f}" for rule, r in mine.items() if abs(r["fetched"] - target) < 0.5]
    return f"at {target} experts a layer {'; '.join(parts)}"


def targets_table(rows: list[Row]) -> str:
    """Loss by rule and average, what the first average that BASE has costs the others, and what the numbers say."""
    dense = next(r for r in rows if r["policy"] == "dense")
    by = {(r["method"], r["target"]): r for r in rows}
    targets = sorted({r["target"] for r in rows if r["target"]})
    cells = []
    for rule in RULES:
        mine = [by[rule, m] for m in targets if (rule, m) in by]
        if not mine:
            continue
        equal = reaches(mine, above(by["BASE", 16]))
        cells.append([rule, *(counted(by[rule, m]) if (rule, m) in by else "" for m in targets)])
        cells[-1].append("16.0" if rule == "BASE" else "" if equal is None else f"{equal:.1f}")
    ratios = [f"Over what BASE loses, {shares(by, m)}." for m in (10, 16) if ("BASE", m) in by]
    return "\n\n".join(
        [
            f"{dense['model']}, batch {dense['B']}, decode mode, {dense['tokens']:,} held-out tokens a row; "
            f"unchanged it fetches {dense['fetched']:.1f} experts (loss {dense['nll']:.3f}). Loss above dense, "
            "± half of a 95 % interval, by experts a layer on average; last, the experts at which a rule loses what "
            "BASE loses at 16.",
            table(["rule", *map(str, targets), "as BASE at 16"], cells),
            *ratios,
            *unions_table(rows),
            origin(dense),
        ]
    )


def unions_table(rows: list[Row]) -> list[str]:
    """Rules without a budget at their own counts, beside what others lose there."""
    mine = [r for r in rows if not r["target"] and r["policy"] != "dense"]
    others = ("BASE", "BASE, stand-in", "spread", "spread, stand-in")
    cells = []
    for r in mine:
        cells.append([r["method"], f"`{r['policy']}`", f"{r['fetched']:.1f}", pm(above(r), r["nll_delta_ci95"], 3)])
        for rule in others:
            there = at_count([x for x in rows if x["method"] == rule], r["fetched"])
            cells[-1].append("" if there is None else f"{there:.3f}")
    heads = ["rule", "policy", "experts", "loss above dense", *(f"{rule} there" for rule in others)]
    return [table(heads, cells, left=2)] if cells else []


def pieces_table(rows: list[Row]) -> str:
    """At 10 experts: every rule and every piece left out or added, with agreement and retained energy."""
    cells = [
        [r["method"], f"`{r['policy']}`", f"{r['fetched']:.2f}", pm(above(r), r["nll_delta_ci95"], 3),
         pm(r["agreement"], r["agreement_ci95"], 1), f"{r['retained_energy']:.3f}"]
        for r in sorted((r for r in rows if r["target"] == 10), key=above)
    ]  # fmt: skip
    heads = ["rule", "policy", "experts", "loss above dense", "same token, %", "retained energy"]
    return "\n\n".join([table(heads, cells, left=2), origin(rows[0])])


def tasks_table(rows: list[Row]) -> str:
    cells = [
        [r["method"], f"`{r['policy']}`", f"{r['task_fetched']:.1f}", pm(r["task_avg"], r["task_ci95"], 1)]
        for r in rows
    ]
    heads = ["rule", "policy", "experts on tasks", "tasks, %"]
    return "\n\n".join([f"{rows[0]['items']:,} items.", table(heads, cells, left=2), origin(rows[0])])


def pivot(rows: list[Row], label: Callable[[Row], str], column: Callable[[Row], str], heads: str) -> str:
    """Loss above dense, one line a label and one column a value, both in the order of the rows."""
    mine = [r for r in rows if r["target"]]
    columns = list(dict.fromkeys(map(column, mine)))
    by = {(label(r), column(r)): counted(r) for r in mine}
    cells = [[name, *(by.get((name, c), "") for c in columns)] for name in dict.fromkeys(map(label, mine))]
    return "\n\n".join([table([heads, *columns], cells), origin(rows[0])])


def sizes_table(rows: list[Row]) -> str:
    def label(r: Row) -> str:
        there = r["method"] in ALLOCATED and r["allocated_at"] == r["B"]
        return r["method"] + (", allocated there" if there else "")

    ordered = sorted(rows, key=lambda r: r["B"])
    return pivot(ordered, label, lambda r: f"batch {r['B']}" + f", at {r['target']}" * (r["target"] != 10), "rule")


def domains_table(rows: list[Row]) -> str:
    def label(r: Row) -> str:
        return r["method"] + (f", allocated on {r['allocated_on']}" if r["method"] in ALLOCATED else "")

    return pivot(rows, label, lambda r: r["domain"], "rule")


def text_and_tasks(rows: list[Row], rule: Callable[[Row], str], *where: tuple[str, Callable[[Row], str]]) -> str:
    """Loss on the text and accuracy on the tasks at each target; `where` are further columns (head, value)."""
    cells = {}
    for r in rows:
        names = (rule(r), *(value(r) for _, value in where))
        loss = counted(r) if r["target"] else "0"
        cells[r["target"], names] = [
            str(r["target"] or ""), names[0], f"`{r['policy']}`", *names[1:], loss, f"{r['task_fetched']:.1f}",
            pm(r["task_avg"], r["task_ci95"], 1),
        ]  # fmt: skip
    heads = ["at", "rule", "policy", *(head for head, _ in where), "loss above dense", "experts on tasks", "tasks, %"]
    ordered = [cells[key] for key in sorted(cells, key=lambda key: key[0])]
    return table(heads, ordered, left=3 + len(where))


def mixed_table(rows: list[Row]) -> str:
    """Budgets of several allocations; rules without one stand there once."""
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
    """Rows of `scripts/study_pieces.py`, the newest of each rule and target, with differences on the same windows."""
    by = {(r["method"], r["target"]): r for r in rows}
    targets = sorted({target for _, target in by})
    cells = []
    for rule in dict.fromkeys(method for method, _ in by):
        cells.append([rule])
        for m in targets:
            r = by.get((rule, m), {})
            cells[-1].append(f"{above(r):.3f}" if r else "")
            for k in ("over_base", "over_stand_in"):
                cells[-1].append(f"{r[k]:+.3f} ± {r[f'{k}_ci95']:.3f}" if k in r else "")
        held = [
            f"{by[rule, m]['sketches_in_experts']:.1f}"
            for m in targets
            if "sketches_in_experts" in by.get((rule, m), {})
        ]
        cells[-1].append(", ".join(held))
    heads = ["rule", *(h for m in targets for h in (f"loss at {m}", "over BASE", "over stand-in"))]
    last = list(by.values())[-1]
    return "\n\n".join(
        [
            f"{last['model']}, batch {last['B']}, decode mode, {last['tokens']:,} held-out tokens a row. Loss above "
            "dense at that many experts in every layer; differences on the same windows, ± half of a 95 % interval. "
            "Last, what the sketches of a step's lost experts hold, in experts of this model.",
            table([*heads, "sketches"], cells),
            origin(last),
        ]
    )


def ranked(r: Row) -> str:
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
        cells.append([method, pm(r["task_avg"], r["task_ci95"], 1), *(("", "") if method == "BASE" else over)])
    heads = ["rule", "tasks, %", "over BASE, points", "95 %, same items"]
    return "\n\n".join([f"{rows[0]['items']:,} items.", table(heads, cells), origin(rows[-1])])


def orders_table(rows: list[Row]) -> str:
    """Loss over BASE's when the same windows share batches in other ways."""
    cells = [[ranked(r), *(f"{share:.3f}" for share in r["share_of_base"])] for r in rows]
    heads = ["rule", *(f"batches {i + 1}" for i in range(len(rows[0]["share_of_base"])))]
    return "\n\n".join([f"{rows[0]['windows']} windows.", table(heads, cells), origin(rows[-1])])


def trainings_table(of: dict[str, list[Row]]) -> str:
    """A line a training and text of the allocation: `spread` over BASE, on text and on the tasks."""
    cells = []
    for name, rows in of.items():
        plain = {(r["method"], r["target"]): r for r in newest(rows, "spread")}
        answers = {(r["method"], r["target"]): r for r in newest(rows, "spread_tasks")}
        found = {"text": (plain, answers)}
        for r in newest(rows, "spread_mixed"):
            mine = found.setdefault(r["allocated_on"], ({}, {}))
            for part in mine:
                part[r["method"], r["target"]] = r
        for where, (losses, accuracies) in found.items():
            cells.append([name, where])
            cells[-1] += [
                f"{above(losses['spread', m]) / above(losses['BASE', m]):.2f}" if ("spread", m) in losses else ""
                for m in (10, 16)
            ]
            for m in (10, 16):
                for method in ("BASE", "spread"):
                    r = accuracies.get((method, m))
                    cells[-1].append("" if r is None else pm(r["task_avg"], r["task_ci95"], 1))
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
}  # by place in the page, after the prefix of the model
BENCHES = {"spread-table": "spread", "pieces-table": "spread"}  # of a table, where it is not `spread_` and its name


def newest(rows: list[Row], bench: str) -> list[Row]:
    """The rows of a study at its last commit, of sketches of each rank, whatever the number of runs."""
    mine = [r for r in rows if r["bench"] == bench]
    last = {r.get("rank"): r["commit"] for r in mine}
    return [r for r in mine if r["commit"] == last[r.get("rank")]]


def blocks(of: dict[str, list[Row]]) -> dict[str, str]:
    """Place -> text, for the rows of each model by prefix; a table without rows is left out."""
    found = {}
    for prefix, rows in of.items():
        for place, make in TABLES.items():
            bench = BENCHES.get(place, f"spread_{place.removesuffix('-table')}")
            if mine := newest(rows, bench):
                found[prefix + place] = make(mine)
        singles = [r for r in rows if r["bench"] == "pieces2"]
        if singles:
            found[prefix + "singles-table"] = singles_table(singles)
    return found
