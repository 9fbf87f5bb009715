"""Charts of time: step time against fetched experts, time added by routing, copies from the host."""

from __future__ import annotations

from collections.abc import Sequence

from moebudget.report.rows import Row, of
from moebudget.report.style import ACCENT, COLOURS, INK, MUTED, Chart, panel, spread_labels

EXPLAINED = 0.9  # least R² of a line that shows the price of an expert


def latency(rows: Sequence[Row]) -> list[Chart]:
    """Measured step times with a line through them: `bench decode` by model and batch size, and `diagnose`."""
    made = []
    keys = dict.fromkeys((r["model"], r["B"], r["weights"], r["device"]) for r in of(rows, "decode"))
    for key in keys:
        model, batch, weights, device = key
        timed = _newest([r for r in of(rows, "decode") if (r["model"], r["B"], r["weights"], r["device"]) == key])
        timed = [r for r in timed if r["fetched"] is not None]
        lines = [r for r in of(rows, "decode_fit") if (r["model"], r["B"], r["weights"], r["device"]) == key]
        line = max(lines, key=lambda r: r["date"], default=None)
        if not timed or line is None:
            continue
        points = [(r["fetched"], r["tpot_ms"]) for r in timed]
        at, union = line["at_union"], line["native_union"]
        text = (
            f"{model} with {weights} weights in vLLM, {batch} rows, {device}. Points are measured settings of one "
            f"engine; the line is fitted to them. The right-most point is native routing, which fetches "
            f"{union:.1f} experts with these weights."
        )
        if abs(at - union) > 0.5:
            text += f" Trained weights fetch {at:.1f} (published); speedups are relative to that point of the line."
        low = min(points)[0]
        gain = (line["a_ms"] + line["b_ms"] * at) / (line["a_ms"] + line["b_ms"] * low)
        price = f"Each expert per layer costs {1e3 * line['b_ms']:.0f} µs per step"
        title = f"{price}: {low:.0f} instead of {at:.0f} experts is {gain:.2f} times faster"
        if not rises(line):
            title = f"Fewer experts do not make this step faster: {1e3 * line['b_ms']:.1f} µs per expert per layer"
        marks = [(union, "native, these weights")]
        marks += [(at, "native, trained weights")] if abs(at - union) > 0.5 else []
        made.append(_line(f"latency-{model}-{batch}", title, text, points, line, marks))
    for number, row in enumerate(_newest_of(of(rows, "diagnose"), "model", "B", "engine", "device"), 1):
        points = [(p[0], p[1]) for p in row["points"]]
        if len(points) < 2:
            continue
        title = f"{row['answer'].capitalize()}: {row['model']}, {row['B']:.0f} rows, {row['engine']}"
        marks = [(row["union"], "native")] if isinstance(row.get("union"), int | float) else []
        line = row if "a_ms" in row else None
        text = f"{row.get('title', '')} On {row['device']}. {row['reason']}."
        made.append(_line(f"diagnose-{number}", title, text.strip(), points, line, marks))
    return made


def rises(line: Row) -> bool:
    """Whether a row holds a line of step time that rises with the experts and explains most of the variance."""
    return "a_ms" in line and bool(line["b_ms"] > 0 and line["r2"] >= EXPLAINED)


def _newest(rows: Sequence[Row]) -> list[Row]:
    return _newest_of(rows, "policy", "M")


def _newest_of(rows: Sequence[Row], *keys: str) -> list[Row]:
    """The newest of the rows that agree in these keys."""
    newest = {tuple(row.get(key) for key in keys): row for row in sorted(rows, key=lambda row: row["date"])}
    return list(newest.values())


def _line(
    name: str,
    title: str,
    text: str,
    points: Sequence[tuple[float, float]],
    line: Row | None,
    marks: Sequence[tuple[float, str]],
) -> Chart:
    figure, axis = panel("experts fetched per layer per step", "milliseconds per decode step")
    axis.plot(*zip(*points, strict=True), "o", color=ACCENT, label="measured", zorder=3)
    right = max([x for x, _ in points] + [x for x, _ in marks]) * 1.06
    axis.set_xlim(0, right)
    axis.set_ylim(0, max(y for _, y in points) * 1.15)
    if line is not None:
        ends = [line["a_ms"], line["a_ms"] + line["b_ms"] * right]
        axis.plot([0, right], ends, color=MUTED, linewidth=1.2, label="line")
        axis.annotate(
            f"{line['a_ms']:.2f} ms + {line['b_ms']:.4f} ms per expert, R² {line['r2']:.3f}",
            (0.02, 0.95), xycoords="axes fraction", va="top", color=MUTED,
        )  # fmt: skip
    for x, label in marks:
        axis.axvline(x, color=INK, linewidth=1, linestyle=":")
        axis.annotate(
            f"{label}: {x:.1f}", (x, 0.04), xycoords=("data", "axes fraction"), xytext=(-5, 0),
            textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip
    cells = tuple((f"{x:.2f}", f"{y:.3f}") for x, y in sorted(points))
    return Chart(_file(name), title, text, figure, ("experts fetched per layer", "ms per step"), cells)


def routing(rows: Sequence[Row]) -> list[Chart]:
    """Time that a policy adds to a layer's router, against rows per step: fused kernels and the torch form."""
    timed = _newest_of(of(rows, "routing"), "model", "policy", "T", "device")
    if not timed:
        return []
    figure, axis = panel("rows per decode step", "µs added per layer", 4.6)
    shown = [r for r in timed if r["policy"].startswith("base:")] or timed
    sizes = {key: {r["T"] for r in shown if (r["model"], r["policy"]) == key} for key in map(_key, shown)}
    # If a model has several policies, draw the one with most batch sizes.
    drawn = {model: max((k for k in sizes if k[0] == model), key=lambda k: len(sizes[k])) for model, _ in sizes}
    labels = []
    for place, (model, key) in enumerate(drawn.items()):
        line = sorted((r for r in shown if _key(r) == key), key=lambda r: r["T"])
        shade = COLOURS[place % len(COLOURS)]
        rows_per_step = [r["T"] for r in line]
        axis.plot(rows_per_step, [r["us_added"] for r in line], "o-", color=shade, label=f"{model} fused")
        axis.plot(rows_per_step, [_torch(r) for r in line], "o--", color=shade, linewidth=1, label=f"{model} torch")
        labels.append((rows_per_step[-1], line[-1]["us_added"], model, shade))
    axis.set(xscale="log", yscale="log", ylim=(1, None))
    low = min(_torch(r) for r in shown)
    axis.annotate("in torch (dashed)", (1, low), xytext=(0, -14), textcoords="offset points", color=MUTED, fontsize=9)
    axis.annotate("fused kernels", (1, 1.5), color=MUTED, fontsize=9)
    ticks = sorted({r["T"] for r in shown})
    axis.set_xticks(ticks, [f"{t:.0f}" for t in ticks])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlim(min(ticks) * 0.85, max(ticks) * 4.2)
    spread_labels(axis, labels)
    fused, plain = [r["us_added"] for r in timed], [_torch(r) for r in timed]
    title = (
        f"The fused kernels add {min(fused):.1f} to {max(fused):.0f} µs per layer, "
        f"the torch form {min(plain):.0f} to {max(plain):.0f}"
    )
    text = (
        f"{', '.join(sorted({r['device'] for r in timed}))}; CUDA graphs, so launches from the host are not included. "
        f"Lines: {', '.join(sorted({policy for _, policy in drawn.values()}))}; the table has every policy timed."
    )
    cells = tuple(
        (r["model"], r["policy"], f"{r['T']:.0f}", f"{r['us_native']:.2f}", f"{r['us_added']:.2f}", f"{_torch(r):.1f}")
        for r in timed
    )
    heads = ("model", "policy", "rows", "native router, µs", "fused kernels add, µs", "torch form adds, µs")
    return [Chart("routing-kernels", title, text, figure, heads, cells)]


def _key(row: Row) -> tuple[str, str]:
    return row["model"], row["policy"]


def _torch(row: Row) -> float:
    return float(row["us_torch"] - row["us_torch_native"])


def transfers(rows: Sequence[Row]) -> list[Chart]:
    """Copies from the host: measured times, and the line of a start-up time plus bytes over a bandwidth."""
    made = []
    for row in _newest_of(of(rows, "transfers"), "device"):
        figure, axis = panel("MB per copy", "µs per copy")
        megabytes = [b / 1e6 for b in row["bytes"]]
        line = [row["t0_us"] + b / row["gb_per_s"] / 1e3 for b in row["bytes"]]
        axis.plot(megabytes, line, color=MUTED, linewidth=1.2, label="line")
        axis.plot(megabytes, row["us"], "o", color=ACCENT, label="measured")
        axis.set(xscale="log", yscale="log")
        for axes in (axis.xaxis, axis.yaxis):
            axes.set_major_formatter(lambda value, _: f"{value:g}")
        title = f"A copy from the host takes {row['t0_us']:.1f} µs and then runs at {row['gb_per_s']:.0f} GB/s"
        text = (
            f"Pinned memory to {row['device']}. At single sizes the line is off by up to "
            f"{100 * row['largest_relative_error']:.0f} %."
        )
        cells = tuple((f"{m:.3f}", f"{t:.2f}", f"{p:.2f}") for m, t, p in zip(megabytes, row["us"], line, strict=True))
        made.append(Chart(_file(f"transfers-{row['device']}"), title, text, figure, ("MB", "µs", "line, µs"), cells))
    return made


def _file(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in name).strip("-").lower()
