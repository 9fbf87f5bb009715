"""Prometheus gauges of one engine: 16 series, 19 with expert parallelism, however many layers and experts."""

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
        self.by_rank = gauge(
            "rank_fetched_mean",
            "experts a rank, layer and step, recently: of the ranks with fewest (min) and most (max) on average, and "
            "of the one with most in each layer and step (slowest)",
            ["bound"],
        )
        self.last_ranks: list[float] = []
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
        self._show_ranks(first["expert_parallel"], steps)
        self.last = now

    def _show_ranks(self, found: dict[str, Any] | None, steps: float) -> None:
        """Three series, however many ranks; none on a single device."""
        if found is None:
            return
        sums = [*found["fetched"], found["fetched_most"]]
        before = self.last_ranks or [0.0] * len(sums)
        means = [(now - then) / steps for now, then in zip(sums, before, strict=True)] if steps > 0 else []
        if means:
            for bound, value in (("min", min(means[:-1])), ("max", max(means[:-1])), ("slowest", means[-1])):
                self.by_rank.labels(bound).set(value)
        self.last_ranks = sums


def agree(states: Sequence[dict[str, Any]]) -> bool:
    """Whether every rank's counters are equal to the last digit, as they are where all choose alike."""
    return all(state[name] == states[0][name] for state in states for name in ("per_layer", "expert_parallel"))
