"""Prometheus gauges of one engine: 16 series, 19 with expert parallelism, for any number of layers and experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Gauge

from moebudget.core.counters import COUNTERS

MEANS = ("fetched", "native_union")


class Gauges:
    """Gauges that `show` sets from the workers' states. Totals are sums over layers, means since the last call."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def gauge(name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"moebudget_{name}", text, labels, registry=registry, multiprocess_mode="mostrecent")

        self.enabled = gauge("enabled", "1 while decode steps are capped")
        self.budget = gauge(
            "budget", "experts per layer and step: the least (min) and the most (max) over the layers", ["bound"]
        )
        self.ranks_agree = gauge("ranks_agree", "1 while all tensor-parallel ranks have equal counters")
        self.totals = {n: gauge(n, f"{n.replace('_', ' ')}, sum over layers since the start") for n in COUNTERS}
        self.means = {n: gauge(f"{n}_mean", f"{n.replace('_', ' ')} per layer and step, recently") for n in MEANS}
        self.by_rank = gauge(
            "rank_fetched_mean",
            "experts fetched per rank, layer and step, recently: by the ranks with fewest (min) and most (max) "
            "on average, and by the rank with the most in each layer and step (slowest)",
            ["bound"],
        )
        self.last_ranks: list[float] = []
        self.last = dict.fromkeys(COUNTERS, 0.0)

    def show(self, states: Sequence[dict[str, Any]]) -> None:
        """Set the gauges from the states of all ranks, as `moebudget_state` returns them."""
        first = states[0]
        now = {name: float(first["counters"][name]) for name in COUNTERS}
        self.enabled.set(first["enabled"])
        self.ranks_agree.set(agree(states))
        for bound, extreme in (("min", min), ("max", max)):
            if first["budgets"]:
                self.budget.labels(bound).set(extreme(first["budgets"]))
        for name, total in self.totals.items():
            total.set(now[name])
        steps = now["steps"] - self.last["steps"]
        for name, mean in self.means.items():
            if steps > 0:
                mean.set((now[name] - self.last[name]) / steps)
        self._show_ranks(first["expert_parallel"], steps)
        self.last = now

    def _show_ranks(self, parallel: dict[str, Any] | None, steps: float) -> None:
        """Set three series for any number of ranks; none on a single device."""
        if parallel is None:
            return
        sums = [*parallel["fetched"], parallel["fetched_most"]]
        before = self.last_ranks or [0.0] * len(sums)
        means = [(now - then) / steps for now, then in zip(sums, before, strict=True)] if steps > 0 else []
        if means:
            for bound, value in (("min", min(means[:-1])), ("max", max(means[:-1])), ("slowest", means[-1])):
                self.by_rank.labels(bound).set(value)
        self.last_ranks = sums


def agree(states: Sequence[dict[str, Any]]) -> bool:
    """Whether all ranks have exactly equal counters, as they do if all choose alike."""
    return all(state[name] == states[0][name] for state in states for name in ("per_layer", "expert_parallel"))
