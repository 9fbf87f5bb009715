#!/usr/bin/env python3
"""Write the tables and the plot of README and docs from the rows in benchmarks/results.

    python scripts/update_tables.py

A table stands between `<!-- name -->` and `<!-- /name -->`. The rows of the newest run of each kind are used.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]
import offload_tables
from spread_plot import plot_layers
from study_tables import LARGE_MODELS, TRAININGS, blocks, last_run

from moebudget.analyse.show import plot_studies
from moebudget.demo.run import NAME
from moebudget.evaluate.plot import plot_quality
from moebudget.evaluate.report import pm

RESULTS = ROOT / "benchmarks/results"
LABELS = {
    "dense": "unchanged model",
    "topk": "plain top-k",
    "oea": "OEA",
    "router_mass": "router mass",
    "squared": "squared weights",
    "static": "mean energy",
    "base": "**BASE**",
    "oracle": "true energy (bound)",
}


def rows_of(name: str) -> list[dict[str, Any]]:
    """The rows of NAME.jsonl, those of NAME-*.jsonl before them, each with the `file` it stands in."""
    return [
        {**json.loads(line), "file": path.name}
        for path in (*sorted(RESULTS.glob(f"{name}-*.jsonl")), RESULTS / f"{name}.jsonl")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def newest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the embedded model's last run."""
    return last_run(of_model(rows, NAME), "quality")


def of_model(rows: list[dict[str, Any]], model: str) -> list[dict[str, Any]]:
    return [r for r in rows if r["model"] == model]


def contrast(rows: list[dict[str, Any]]) -> str:
    """The same rules on the model with equal loads, which is not shipped."""
    equal = {r["policy"]: r for r in of_model(rows, "equal-loads-8m") if r["bench"] == "quality"}
    losses = [
        f"{name} {equal[policy]['nll'] - equal[policy]['dense_nll']:.2f}"
        for name, policy in (
            ("BASE", "base:budget=10"),
            ("mean energies", "static:budget=10"),
            ("squared weights", "squared:budget=10"),
            ("router mass", "router_mass:budget=10"),
            ("true energies", "oracle:budget=10"),
        )
    ]
    return (
        "The embedded model was trained towards unequal expert loads, as large models have, and the skew was chosen "
        "so that the predictor retains .96 of the energy at 10 experts "
        "([model card](src/moebudget/demo/model/README.md)). A "
        f"model of the same size with equal loads fetches {equal['dense']['fetched']:.1f} experts and retains "
        f"{equal['base:budget=10']['retained_energy']:.3f}; there 10 experts cost {', '.join(losses)}. "
        "Measure your own model."
    )


def quality_table(rows: list[dict[str, Any]]) -> str:
    dense = rows[0]
    lines = [
        f"The embedded model (8M parameters, 6 layers of 64 experts, 8 a token), batch {dense['B']}, decode mode, "
        f"{dense['tokens']:,} held-out tokens and {dense['items']:,} task items a row; ± is half of a 95 % "
        "interval, for the loss paired with the unchanged model.",
        "",
        "| rule | policy | experts | MB a step | loss above dense | same token, % | retained energy | experts on "
        "tasks | tasks, % |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in rows:
        loss = "0 (loss " + f"{r['nll']:.3f})" if r is dense else pm(r["nll"] - r["dense_nll"], r["nll_delta_ci95"], 3)
        cells = [LABELS[r["policy"].partition(":")[0]], f"`{r['policy']}`", f"{r['fetched']:.1f}"]
        cells += [f"{r['expert_mb_a_step']:.1f}", loss, f"{r['agreement']:.1f}", f"{r['retained_energy']:.3f}"]
        cells.append(f"{r['task_fetched']:.1f}")
        cells.append(pm(r["task_avg"], r["task_ci95"], 1))
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", reading({r["policy"]: r for r in rows})]
    lines += [
        "",
        f"Rows: [quality.jsonl](benchmarks/results/quality.jsonl), commit {dense['commit']}, {dense['device']}.",
    ]
    return "\n".join(lines)


def reading(rows: dict[str, dict[str, Any]]) -> str:
    """What the table says about BASE at 10 experts, from its numbers."""

    def above(policy: str) -> str:
        return f"{rows[policy]['nll'] - rows[policy]['dense_nll']:.2f}"

    base, static = rows["base:budget=10"], rows["static:budget=10"]
    gap, width = base["task_avg"] - static["task_avg"], base["task_ci95"] + static["task_ci95"]
    tasks = "the tasks do not tell the two apart" if abs(gap) < width else f"on the tasks the difference is {gap:+.1f}"
    return (
        f"At 10 of {rows['dense']['fetched']:.1f} experts BASE loses {above('base:budget=10')} nats a token. The same "
        f"number chosen by router weights alone costs {above('router_mass:budget=10')}, by their squares "
        f"{above('squared:budget=10')}: a weight says how much a token wants an expert, not how large that expert's "
        "output is for it, and the output changes by the product. Knowing only each expert's mean energy costs "
        f"{above('static:budget=10')} ({tasks}); knowing the true energies would cost {above('oracle:budget=10')}. "
        "The tasks' prompts are alike: a union is small there, so rules that take one (`oea`, `topk`) fetch fewer "
        "experts on them than a fixed budget does, and their accuracies are not at equal counts."
    )


def calibration_table(rows: list[dict[str, Any]]) -> str:
    last = {(r["model"], r["device"]): r for r in rows}
    lines = [
        "| model | device | tokens | seconds | tokens/s | forward alone | sums a layer | peak memory |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for r in last.values():
        peak = "" if r["peak_gpu_gb"] is None else f"{r['peak_gpu_gb']:.1f} GB"
        cells = [r["model"], r["device"], f"{r['tokens']:,}", f"{r['seconds']:.1f}", f"{r['tokens_per_s']:,}"]
        cells += [f"{r['forward_s']:.1f} s", f"{r['sums_mb_a_layer']:,.0f} MB", peak]
        lines.append("| " + " | ".join(cells) + " |")
    for r in last.values():
        if "extrapolated_minutes" in r:
            p, timed = r["published"], "its forward and its statistics a token, its solves"
            timed += ", its share of the held-out pass" if r["validate_s"] is not None else ""
            missing = "reading and tokenizing text" + ("" if r["validate_s"] is not None else " and the held-out pass")
            lines += [
                "",
                f"{r['model']} on {r['device']}, extrapolated to {p['layers']} layers and {p['tokens']:,} tokens in "
                f"{r['extrapolated_passes']} passes beside 61 GB of weights: {r['extrapolated_minutes']:.1f} minutes "
                f"(published: {p['minutes']} on an {p['gpu']}). What a layer costs ({timed}) is measured here and "
                f"multiplied by the counts; {missing} are not in it.",
            ]
    return "\n".join(lines)


def replace(path: Path, name: str, text: str) -> None:
    before = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(before):
        raise SystemExit(f"{path} has no place for {name}")
    path.write_text(pattern.sub(lambda m: f"{m[1]}\n{text}\n\n{m[2]}", before), encoding="utf-8")


def main() -> None:
    rows = rows_of("quality")
    quality = newest(rows)
    plot_quality(quality, ROOT / "docs/assets/quality.png")
    replace(ROOT / "README.md", "quality-table", quality_table(quality) + "\n\n" + contrast(rows))
    replace(ROOT / "docs/calibration.md", "calibration-table", calibration_table(rows_of("calibration")))
    trainings = {name: of_model(rows, LARGE_MODELS[TRAININGS[name]]) for name in ("82M, one", "82M, two")}
    plot_layers(trainings, ROOT / "docs/assets/layers.png")
    analysis, *others = (rows_of(name) for name in ("analysis", "routing", "decode", "vllm_check"))
    for (page, name), text in blocks(rows, analysis, *others).items():
        replace(ROOT / page, name, text)
    for (page, name), text in offload_tables.blocks(rows_of("offload")).items():
        replace(ROOT / page, name, text)
    plot_studies(
        [row for bench in ("geometry", "batch_size") for row in last_run(analysis, bench)],
        ROOT / "docs/assets/analysis.png",
    )


if __name__ == "__main__":
    main()
