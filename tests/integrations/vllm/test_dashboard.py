"""The dashboard asks for gauges that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path

from moebudget.runtime import FIELDS

GAUGES = {*FIELDS, "enabled", "budget", "ranks_agree", "fetched_mean", "native_union_mean"}  # test_serving counts them


def test_panel_asks_for_an_unknown_gauge() -> None:
    dashboard = json.loads((Path(__file__).parents[3] / "docs/assets/grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for text in asked for name in re.findall(r"moebudget_(\w+)", text)}
    assert len(asked) > 8
    assert names <= GAUGES
