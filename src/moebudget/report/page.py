"""Page of the report: rows -> self-contained HTML, and the plots as files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moebudget.report import quality, speed, studies
from moebudget.report.rows import KINDS, Row, groups, is_quality, of, read_rows, several_devices
from moebudget.report.style import Chart, inline_svg, styled, svg

STUDIES = ("selection", "fill", "batch_size")


@dataclass(frozen=True, slots=True)
class Section:
    """Charts under one heading."""

    heading: str
    text: str
    charts: tuple[Chart, ...]


def sections(rows: Sequence[Row]) -> list[Section]:
    """The sections that can be drawn from the rows; those without rows are left out."""
    rows = [row for row in rows if not several_devices(row)]
    all_groups = groups(rows)
    main = [group for group in all_groups if group.bench not in STUDIES]
    sizes = [group for group in all_groups if group.bench == "batch_size"]
    with styled():
        made = [
            Section(
                f"Quality: {quality.NAMES.get(group.bench, group.bench)}, {group.model}, {group.batch} rows",
                "",
                tuple(quality.charts(group, rows)),
            )
            for group in main
        ]
        timed = (*speed.latency(rows), *speed.routing(rows), *speed.transfers(rows))
        made.append(Section("Time", "Time of a decode step, and the time that choosing experts adds to it.", timed))
        made.append(Section("Layers", "", tuple(studies.layers(rows))))
        studied = [
            c for group in all_groups if group.bench in ("selection", "fill") for c in quality.charts(group, ())
        ]
        studied += [*studies.batch_sizes(sizes), *studies.draining(rows), *studies.geometry(rows)]
        made.append(Section("Studies", "Reasons for the differences.", tuple(studied)))
    return [section for section in made if section.charts]


def build(paths: Sequence[Path], out: Path, *, plots: Path | None = None, title: str | None = None) -> dict[str, Any]:
    """Write the page, and every plot as .svg and .png into the folder `plots` if there is one; return a summary.

    Raises the errors of `read_rows` before anything is drawn, MissingExtraError without matplotlib or jinja2, and
    ValueError if no row can be drawn.
    """
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name the page, for example -o {out / 'report.html'}")
    rows = read_rows(paths)
    made = sections(rows)
    calibrations = of(rows, "calibration")
    if not made and not calibrations:
        kinds = ", ".join(sorted({_kind(row) for row in rows}))
        raise ValueError(f"nothing to draw in rows of kind {kinds}; rows that are drawn: quality, {', '.join(KINDS)}")
    charts = [chart for section in made for chart in section.charts]
    text = _render(rows, made, calibrations, paths, title or "Quality and speed with fewer fetched experts")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            (plots / f"{chart.name}.svg").write_text(svg(chart.figure), encoding="utf-8")
            chart.figure.savefig(plots / f"{chart.name}.png", dpi=150, facecolor="white")
    return {"page": str(out), "bytes": len(text.encode()), "rows": len(rows), "charts": [c.name for c in charts]}


def _render(
    rows: Sequence[Row], made: Sequence[Section], calibrations: Sequence[Row], paths: Sequence[Path], title: str
) -> str:
    from moebudget.engines.transformers.loading import MissingExtraError

    try:
        import jinja2
    except ImportError as error:
        raise MissingExtraError("the page needs jinja2: pip install 'moebudget[plot]'") from error
    template = Path(__file__).with_name("page.html.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    numbered = iter(range(1, 1000))
    views = [
        {
            "heading": section.heading,
            "text": section.text,
            "id": f"s{index}",
            "charts": [
                {"chart": chart, "svg": inline_svg(chart.figure, f"c{next(numbered)}", chart.title)}
                for chart in section.charts
            ],
        }
        for index, section in enumerate(made, 1)
    ]
    drawn = Counter(row["bench"] for row in rows)
    return environment.from_string(template).render(
        title=title,
        sections=views,
        calibrations=calibrations,
        runs=list(_runs(rows)),
        kinds=sorted(drawn.items()),
        aside=sorted({_kind(r) for r in rows if _kind(r) not in KINDS and not is_quality(r)}),
        files=[path.name for path in paths],
        version=version("moebudget"),
    )


def _kind(row: Row) -> str:
    return f"{row['bench']} on several GPUs" if several_devices(row) else str(row["bench"])


def _runs(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """One entry per run: rows of one kind from one command at one time."""
    runs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault((row["date"], row["bench"], row["command"], row["device"], row["commit"]), []).append(row)
    for (date, bench, command, device, commit), of_run in sorted(runs.items()):
        versions = ", ".join(f"{name} {number}" for name, number in of_run[0]["versions"].items())
        yield {
            "date": date.replace("T", " ").removesuffix("Z"), "bench": bench, "rows": len(of_run), "device": device,
            "commit": commit, "command": command, "versions": versions,
        }  # fmt: skip
