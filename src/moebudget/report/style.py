"""Style of the plots, and inline SVGs that follow the page's light or dark colours."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from moebudget.engines.transformers.loading import MissingExtraError

# Colours that `inline_svg` replaces by the page's; a saved file keeps them, on white.
INK, MUTED, GRID, PAPER = "#14181d", "#66707b", "#dfe3e7", "#fefefe"
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--page)"}
ACCENT = "#d1495b"  # BASE, and the main series of a chart
BOUND = "#8b8f96"
COLOURS = ("#2b83ba", "#2a9d6f", "#c07f14", "#8e6bbf", "#3aa6a6", "#a0626f", "#7a8a2a")

STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "font.size": 10.0, "axes.titlesize": 10.0, "axes.edgecolor": MUTED, "axes.labelcolor": INK,
    "text.color": INK, "xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": GRID,
    "grid.linewidth": 0.7, "axes.axisbelow": True, "lines.linewidth": 1.8, "lines.markersize": 5.5,
    "errorbar.capsize": 2.0, "savefig.facecolor": "white", "figure.facecolor": "none", "axes.facecolor": "none",
}  # fmt: skip


def styled() -> AbstractContextManager[None]:
    """Context in which figures are drawn and saved in this style. Raises MissingExtraError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("plots need matplotlib: pip install 'moebudget[plot]'") from error
    context: AbstractContextManager[None] = matplotlib.rc_context(STYLE)
    return context


def panel(x: str, y: str, height: float = 4.0) -> tuple[Any, Any]:
    """(figure, axis) with these axis labels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, height), layout="constrained")
    axis = figure.subplots()
    axis.set(xlabel=x, ylabel=y)
    return figure, axis


def colour(name: str, position: int) -> str:
    """A fixed colour for BASE and for native, grey for the bound of true energies, else one of COLOURS in turn."""
    word = name.lower().partition(":")[0]
    if word in ("base", "native"):
        return ACCENT if word == "base" else INK
    return BOUND if word.startswith(("oracle", "true energy")) else COLOURS[position % len(COLOURS)]


def log_scale(axis: Any, values: Sequence[float], along: str = "y") -> bool:
    """Make the axis logarithmic if the values span a factor above 20; return whether it is."""
    from matplotlib.ticker import LogLocator, NullLocator

    if min(values) <= 0 or max(values) <= 20 * min(values):
        return False
    axis.set(**{f"{along}scale": "log"})
    scale = axis.xaxis if along == "x" else axis.yaxis
    scale.set_major_locator(LogLocator(subs=(1, 2, 5)))
    scale.set_minor_locator(NullLocator())
    scale.set_major_formatter(lambda value, _: f"{value:g}")
    return True


def spread_labels(
    axis: Any, labels: Sequence[tuple[float, float, str, str]], points: Sequence[tuple[float, float]] = ()
) -> None:
    """Write labels (x, y, text, colour) to the right of their points, moved up or down so that they do not overlap.

    Labels also avoid `points` if possible. A moved label gets a thin line to its point.
    """
    figure = axis.figure
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the positions below hold for this layout only
    scale, gap, letter = 72 / figure.dpi, 12.0, 5.4

    def place(x: float, y: float) -> tuple[float, float]:
        spot = axis.transData.transform((x, y)) * scale
        return float(spot[0]), float(spot[1])

    low, high = (axis.transAxes.transform((0, end))[1] * scale for end in (0, 1))
    taken: list[tuple[float, float, float]] = []  # left, right, height
    dots = [place(x, y) for x, y in {*points, *((x, y) for x, y, _, _ in labels)}]

    def cost(left: float, right: float, height: float) -> int:
        on_text = sum(left < r and right > x and abs(height - h) < gap for x, r, h in taken)
        on_dots = sum(left - 3 < x < right and abs(height - y) < gap / 2 + 2 for x, y in dots)
        return 100 * on_text + 10 * on_dots + 1000 * (not low + 5 < height < high - 3)

    for x, y, text, tone in sorted(labels, key=lambda label: label[1]):
        left, height = place(x, y)
        right = left + 9 + letter * len(text)
        moves = [0.0, *(sign * 4.0 * step for step in range(1, 16) for sign in (1, -1))]
        moved = min(moves, key=lambda move: cost(left + 9, right, height + move) + abs(move) / 4)
        taken.append((left + 9, right, height + moved))
        line = {"arrowstyle": "-", "color": GRID, "shrinkA": 0, "shrinkB": 3} if abs(moved) > 6 else None
        axis.annotate(
            text, (x, y), xytext=(9, moved), textcoords="offset points", color=tone, fontsize=9, va="center",
            arrowprops=line, annotation_clip=False,
        )  # fmt: skip


def svg(figure: Any) -> str:
    """The figure as an SVG document on white; the same figure gives the same bytes."""
    out = io.StringIO()
    with styled():
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return out.getvalue()


def inline_svg(figure: Any, name: str, title: str) -> str:
    """The figure as an <svg> element with the page's font and colours and unique ids, which loads nothing."""
    text = svg(figure)
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)  # would apply to the whole page
    text = re.sub(r"'[^']*', [^;\"]*?sans-serif\b|'DejaVu Sans'", "var(--font)", text)
    text = re.sub(r'<g id="[^"]*-patch_1">.*?</g>', "", text, count=1, flags=re.DOTALL)  # the white background
    for colour_code, variable in VARIABLES.items():
        text = text.replace(colour_code, variable)
    head, _, rest = text.partition(">")
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None  # matplotlib always writes it
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    space = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {space} {box[0]} role="img" aria-label="{label}">{rest}'


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its title and text, and its numbers as a table."""

    name: str  # name of its files
    title: str  # the finding
    text: str  # the measurement, and how to read the figure
    figure: Any
    heads: tuple[str, ...]
    cells: tuple[tuple[str, ...], ...]
