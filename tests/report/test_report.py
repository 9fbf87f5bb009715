"""The page of `moebudget report`: self-contained, with every number from a row, and errors that name broken rows."""

from __future__ import annotations

import json
import math
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from moebudget.report import build, read_rows
from moebudget.report.page import sections
from moebudget.report.rows import family, groups
from tests.cli.test_cli import refused, run

STAMP = {
    "date": "2026-11-29T20:00:00Z", "commit": "abc", "command": "moebudget eval <x>", "device": "NVIDIA H200",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
}  # fmt: skip
MODEL = "a <b>model</b> & more"


def quality(policy: str, fetched: float, loss: float, tasks: float | None = None, **more: Any) -> dict[str, Any]:
    row = {
        "bench": "quality", "model": MODEL, "B": 16, "policy": policy, "fetched": fetched, "native_union": 36.0,
        "nll": 3.5 + loss, "native_nll": 3.5, "nll_delta_ci95": 0.02 if loss else 0.0, "task_avg": tasks,
        "task_ci95": None if tasks is None else 2.5, "task_fetched": None if tasks is None else fetched / 2,
        "tokens": 40800, "items": 540, "fetched_by_layer": [fetched - 1, fetched + 1],
    }  # fmt: skip
    return {**row, **STAMP, **more}


@cache
def rows() -> tuple[dict[str, Any], ...]:
    made = [quality("native", 36.0, 0.0, 87.2)]
    made += [quality(f"base:budget={m}", m, loss, t) for m, loss, t in ((8, 0.61, 78), (10, 0.41, 86), (16, 0.12, 87))]
    made += [quality("oea:k0=1", 11.3, 0.567, 56), quality("topk:k=2", 18.0, 0.842, 55)]
    made += [quality("static:budget=10", 10.0, 0.456, 83), quality("squared:budget=10", 10.0, 0.557, 79)]
    made += [quality("oracle:budget=10", 10.0, 0.346, 87)]
    timed = {"engine": "vllm", "model": "qwen3-30b", "weights": "random", "B": 16, "native_union": 79.3, **STAMP}
    for budget, fetched, ms in ((128, 79.3, 12.6), (16, 16.0, 6.1), (10, 10.0, 5.6)):
        made.append({"bench": "decode", "M": budget, "fetched": fetched, "tpot_ms": ms, **timed})
    made.append({"bench": "decode_fit", "a_ms": 4.7, "b_ms": 0.1, "r2": 0.99, "at_union": 48.0, **timed})
    for t in (1, 16):
        times = {"us_native": 2.0, "us_added": 3.0 + t, "us_torch": 200.0 + t, "us_torch_native": 15.0}
        made.append(
            {"bench": "routing", "model": "qwen3-30b", "policy": "base:budget=10", "T": t, "us_floor": 1.0}
            | times
            | STAMP
        )
    copies = {"bytes": [65536, 1048576], "us": [11.0, 29.0], "t0_us": 9.5, "gb_per_s": 55.0}
    made.append({"bench": "transfers", "largest_relative_error": 0.4, **copies, **STAMP})
    for batching, tasks in (("constant", 60.0), ("draining", 66.0)):
        more = {"rows_per_step": 13.0, "fetched": 5.0, "task_avg": tasks, "task_ci95": 2.0, "batching": batching}
        made.append({"bench": "draining", "model": MODEL, "policy": "base:budget=5", **more, **STAMP})
    return tuple(made)


def written(path: Path, documents: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in documents), encoding="utf-8")
    return path


def figures(documents: Any) -> dict[str, Any]:
    return {chart.name: chart for section in sections(documents) for chart in section.charts}


@cache
def drawn() -> dict[str, Any]:
    return figures(rows())


def named(part: str) -> Any:
    (chart,) = [chart for name, chart in drawn().items() if re.search(part, name)]
    return chart


def bars(chart: Any) -> set[tuple[float, ...]]:
    """(x, y, half length) of every point with an error bar."""
    points = set()
    for container in chart.figure.axes[0].containers:
        data, _, lines = container
        for (x, y), segment in zip(data.get_xydata().tolist(), lines[0].get_segments(), strict=True):
            points.add((round(x, 6), round(y, 6), round(float(abs(segment[1] - segment[0]).max()) / 2, 6)))
    return points


def dots(chart: Any) -> set[tuple[float, float]]:
    points = [line.get_xydata().tolist() for line in chart.figure.axes[0].lines if line.get_marker() == "o"]
    return {(round(x, 6), round(y, 6)) for line in points for x, y in line}


class Page(HTMLParser):
    """What a page loads, its ids, its references to them, and the text of its table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.assets: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.cells: list[str] = []
        self.open = False
        self.feed(text)
        self.references = re.findall(r"url\(\s*['\"]?([^)'\"]*)", text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.open = tag in ("td", "code") or (self.open and tag == "code")
        self.cells += [""] if tag == "td" else []
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "poster", "action"):
                self.assets.append(str(value))
            if name == "id":
                self.ids.append(str(value))

    def handle_endtag(self, tag: str) -> None:
        self.open = self.open and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.open:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp("report")
    source = written(folder / "rows.jsonl", rows())
    assert run(["report", source, "-o", folder / "new" / "page.html", "--plots", folder / "plots"]) == 0
    return (folder / "new" / "page.html").read_text(encoding="utf-8"), folder


def test_page_loads_nothing(page: tuple[str, Path]) -> None:
    parsed = Page(page[0])
    assert parsed.assets
    assert all(asset.startswith("#") for asset in [*parsed.assets, *parsed.references])
    assert not parsed.tags & {"script", "link", "img", "iframe", "object", "base"}
    assert "@import" not in page[0]
    assert re.findall(r"https?://[^\s\"']*", page[0].replace("http://www.w3.org/", "")) == []


def test_ids_of_all_plots_are_unique(page: tuple[str, Path]) -> None:
    parsed = Page(page[0])
    assert len(parsed.ids) == len(set(parsed.ids))
    for asset in [*parsed.assets, *parsed.references]:
        assert asset.removeprefix("#") in parsed.ids


def test_plots_follow_the_colours_of_the_page(page: tuple[str, Path]) -> None:
    style, _, rest = page[0].partition("</style>")
    assert "prefers-color-scheme: dark" in style
    assert not re.search(r"#(14181d|66707b|dfe3e7|fefefe|000000|ffffff)\b", rest)
    used = set(re.findall(r"var\((--\w+)\)", page[0]))
    assert used <= set(re.findall(r"(--\w+):", style))


def test_names_in_rows_are_escaped(page: tuple[str, Path]) -> None:
    assert "b" not in Page(page[0]).tags
    assert "a &lt;b&gt;model&lt;/b&gt; &amp; more" in page[0]
    assert "moebudget eval &lt;x&gt;" in page[0]


def test_plotted_losses_are_those_of_the_rows() -> None:
    expected = {
        (row["fetched"], round(row["nll"] - row["native_nll"], 6), row["nll_delta_ci95"])
        for row in rows()
        if row["bench"] == "quality" and row["policy"] != "native"
    }
    assert len(expected) == 8
    assert bars(named("quality.*-loss")) == expected


def test_plotted_task_accuracies_are_those_of_the_rows() -> None:
    policies = [row for row in rows() if row["bench"] == "quality" and row["policy"] != "native"]
    assert bars(named("quality.*-tasks")) == {(row["task_fetched"], row["task_avg"], 2.5) for row in policies}


def test_time_of_another_model_is_read_at_the_share_of_the_union() -> None:
    expected = {round(4.7 + 0.1 * 48.0 * m / 36.0, 6) for m in (8, 10, 11.3, 16, 18)}
    chart = named("quality.*-time")
    assert {x for x, _, _ in bars(chart)} == expected
    assert "Not a measurement of these policies" in chart.text
    assert "share of the native union" in chart.text
    same = [{**row, "model": "qwen3-30b"} if row["bench"] == "quality" else row for row in rows()]
    (same_model,) = [c for name, c in figures(same).items() if name.endswith("-time")]
    assert {x for x, _, _ in bars(same_model)} == {round(4.7 + 0.1 * m, 6) for m in (8, 10, 11.3, 16, 18)}
    assert "share of the native union" not in same_model.text


def test_flat_line_does_not_price_experts() -> None:
    flat = {"b_ms": -0.001, "r2": 0.002, "model": MODEL, "date": "2026-11-30T00:00:00Z", "at_union": 79.3}
    line = next(row for row in rows() if row["bench"] == "decode_fit")
    charts = figures([*rows(), {**line, **flat}])
    (chart,) = [chart for name, chart in charts.items() if name.endswith("-time")]
    assert "qwen3-30b" in chart.text
    alone = figures([{**row, "b_ms": -0.001, "r2": 0.002} if row is line else row for row in rows()])
    assert not [name for name in alone if name.endswith("-time")]
    assert alone["latency-qwen3-30b-16"].title.startswith("Fewer experts do not make this step faster: -1.0 µs")


def test_times_on_two_gpus_are_left_out_of_the_charts() -> None:
    single = [
        {**row, "policy": "base:budget=16", "fetched_by_layer": [row["fetched"]] * 2}
        if row["bench"] == "decode"
        else row
        for row in rows()
    ]
    later = {"tp": 2, "ep": 2, "date": "2026-12-31T00:00:00Z"}
    two = [
        {**row, **later, "tpot_ms": 99.0, "fetched": 1.0, "fetched_by_layer": [1.0] * 2, "b_ms": 7.0} for row in single
    ]
    mixed, alone = figures([*single, *(r for r in two if r["bench"] in ("decode", "decode_fit"))]), figures(single)
    assert {name: chart.cells for name, chart in mixed.items()} == {name: c.cells for name, c in alone.items()}
    assert {name: chart.title for name, chart in mixed.items()} == {name: c.title for name, c in alone.items()}


def test_time_of_another_batch_size_is_not_used() -> None:
    larger = [{**row, "B": 32} if row["bench"] == "decode_fit" else row for row in rows()]
    assert not [name for name in figures(larger) if name.endswith("-time")]


def test_plotted_times_are_those_of_the_rows() -> None:
    latency = named("latency")
    assert dots(latency) == {(79.3, 12.6), (16.0, 6.1), (10.0, 5.6)}
    (line,) = [line for line in latency.figure.axes[0].lines if line.get_label() == "line"]
    for x, y in line.get_xydata().tolist():
        assert math.isclose(y, 4.7 + 0.1 * x, rel_tol=1e-9)
    assert "100 µs" in latency.title
    assert f"{(4.7 + 4.8) / (4.7 + 1.0):.2f} times" in latency.title
    assert dots(named("routing")) == {(1, 4.0), (16, 19.0), (1, 186.0), (16, 201.0)}
    assert dots(named("transfers")) == {(0.065536, 11.0), (1.048576, 29.0)}
    assert dots(named("layers")) == {(i, f - 1 + 2 * i) for f in (36, 8, 10, 16, 11.3, 18) for i in (0, 1)}


def test_ranking_holds_every_policy_in_order_of_loss() -> None:
    chart = named("-at-10.0")
    names = [label.get_text() for label in chart.figure.axes[0].get_yticklabels()]
    order = ["oracle", "base", "static", "squared"]
    assert names == [f"{name}:budget=10" for name in order]
    assert [(x, y) for x, y, _ in sorted(bars(chart), key=lambda bar: bar[1])] == [
        (0.346, 0), (0.41, 1), (0.456, 2), (0.557, 3),
    ]  # fmt: skip
    assert chart.title == "At about 10.0 experts: base:budget=10 loses least, 0.41 ± 0.02 nats per token"


def test_titles_mention_overlapping_and_wide_intervals() -> None:
    wide = [{**row, "nll_delta_ci95": 0.03} if row["policy"] == "static:budget=10" else row for row in rows()[:9]]
    (chart,) = [chart for name, chart in figures(wide).items() if "-at-10" in name]
    assert chart.title.endswith("; 1 other interval overlaps with it")
    few = [{**row, "task_ci95": 31.0} for row in rows()[:9]]
    (tasks,) = [chart for name, chart in figures(few).items() if name.endswith("-tasks")]
    assert tasks.title == "Too few task items to tell policies apart: intervals above ± 10 points"


def test_table_shows_the_numbers_of_the_rows(page: tuple[str, Path]) -> None:
    cells = Page(page[0]).cells
    for row in rows():
        if row["bench"] == "quality" and row["policy"] != "native":
            place = cells.index(row["policy"])
            loss = row["nll"] - row["native_nll"]
            assert cells[place + 1] == f"{row['fetched']:.2f}"
            assert cells[place + 2] == f"{loss:.4f} ± {row['nll_delta_ci95']:.4f}"


def test_origins_count_every_row(page: tuple[str, Path]) -> None:
    origins = Page(page[0].partition("Origin of the rows</h2>")[2]).cells
    kinds = sorted({row["bench"] for row in rows()})
    counts = [str(sum(row["bench"] == kind for row in rows())) for kind in kinds]
    assert origins[0::7] == kinds
    assert origins[1::7] == counts
    assert set(origins[2::7]) == {"2026-11-29 20:00:00"}
    assert set(zip(origins[3::7], origins[4::7], origins[5::7], origins[6::7], strict=True)) == {
        ("NVIDIA H200", "abc", "moebudget eval <x>", "python 3.11.7, torch 2.13.0")
    }


def test_newest_row_of_each_policy_and_text_is_drawn() -> None:
    newer = quality("base:budget=10", 10.0, 0.3, date="2026-11-30T00:00:00Z")
    other_text = quality("base:budget=10", 10.0, 0.9, tokens=100)
    (group,) = [g for g in groups([newer, *rows(), other_text]) if g.tokens == 40800]
    (row,) = [r for r in group.rows if r["policy"] == "base:budget=10"]
    assert row["nll"] == 3.8


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("base:budget=10", "base"), ("base:budget=10,fill=drop", "base fill=drop"), ("oea:k0=2,p=0.26", "oea"),
        ("lynx:alpha=0.2,beta=1", "lynx"), ("skip", "skip"),
    ],
)  # fmt: skip
def test_line_joins_the_settings_of_one_family(policy: str, expected: str) -> None:
    assert family({"policy": policy}) == expected
    assert family({"policy": policy, "method": "X"}) == "X"


@pytest.mark.parametrize("bench", ["quality", "decode", "routing", "transfers", "draining"])
def test_page_is_made_from_rows_of_one_kind(bench: str, tmp_path: Path) -> None:
    of_kind = [row for row in rows() if row["bench"].startswith(bench)]
    made = build([written(tmp_path / "some.jsonl", of_kind)], tmp_path / "page.html")
    assert made["rows"] == len(of_kind)
    assert made["charts"]


def test_every_plot_is_written_to_the_folder(page: tuple[str, Path]) -> None:
    names = {path.name for path in (page[1] / "plots").iterdir()}
    assert names == {f"{chart}.{kind}" for chart in drawn() for kind in ("svg", "png")}


def test_json_list_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(list(rows()), indent=1), encoding="utf-8")
    assert read_rows([path]) == list(rows())


def spoiled(**changes: Any) -> str:
    return json.dumps(
        {key: value for key, value in {**quality("skip", 9.0, 0.1), **changes}.items() if value != "gone"}
    )


BROKEN = {
    "empty": ("", ("rows.jsonl", "has no rows")),
    "no JSON": (spoiled() + "\n{'a': 1}\n", ("rows.jsonl", "line 2", "not JSON")),
    "no object": ("\n" + spoiled() + "\n[1]\n".replace("[1]", "7"), ("line 3", "JSON object", "int")),
    "no kind": (spoiled(bench="gone"), ("line 1", "'bench'", "missing")),
    "no number": (spoiled() + "\n" + spoiled(nll="gone"), ("rows.jsonl", "line 2", "'quality'", "'nll'", "missing")),
    "text": (spoiled(fetched="nine"), ("line 1", "'fetched'", "finite number", "nine")),
    "true": (spoiled(fetched=True), ("line 1", "'fetched'", "True")),
    "not finite": (spoiled(nll=float("nan")), ("line 1", "'nll'", "nan")),
    "no commit": (spoiled(commit="gone"), ("line 1", "'commit'", "missing")),
    "timing": (json.dumps({**rows()[-3], "us": [1.0, "x"]}), ("line 1", "'transfers'", "'us'", "list of finite")),
    "list": ("[" + spoiled() + ",\n" + spoiled(B="gone") + "]", ("row 2 of the list", "'B'")),
    "unknown": (json.dumps({"bench": "other", **STAMP}), ("nothing to draw", "other")),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_row_is_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, parts = BROKEN[case]
    path = tmp_path / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    refused(["report", path, "-o", tmp_path / "page.html"], capsys, *parts)
    assert not (tmp_path / "page.html").exists()


def test_wrong_path_is_refused_before_drawing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused(["report", tmp_path / "none.jsonl"], capsys, "there is no file of rows", "none.jsonl")
    refused(["report", written(tmp_path / "a.jsonl", rows()), "-o", tmp_path], capsys, "is a folder", "report.html")


def test_rows_of_the_repository_can_be_read_and_grouped() -> None:
    """As `moebudget report benchmarks/results/*.jsonl` in the docs; rows of allocations are left out of the groups."""
    committed = read_rows(sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl")))
    assert len(committed) > 1000
    for group in groups(committed):
        assert all(row.get("allocated_on") is None and row.get("domain") is None for row in group.rows)
