"""Charts of quality: against fetched experts, against time, and ranked where the counts are equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moebudget.analyse.show import TITLES
from moebudget.evaluate.report import pm
from moebudget.report.rows import Group, Row, above, family, is_bound, of
from moebudget.report.speed import rises
from moebudget.report.style import ACCENT, BOUND, INK, MUTED, Chart, colour, log_scale, panel, spread_labels

NEAR = 0.5  # experts: closer counts than this are called equal
FASTER = 1.3  # the title of the chart over time names the best policy that is so many times faster
MOST_LABELLED = 9  # families that get a colour and a name in a scatter plot
WIDE = 10  # points: task intervals beyond this allow no finding
MOST_RANKED = 2  # rankings of one group
LOSS = "loss above the unchanged model, nats a token"
EXPERTS = "distinct experts fetched a layer and step"
HEADS = ("method", "policy", "experts", "loss above dense", "tasks correct, %", "experts on tasks")
USUAL = ("base", "topk", "plain top-k", "oea", "oea, simplified", "static", "mean energy")
NAMES = {
    "quality": "policies", "methods": "all methods", "compare": "comparison",
    "spread": "budgets spread over the layers", "spread_tasks": "spread budgets on tasks",
    "spread_sizes": "spread budgets at another batch size", "spread_domains": "spread budgets of another domain",
}  # fmt: skip
Value = Callable[[Row], Any]


def charts(group: Group, rows: Sequence[Row]) -> list[Chart]:
    """What is worth drawing of a group: scatter plots if counts differ, a ranking at each count that many share."""
    found = []
    counts = [row["fetched"] for row in group.others]
    if max(counts) - min(counts) > 2 * NEAR:
        found.append(_against_experts(group))
        if group.with_tasks:
            found.append(_tasks(group))
        line = time_line(group, rows)
        if line is not None:
            found.append(_against_time(group, line))
    fullest = sorted(shared_counts(group.others, 4), key=lambda pair: -len(pair[1]))[:MOST_RANKED]
    return found + [_ranking(group, centre, mine) for centre, mine in sorted(fullest, key=lambda pair: pair[0])]


def shared_counts(rows: Sequence[Row], least: int) -> list[tuple[float, list[Row]]]:
    """(count, rows within NEAR of it) for the counts that at least `least` families share; no row stands twice."""
    left, found = list(rows), []
    while left:
        near = [[r for r in left if abs(r["fetched"] - c["fetched"]) <= NEAR] for c in left]
        mine, centre = max(
            zip(near, left, strict=True), key=lambda pair: (len(set(map(family, pair[0]))), -pair[1]["fetched"])
        )
        if len({family(row) for row in mine}) < least:
            break
        found.append((float(centre["fetched"]), sorted(mine, key=above)))
        left = [row for row in left if row not in mine]
    return sorted(found, key=lambda pair: pair[0])


def time_line(group: Group, rows: Sequence[Row]) -> Row | None:
    """A line of step time for this batch size on which experts matter: of the same model if there is one, else of one
    whose union with trained weights is known, else the newest.
    """
    lines = [r for r in (*of(rows, "decode_fit"), *of(rows, "diagnose")) if r["B"] == group.batch and rises(r)]
    return max(
        lines,
        key=lambda r: (r["model"] == group.model, r.get("at_union", 0) != r.get("native_union", 0), r["date"]),
        default=None,
    )


def step_ms(group: Group, line: Row, fetched: float) -> float:
    """Time of a step on the line: at this count for the same model, else at the same share of the native union."""
    if line["model"] != group.model:
        fetched *= (line.get("at_union") or line["native_union"]) / group.dense_fetched
    return float(line["a_ms"] + line["b_ms"] * fetched)


def _half(row: Row) -> Any:
    return row["nll_delta_ci95"]


def _draw(axis: Any, rows: Sequence[Row], x: Value, y: Value, half: Value, sign: int) -> str:
    """One line a family, named at its right end; of many families only the best and the usual ones are named."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=x):
        lines.setdefault(family(row), []).append(row)
    named = set(lines)
    if len(lines) > MOST_LABELLED:
        named = _frontier(rows, x, lambda row: sign * y(row)) | {name for name in lines if name.lower() in USUAL}
    labels, position = [], 0
    for name, mine in sorted(lines.items(), key=lambda pair: (pair[0] in named, pair[0])):
        tone = colour(name, position) if name in named else BOUND
        if name in named:
            position += tone not in (ACCENT, BOUND)
            labels.append((x(mine[-1]), y(mine[-1]), name, tone))
        axis.errorbar(
            [x(row) for row in mine], [y(row) for row in mine], [half(row) or 0 for row in mine],
            fmt="o-" if len(mine) > 1 and name in named else "o", color=tone, label=name,
            alpha=1 if name in named else 0.45, zorder=3 if name in named else 2,
        )  # fmt: skip
    axis.margins(x=0.04)
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + 0.3 * (right - left))  # room for the names
    spread_labels(axis, labels, [(x(row), y(row)) for row in rows])
    return "" if len(named) == len(lines) else " Grey dots: methods that others beat in both; the table names them."


def _frontier(rows: Sequence[Row], x: Value, y: Value) -> set[str]:
    """Families with a point that no other one beats in both numbers, within NEAR experts."""
    return {family(r) for r in rows if not any(x(o) <= x(r) + NEAR and y(o) < y(r) for o in rows if not is_bound(o))}


def _against_experts(group: Group) -> Chart:
    figure, axis = panel(EXPERTS, LOSS, 4.6)
    values = [above(row) for row in group.others]
    if not log_scale(axis, values):
        axis.set_ylim(min(0, *values), max(values) * 1.08)
    note = _draw(axis, group.others, lambda row: row["fetched"], above, _half, 1)
    text = f" The unchanged model fetches {group.dense_fetched:.1f} experts on this text and loses nothing.{note}"
    name = f"{_name(group)}-loss"
    return Chart(name, _loss_title(group), _measured(group) + text, figure, HEADS, _cells(group.others))


def _tasks(group: Group) -> Chart:
    figure, axis = panel(f"{EXPERTS}, on the tasks", "tasks correct, %", 4.6)
    dense = next((row for row in group.rows if row["policy"] == "dense" and row["task_avg"] is not None), None)
    shown = [row for row in group.others if row["task_avg"] is not None and row["task_fetched"] is not None]
    if dense is not None:
        axis.axhline(dense["task_avg"], color=INK, linewidth=1, linestyle=":")
        axis.annotate(
            "unchanged model",
            (0, dense["task_avg"]), xycoords=("axes fraction", "data"), xytext=(6, 4), textcoords="offset points",
            color=INK, fontsize=9,
        )  # fmt: skip
    note = _draw(axis, shown, lambda row: row["task_fetched"], lambda r: r["task_avg"], lambda r: r["task_ci95"], -1)
    text = _measured(group) + note
    if dense is not None:
        text += f" The unchanged model answers {dense['task_avg']:.1f} % at {dense['task_fetched']:.1f} experts."
    return Chart(f"{_name(group)}-tasks", _task_title(shown, dense), text, figure, HEADS, _cells(shown))


def _against_time(group: Group, line: Row) -> Chart:
    figure, axis = panel("time of a decode step, ms (by the fitted line)", LOSS, 4.6)
    log_scale(axis, [above(row) for row in group.others])

    def x(row: Row) -> float:
        return step_ms(group, line, row["fetched"])

    note = _draw(axis, group.others, x, above, _half, 1)
    whole = step_ms(group, line, group.dense_fetched)
    fast = [row for row in group.others if not is_bound(row) and whole / x(row) >= FASTER]
    title = f"No policy here makes a step {FASTER} times faster than the unchanged model's {whole:.2f} ms"
    if fast:
        best = min(fast, key=above)
        loss = pm(above(best), best["nll_delta_ci95"], 2)
        title = f"A step {whole / x(best):.2f} times faster costs {loss} nats a token ({family(best)})"
    other = f", at the share of its native union that the policy fetches of {group.model}'s"
    text = (
        f"Not a measurement of these policies: the step time of {line['model']} on {line['device']}, {line['B']} "
        f"rows, by its line {line['a_ms']:.2f} ms + {line['b_ms']:.4f} ms an expert a layer (R² {line['r2']:.3f})"
        f"{'' if line['model'] == group.model else other}. The quality is {group.model}'s. The unchanged model takes "
        f"{whole:.2f} ms there. A method's own routing is in the line only for the policy that was timed.{note}"
    )
    cells = tuple((family(r), r["policy"], f"{x(r):.3f}", pm(above(r), _half(r), 4)) for r in group.others)
    heads = ("method", "policy", "ms a step", "loss above dense")
    return Chart(f"{_name(group)}-time", title, text, figure, heads, cells)


def _ranking(group: Group, centre: float, rows: list[Row]) -> Chart:
    figure, axis = panel(LOSS, "", 1.0 + 0.26 * len(rows))
    names = [family(row) if row.get("method") else row["policy"] for row in rows]
    for place, row in enumerate(rows):
        tone = ACCENT if row["policy"].startswith("base:") else BOUND if is_bound(row) else MUTED
        axis.errorbar(above(row), place, xerr=_half(row) or 0, fmt="o", color=tone, label=names[place])
        axis.annotate(
            f"{above(row):.3f}", (above(row) + (_half(row) or 0), place), xytext=(7, 0), textcoords="offset points",
            va="center", fontsize=9,
        )  # fmt: skip
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    log_scale(axis, [above(row) for row in rows], "x")
    axis.margins(x=0.12)
    text = _measured(group) + f" Every policy here fetches within {NEAR} of {centre:.1f} experts a layer and step."
    title = f"At about {centre:.1f} experts: {_best(rows)}"
    return Chart(f"{_name(group)}-at-{centre:.1f}", title, text, figure, HEADS, _cells(rows))


def _best(rows: Sequence[Row]) -> str:
    """Who loses least among rows at one count, and how many intervals reach as low; the bound aside."""
    ordered = sorted(rows, key=above)
    first, *rest = [r for r in ordered if not is_bound(r)] or ordered
    name = family(first) if first.get("method") else first["policy"]
    loss = f"{name} loses least, {pm(above(first), _half(first), 2)} nats a token"
    close = sum(above(r) - (_half(r) or 0) <= above(first) + (_half(first) or 0) for r in rest)
    if not close or not _half(first):
        return loss
    return f"{loss}; {close} more interval{' reaches' if close == 1 else 's reach'} as low"


def _loss_title(group: Group) -> str:
    shared = shared_counts(group.others, 3)
    if shared:
        centre, rows = shared[0]
        return f"At about {centre:.0f} of {group.dense_fetched:.0f} experts: {_best(rows)}"
    row = min(group.others, key=lambda row: row["fetched"])
    down = f"Down from {group.dense_fetched:.0f} to {row['fetched']:.1f} experts"
    return f"{down}, {row['policy']} loses {pm(above(row), _half(row), 2)} nats a token"


def _task_title(rows: Sequence[Row], dense: Row | None) -> str:
    if dense is None:
        return f"Tasks correct: {min(r['task_avg'] for r in rows):.0f} to {max(r['task_avg'] for r in rows):.0f} %"
    if any(row["task_ci95"] is None or row["task_ci95"] > WIDE for row in (dense, *rows)):
        return f"Too few task items to tell policies apart: intervals of more than ± {WIDE} points"
    floor = dense["task_avg"] - dense["task_ci95"]
    reaching = [r for r in rows if r["task_avg"] + r["task_ci95"] >= floor and not is_bound(r)]
    whole = f"{pm(dense['task_avg'], dense['task_ci95'], 0)} %"
    if not reaching:
        return f"No policy's interval reaches the unchanged model's {whole} of the tasks"
    row = min(reaching, key=lambda row: (round(row["task_fetched"] / NEAR), -row["task_avg"]))
    return (
        f"With {row['task_fetched']:.1f} of {dense['task_fetched']:.1f} experts {family(row)} answers "
        f"{pm(row['task_avg'], row['task_ci95'], 0)} % of the tasks, the unchanged model {whole}"
    )


def _measured(group: Group) -> str:
    row = group.rows[0]
    tasks = f" and {row['items']:,} task items" if row["items"] else ""
    study = TITLES.get(group.bench, "")
    about = f"{study[0].upper()}{study[1:]}. " if study else ""
    text = f"{about}{group.model}, {group.batch} rows a step, decode mode, {group.tokens:,} held-out tokens"
    text += f"{tasks} a policy"
    if not any(map(_half, group.others)):
        return f"{text}; too few sequences for intervals of the loss."
    return f"{text}; bars are 95 % intervals, for the loss paired with the unchanged model."


def _cells(rows: Sequence[Row]) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            family(r), r["policy"], f"{r['fetched']:.2f}", pm(above(r), _half(r), 4),
            "" if r["task_avg"] is None else pm(r["task_avg"], r["task_ci95"], 1),
            "" if r["task_fetched"] is None else f"{r['task_fetched']:.2f}",
        )
        for r in sorted(rows, key=lambda row: (row["fetched"], above(row)))
    )  # fmt: skip


def _name(group: Group) -> str:
    model = "".join(c if c.isalnum() else "-" for c in group.model).strip("-").lower()
    return f"{group.bench}-{model}-{group.batch}-{group.tokens}".replace("_", "-")
