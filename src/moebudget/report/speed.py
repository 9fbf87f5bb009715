"""Charts of time: step time against fetched experts, what routing adds, copies from the host."""

from __future__ import annotations

from collections.abc import Sequence

from moebudget.report.rows import Row, of
from moebudget.report.style import ACCENT, COLOURS, INK, MUTED, Chart, panel, spread_labels

EXPLAINED = 0.9  # R² below which a line says nothing about experts


def latency(rows: Sequence[Row]) -> list[Chart]:
    """Measured step times with the line through them: `bench decode` by model and batch size, and `diagnose`."""
    found = []
    keys = dict.fromkeys((r["model"], r["B"], r["weights"], r["device"]) for r in of(rows, "decode"))
    for key in keys:
        model, batch, weights, device = key
        mine = _newest([r for r in of(rows, "decode") if (r["model"], r["B"], r["weights"], r["device"]) == key])
        mine = [r for r in mine if r["fetched"] is not None]
        lines = [r for r in of(rows, "decode_fit") if (r["model"], r["B"], r["weights"], r["device"]) == key]
        line = max(lines, key=lambda r: r["date"], default=None)
        if not mine or line is None:
            continue
        points = [(r["fetched"], r["tpot_ms"]) for r in mine]
        at, union = line["at_union"], line["native_union"]
        text = (
            f"{model} with {weights} weights in vLLM, {batch} rows, {device}. Points are measured settings of one "
            f"engine; the line is fitted through them. The right-most one is the unchanged model, which here fetches "
            f"{union:.1f} experts."
        )
        if abs(at - union) > 0.5:
            text += f" Trained weights fetch {at:.1f} (published): gains are said against that place on the line."
        low = min(points)[0]
        gain = (line["a_ms"] + line["b_ms"] * at) / (line["a_ms"] + line["b_ms"] * low)
        price = f"Each expert a layer costs {1e3 * line['b_ms']:.0f} µs a step"
        title = f"{price}: {low:.0f} of {at:.0f} is {gain:.2f} times faster"
        if not rises(line):
            title = f"Fewer experts do not make this step faster: {1e3 * line['b_ms']:.1f} µs an expert a layer"
        marks = [(union, "unchanged model here")]
        marks += [(at, "trained model")] if abs(at - union) > 0.5 else []
        found.append(_line(f"latency-{model}-{batch}", title, text, points, line, marks))
    for number, row in enumerate(_newest_of(of(rows, "diagnose"), "model", "B", "engine", "device"), 1):
        points = [(p[0], p[1]) for p in row["points"]]
        if len(points) < 2:
            continue
        title = f"{row['answer'].capitalize()}: {row['model']}, {row['B']:.0f} rows, {row['engine']}"
        marks = [(row["union"], "unchanged model")] if isinstance(row.get("union"), int | float) else []
        line = row if "a_ms" in row else None
        text = f"{row.get('title', '')} On {row['device']}. {row['reason']}."
        found.append(_line(f"diagnose-{number}", title, text.strip(), points, line, marks))
    return found


def rises(line: Row) -> bool:
    """Whether a row holds a line of step time that rises with the experts and explains most of what was measured."""
    return "a_ms" in line and bool(line["b_ms"] > 0 and line["r2"] >= EXPLAINED)


def _newest(rows: Sequence[Row]) -> list[Row]:
    return _newest_of(rows, "policy", "M")


def _newest_of(rows: Sequence[Row], *keys: str) -> list[Row]:
    """The newest of the rows that agree in these keys."""
    found = {tuple(row.get(key) for key in keys): row for row in sorted(rows, key=lambda row: row["date"])}
    return list(found.values())


def _line(
    name: str,
    title: str,
    text: str,
    points: Sequence[tuple[float, float]],
    line: Row | None,
    marks: Sequence[tuple[float, str]],
) -> Chart:
    figure, axis = panel("distinct experts fetched a layer and step", "time of a decode step, ms")
    axis.plot(*zip(*points, strict=True), "o", color=ACCENT, label="measured", zorder=3)
    right = max([x for x, _ in points] + [x for x, _ in marks]) * 1.06
    axis.set_xlim(0, right)
    axis.set_ylim(0, max(y for _, y in points) * 1.15)
    if line is not None:
        ends = [line["a_ms"], line["a_ms"] + line["b_ms"] * right]
        axis.plot([0, right], ends, color=MUTED, linewidth=1.2, label="line")
        axis.annotate(
            f"{line['a_ms']:.2f} ms + {line['b_ms']:.4f} ms an expert, R² {line['r2']:.3f}",
            (0.02, 0.95), xycoords="axes fraction", va="top", color=MUTED,
        )  # fmt: skip
    for x, label in marks:
        axis.axvline(x, color=INK, linewidth=1, linestyle=":")
        axis.annotate(
            f"{label}: {x:.1f}", (x, 0.04), xycoords=("data", "axes fraction"), xytext=(-5, 0),
            textcoords="offset points", ha="right", fontsize=9,
        )  # fmt: skip
    cells = tuple((f"{x:.2f}", f"{y:.3f}") for x, y in sorted(points))
    return Chart(_file(name), title, text, figure, ("experts a layer", "ms a step"), cells)


def routing(rows: Sequence[Row]) -> list[Chart]:
    """What a policy adds to a layer's router: fused kernels and the torch form, over the rows of a step."""
    mine = _newest_of(of(rows, "routing"), "model", "policy", "T", "device")
    if not mine:
        return []
    figure, axis = panel("rows of a decode step", "added to a layer's router, µs", 4.6)
    base = [r for r in mine if r["policy"].startswith("base:")] or mine
    sizes = {key: {r["T"] for r in base if (r["model"], r["policy"]) == key} for key in map(_key, base)}
    # Of several policies of a model the one with most batch sizes.
    drawn = {model: max((k for k in sizes if k[0] == model), key=lambda k: len(sizes[k])) for model, _ in sizes}
    labels = []
    for place, (model, key) in enumerate(drawn.items()):
        line = sorted((r for r in base if _key(r) == key), key=lambda r: r["T"])
        shade = COLOURS[place % len(COLOURS)]
        rows_a_step = [r["T"] for r in line]
        axis.plot(rows_a_step, [r["us_added"] for r in line], "o-", color=shade, label=f"{model} fused")
        axis.plot(rows_a_step, [_torch(r) for r in line], "o--", color=shade, linewidth=1, label=f"{model} torch")
        labels.append((rows_a_step[-1], line[-1]["us_added"], model, shade))
    axis.set(xscale="log", yscale="log", ylim=(1, None))
    low = min(_torch(r) for r in base)
    axis.annotate("in torch (dashed)", (1, low), xytext=(0, -14), textcoords="offset points", color=MUTED, fontsize=9)
    axis.annotate("fused kernels", (1, 1.5), color=MUTED, fontsize=9)
    ticks = sorted({r["T"] for r in base})
    axis.set_xticks(ticks, [f"{t:.0f}" for t in ticks])
    axis.set_xticks([], minor=True)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlim(min(ticks) * 0.85, max(ticks) * 4.2)
    spread_labels(axis, labels)
    fused, plain = [r["us_added"] for r in mine], [_torch(r) for r in mine]
    title = (
        f"The fused kernels add {min(fused):.1f} to {max(fused):.0f} µs a layer, "
        f"the torch form {min(plain):.0f} to {max(plain):.0f}"
    )
    text = (
        f"{', '.join(sorted({r['device'] for r in mine}))}; CUDA graphs, so without launches from the host. Lines are "
        f"{', '.join(sorted({policy for _, policy in drawn.values()}))}; the table has every policy that was timed."
    )
    cells = tuple(
        (r["model"], r["policy"], f"{r['T']:.0f}", f"{r['us_native']:.2f}", f"{r['us_added']:.2f}", f"{_torch(r):.1f}")
        for r in mine
    )
    heads = ("model", "policy", "rows", "router alone, µs", "added fused, µs", "added in torch, µs")
    return [Chart("routing-kernels", title, text, figure, heads, cells)]


def _key(row: Row) -> tuple[str, str]:
    return row["model"], row["policy"]


def _torch(row: Row) -> float:
    return float(row["us_torch"] - row["us_torch_native"])


def transfers(rows: Sequence[Row]) -> list[Chart]:
    """Copies from the host: measured times, and a start-up time plus bytes over a bandwidth."""
    found = []
    for row in _newest_of(of(rows, "transfers"), "device"):
        figure, axis = panel("size of the copy, MB", "time, µs")
        megabytes = [b / 1e6 for b in row["bytes"]]
        line = [row["t0_us"] + b / row["gb_a_second"] / 1e3 for b in row["bytes"]]
        axis.plot(megabytes, line, color=MUTED, linewidth=1.2, label="line")
        axis.plot(megabytes, row["us"], "o", color=ACCENT, label="measured")
        axis.set(xscale="log", yscale="log")
        for axes in (axis.xaxis, axis.yaxis):
            axes.set_major_formatter(lambda value, _: f"{value:g}")
        title = f"A copy from the host takes {row['t0_us']:.1f} µs and then runs at {row['gb_a_second']:.0f} GB/s"
        text = (
            f"Pinned memory to {row['device']}. The line is off by up to {100 * row['largest_relative_error']:.0f} % "
            "at single sizes."
        )
        cells = tuple((f"{m:.3f}", f"{t:.2f}", f"{p:.2f}") for m, t, p in zip(megabytes, row["us"], line, strict=True))
        found.append(Chart(_file(f"transfers-{row['device']}"), title, text, figure, ("MB", "µs", "line, µs"), cells))
    return found


def _file(name: str) -> str:
    return "".join(c if c.isalnum() or c == "." else "-" for c in name).strip("-").lower()
