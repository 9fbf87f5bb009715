"""Writer of all generated tables and plots of the README and docs, from benchmarks/results and the registry.

    python -m experiments.tables.update_tables

A block is the text between `<!-- name -->` and `<!-- /name -->`. The newest rows of each kind are used.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from experiments.tables import (
    offload_tables,
    quality_tables,
    registry_tables,
    speed_tables,
    spread_tables,
    study_tables,
)
from experiments.tables.spread_plot import plot_layers
from experiments.tables.tables import Blocks, Row, last_run, of_model
from moebudget.evaluate.plot import plot_quality
from moebudget.report.analyses import plot_studies

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
FILES = ("quality", "analysis", "routing", "decode", "vllm_check", "calibration", "offload")


def rows_of(name: str) -> list[Row]:
    """The rows of NAME.jsonl, after those of NAME-*.jsonl, each with its `file`."""
    return [
        {**json.loads(line), "file": path.name}
        for path in (*sorted(RESULTS.glob(f"{name}-*.jsonl")), RESULTS / f"{name}.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def read_rows() -> dict[str, list[Row]]:
    """The rows of every file that the tables use, by name."""
    return {name: rows_of(name) for name in FILES}


def blocks(rows: dict[str, list[Row]]) -> Blocks:
    """Every generated block."""
    return {
        **speed_tables.blocks(rows["routing"], rows["decode"], rows["vllm_check"], rows["calibration"]),
        **quality_tables.blocks(rows["quality"]),
        **study_tables.blocks(rows["quality"], rows["analysis"]),
        **spread_tables.blocks(rows["quality"], rows["analysis"]),
        **offload_tables.blocks(rows["offload"]),
        **registry_tables.blocks(),
    }


def replace(path: Path, name: str, text: str) -> None:
    """Write a block into a page. Raises ValueError if the page has no place for it."""
    before = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(before):
        raise ValueError(f"{path} has no place for {name}: add the lines <!-- {name} --> and <!-- /{name} -->")
    path.write_text(pattern.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", before), encoding="utf-8")


def plots(rows: dict[str, list[Row]]) -> None:
    """Draw docs/assets/quality.png, layers.png and analysis.png."""
    assets = ROOT / "docs/assets"
    plot_quality(quality_tables.demo_rows(rows["quality"]), assets / "quality.png")
    trainings = {name: of_model(rows["quality"], spread_tables.TRAININGS[name]) for name in ("82M, one", "82M, two")}
    plot_layers(trainings, assets / "layers.png")
    studies = [row for bench in ("geometry", "batch_size") for row in last_run(rows["analysis"], bench)]
    plot_studies(studies, assets / "analysis.png")


def main() -> None:
    rows = read_rows()
    refused = []
    for (page, name), text in blocks(rows).items():
        try:
            replace(ROOT / page, name, text)
        except (OSError, ValueError) as error:  # the other blocks are written first
            refused.append(str(error))
    plots(rows)
    if refused:
        raise SystemExit("\n".join(refused))


if __name__ == "__main__":
    main()
