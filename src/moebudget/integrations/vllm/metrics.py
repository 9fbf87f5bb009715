"""Prometheus gauges of one engine: 16 series, whatever the number of layers and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from moebudget.runtime import FIELDS

MEANS = ("fetched", "native_union")


class Gauges:
    """Set by `show` from the workers' states. Totals are sums over layers; means are since the last `show`."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def gauge(name: str, what: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"moebudget_{name}", what, labels, registry=registry, multiprocess_mode="mostrecent")

        self.enabled = gauge("enabled", "1 while decode steps are capped")
        self.budget = gauge("budget", "Experts a layer and step, least and most over the layers", ["bound"])
        self.ranks_agree = gauge("ranks_agree", "1 while the counters of all tensor-parallel ranks are equal")
        self.totals = {n: gauge(n, f"{n.replace('_', ' ')}, sum over layers since the start") for n in FIELDS}
        self.means = {n: gauge(f"{n}_mean", f"{n.replace('_', ' ')} a layer and step, recently") for n in MEANS}
        self.last = dict.fromkeys(FIELDS, 0.0)

    def show(self, states: Sequence[dict[str, Any]]) -> None:
        """states: one of each rank, as `moebudget_state` gives it."""
        first = states[0]
        now = {name: float(first["counters"][name]) for name in FIELDS}
        self.enabled.set(first["enabled"])
        self.ranks_agree.set(agree(states))
        for bound, of in (("min", min), ("max", max)):
            if first["budgets"]:
                self.budget.labels(bound).set(of(first["budgets"]))
        for name, total in self.totals.items():
            total.set(now[name])
        steps = now["steps"] - self.last["steps"]
        for name, mean in self.means.items():
            if steps > 0:
                mean.set((now[name] - self.last[name]) / steps)
        self.last = now


def agree(states: Sequence[dict[str, Any]]) -> bool:
    """Whether every rank chose alike: their counters are equal to the last digit."""
    return all(state["per_layer"] == states[0]["per_layer"] for state in states)
