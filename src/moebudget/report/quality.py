"""Charts of quality: against fetched experts, against time, and ranked at equal fetched experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moebudget.evaluate.quality import pm
from moebudget.report.analyses import TITLES
from moebudget.report.rows import Group, Row, above, family, is_bound, of
from moebudget.report.speed import rises
from moebudget.report.style import ACCENT, BOUND, INK, MUTED, Chart, colour, log_scale, panel, spread_labels

NEAR = 0.5  # experts: counts at most this far apart are called equal
FASTER = 1.3  # the chart over time names the best policy that makes a step at least this many times faster
MOST_LABELLED = 9  # families with a colour and a name in a scatter plot
WIDE = 10  # points: wider task intervals do not tell policies apart
MOST_RANKED = 2  # rankings per group
LOSS = "loss increase over native, nats per token"
EXPERTS = "experts fetched per layer per step"
HEADS = (
    "method",
    "policy",
    "experts fetched",
    "loss increase over native",
    "tasks correct, %",
    "experts fetched on tasks",
)
USUAL = ("base", "topk", "plain top-k", "oea", "oea, simplified", "static", "mean energy")
NAMES = {
    "quality": "policies", "methods": "all methods", "compare": "comparison",
    "spread": "allocations", "spread_tasks": "allocations on tasks",
    "spread_sizes": "allocations at another batch size", "spread_domains": "allocations of another domain",
}  # fmt: skip
Value = Callable[[Row], Any]


def charts(group: Group, rows: Sequence[Row]) -> list[Chart]:
    """The charts of a group: scatter plots if counts differ, and rankings at the counts that most policies share."""
    made = []
    counts = [row["fetched"] for row in group.restricted]
    if max(counts) - min(counts) > 2 * NEAR:
        made.append(_against_experts(group))
        if group.with_tasks:
            made.append(_tasks(group))
        line = time_line(group, rows)
        if line is not None:
            made.append(_against_time(group, line))
    fullest = sorted(shared_counts(group.restricted, 4), key=lambda pair: -len(pair[1]))[:MOST_RANKED]
    return made + [_ranking(group, centre, near) for centre, near in sorted(fullest, key=lambda pair: pair[0])]


def shared_counts(rows: Sequence[Row], least: int) -> list[tuple[float, list[Row]]]:
    """(count, rows within NEAR of it) for counts that at least `least` families share; each row appears once."""
    left, shared = list(rows), []
    while left:
        near = [[r for r in left if abs(r["fetched"] - c["fetched"]) <= NEAR] for c in left]
        members, centre = max(
            zip(near, left, strict=True), key=lambda pair: (len(set(map(family, pair[0]))), -pair[1]["fetched"])
        )
        if len({family(row) for row in members}) < least:
            break
        shared.append((float(centre["fetched"]), sorted(members, key=above)))
        left = [row for row in left if row not in members]
    return sorted(shared, key=lambda pair: pair[0])


def time_line(group: Group, rows: Sequence[Row]) -> Row | None:
    """A line of step time at this batch size that rises with the experts, or None.

    Of the same model if there is one, else of a model whose union with trained weights is known, else the newest.
    """
    lines = [r for r in (*of(rows, "decode_fit"), *of(rows, "diagnose")) if r["B"] == group.batch and rises(r)]
    return max(
        lines,
        key=lambda r: (r["model"] == group.model, r.get("at_union", 0) != r.get("native_union", 0), r["date"]),
        default=None,
    )


def step_ms(group: Group, line: Row, fetched: float) -> float:
    """Milliseconds per step on the line: at this count for the same model, else at the same share of the union."""
    if line["model"] != group.model:
        fetched *= (line.get("at_union") or line["native_union"]) / group.native_fetched
    return float(line["a_ms"] + line["b_ms"] * fetched)


def _half(row: Row) -> Any:
    return row["nll_delta_ci95"]


def _draw(axis: Any, rows: Sequence[Row], x: Value, y: Value, half: Value, sign: int) -> str:
    """Draw one line per family, named at its right end; of many families only the best and the usual are named."""
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=x):
        lines.setdefault(family(row), []).append(row)
    named = set(lines)
    if len(lines) > MOST_LABELLED:
        named = _frontier(rows, x, lambda row: sign * y(row)) | {name for name in lines if name.lower() in USUAL}
    labels, position = [], 0
    for name, points in sorted(lines.items(), key=lambda pair: (pair[0] in named, pair[0])):
        tone = colour(name, position) if name in named else BOUND
        if name in named:
            position += tone not in (ACCENT, BOUND)
            labels.append((x(points[-1]), y(points[-1]), name, tone))
        axis.errorbar(
            [x(row) for row in points], [y(row) for row in points], [half(row) or 0 for row in points],
            fmt="o-" if len(points) > 1 and name in named else "o", color=tone, label=name,
            alpha=1 if name in named else 0.45, zorder=3 if name in named else 2,
        )  # fmt: skip
    axis.margins(x=0.04)
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + 0.3 * (right - left))  # room for the names
    spread_labels(axis, labels, [(x(row), y(row)) for row in rows])
    return (
        ""
        if len(named) == len(lines)
        else " Grey dots: methods that another one beats in both numbers; the table names them."
    )


def _frontier(rows: Sequence[Row], x: Value, y: Value) -> set[str]:
    """Families with a point that no other point beats in both numbers, within NEAR experts."""
    return {family(r) for r in rows if not any(x(o) <= x(r) + NEAR and y(o) < y(r) for o in rows if not is_bound(o))}


def _against_experts(group: Group) -> Chart:
    figure, axis = panel(EXPERTS, LOSS, 4.6)
    values = [above(row) for row in group.restricted]
    if not log_scale(axis, values):
        axis.set_ylim(min(0, *values), max(values) * 1.08)
    note = _draw(axis, group.restricted, lambda row: row["fetched"], above, _half, 1)
    text = f" Native routing fetches {group.native_fetched:.1f} experts on this text.{note}"
    name = f"{_name(group)}-loss"
    return Chart(name, _loss_title(group), _measured(group) + text, figure, HEADS, _cells(group.restricted))


def _tasks(group: Group) -> Chart:
    figure, axis = panel(f"{EXPERTS}, on the tasks", "tasks correct, %", 4.6)
    native = next((row for row in group.rows if row["policy"] == "native" and row["task_avg"] is not None), None)
    shown = [row for row in group.restricted if row["task_avg"] is not None and row["task_fetched"] is not None]
    if native is not None:
        axis.axhline(native["task_avg"], color=INK, linewidth=1, linestyle=":")
        axis.annotate(
            "native",
            (0, native["task_avg"]), xycoords=("axes fraction", "data"), xytext=(6, 4), textcoords="offset points",
            color=INK, fontsize=9,
        )  # fmt: skip
    note = _draw(axis, shown, lambda row: row["task_fetched"], lambda r: r["task_avg"], lambda r: r["task_ci95"], -1)
    text = _measured(group) + note
    if native is not None:
        text += f" Native routing answers {native['task_avg']:.1f} % at {native['task_fetched']:.1f} experts."
    return Chart(f"{_name(group)}-tasks", _task_title(shown, native), text, figure, HEADS, _cells(shown))


def _against_time(group: Group, line: Row) -> Chart:
    figure, axis = panel("milliseconds per decode step (by the fitted line)", LOSS, 4.6)
    log_scale(axis, [above(row) for row in group.restricted])

    def x(row: Row) -> float:
        return step_ms(group, line, row["fetched"])

    note = _draw(axis, group.restricted, x, above, _half, 1)
    whole = step_ms(group, line, group.native_fetched)
    fast = [row for row in group.restricted if not is_bound(row) and whole / x(row) >= FASTER]
    title = f"No policy here makes a step {FASTER} times faster than the {whole:.2f} ms of native routing"
    if fast:
        best = min(fast, key=above)
        loss = pm(above(best), best["nll_delta_ci95"], 2)
        title = f"A step {whole / x(best):.2f} times faster costs {loss} nats per token ({family(best)})"
    scaled = f", read at the share of the native union that the policy fetches in {group.model}"
    text = (
        f"Not a measurement of these policies: the step time of {line['model']} on {line['device']}, {line['B']} "
        f"rows, by its line {line['a_ms']:.2f} ms + {line['b_ms']:.4f} ms per expert per layer (R² {line['r2']:.3f})"
        f"{'' if line['model'] == group.model else scaled}. The quality is that of {group.model}. Native routing "
        f"takes {whole:.2f} ms by this line. The line includes the time of choosing experts only for the policy "
        f"timed.{note}"
    )
    cells = tuple((family(r), r["policy"], f"{x(r):.3f}", pm(above(r), _half(r), 4)) for r in group.restricted)
    heads = ("method", "policy", "ms per step", "loss increase over native")
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
    text = _measured(group) + f" Every policy here fetches within {NEAR} of {centre:.1f} experts per layer per step."
    title = f"At about {centre:.1f} experts: {_best(rows)}"
    return Chart(f"{_name(group)}-at-{centre:.1f}", title, text, figure, HEADS, _cells(rows))


def _best(rows: Sequence[Row]) -> str:
    """Words: the policy that loses least, the bound aside, and how many other intervals overlap with its interval."""
    ordered = sorted(rows, key=above)
    first, *rest = [r for r in ordered if not is_bound(r)] or ordered
    name = family(first) if first.get("method") else first["policy"]
    loss = f"{name} loses least, {pm(above(first), _half(first), 2)} nats per token"
    close = sum(above(r) - (_half(r) or 0) <= above(first) + (_half(first) or 0) for r in rest)
    if not close or not _half(first):
        return loss
    return f"{loss}; {close} other interval{' overlaps' if close == 1 else 's overlap'} with it"


def _loss_title(group: Group) -> str:
    shared = shared_counts(group.restricted, 3)
    if shared:
        centre, rows = shared[0]
        return f"At about {centre:.0f} of {group.native_fetched:.0f} experts: {_best(rows)}"
    row = min(group.restricted, key=lambda row: row["fetched"])
    down = f"Down from {group.native_fetched:.0f} to {row['fetched']:.1f} experts"
    return f"{down}, {row['policy']} loses {pm(above(row), _half(row), 2)} nats per token"


def _task_title(rows: Sequence[Row], native: Row | None) -> str:
    if native is None:
        return f"Tasks correct: {min(r['task_avg'] for r in rows):.0f} to {max(r['task_avg'] for r in rows):.0f} %"
    if any(row["task_ci95"] is None or row["task_ci95"] > WIDE for row in (native, *rows)):
        return f"Too few task items to tell policies apart: intervals above ± {WIDE} points"
    floor = native["task_avg"] - native["task_ci95"]
    reaching = [r for r in rows if r["task_avg"] + r["task_ci95"] >= floor and not is_bound(r)]
    whole = f"{pm(native['task_avg'], native['task_ci95'], 0)} %"
    if not reaching:
        return f"No policy's interval overlaps with the {whole} of the tasks that native routing answers"
    row = min(reaching, key=lambda row: (round(row["task_fetched"] / NEAR), -row["task_avg"]))
    return (
        f"With {row['task_fetched']:.1f} of {native['task_fetched']:.1f} experts, {family(row)} answers "
        f"{pm(row['task_avg'], row['task_ci95'], 0)} % of the tasks, native routing {whole}"
    )


def _measured(group: Group) -> str:
    row = group.rows[0]
    tasks = f" and {row['items']:,} task items" if row["items"] else ""
    study = TITLES.get(group.bench, "")
    about = f"{study[0].upper()}{study[1:]}. " if study else ""
    text = f"{about}{group.model}, {group.batch} rows per step, decode mode, {group.tokens:,} held-out tokens"
    text += f"{tasks} per policy"
    if not any(map(_half, group.restricted)):
        return f"{text}; too few sequences for intervals of the loss."
    return f"{text}; bars are 95 % intervals, those of the loss paired with native routing."


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
