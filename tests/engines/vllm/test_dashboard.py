"""The Grafana dashboard queries only gauges that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

from moebudget.core.counters import COUNTERS

# test_serving counts them.
GAUGES = {*COUNTERS, "enabled", "budget", "ranks_agree", "fetched_mean", "native_union_mean"}


def test_panels_query_known_gauges() -> None:
    dashboard = json.loads((Path(__file__).parents[3] / "docs/assets/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in re.findall(r"moebudget_(\w+)", query)}
    assert len(queries) > 8
    assert names <= GAUGES
