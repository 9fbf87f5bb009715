"""Capped layers of one engine: collected while the model loads, checked and bound after it, changed by RPC."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moebudget.core.counters import COUNTERS, Counters
from moebudget.core.layer_router import chain
from moebudget.core.placement import Placement
from moebudget.core.stats import Stats, load_stats
from moebudget.core.types import NO_STATS, PLACEMENT
from moebudget.engines.config import Settings
from moebudget.engines.vllm.canary import canary
from moebudget.engines.vllm.checks import check_layers, check_slots, fetched_bytes, model_facts
from moebudget.engines.vllm.hook import Layer
from moebudget.engines.vllm.ranks import (
    Copies,
    RankCounters,
    check_agreement,
    expert_ranks,
    rank_state,
    read_placements,
    stats_with_placement,
)
from moebudget.engines.vllm.route import TorchRouter, make_router
from moebudget.engines.vllm.row_kinds import StepRows

log = logging.getLogger("vllm.moebudget")  # a name whose records vLLM's handlers print


class Engine:
    """The layers of one model under one policy, the rows of the coming step and the budgets."""

    loading: Engine | None = None  # the engine whose model is being built in this process
    newest: Engine | None = None  # compiled graphs and the operator find layers by name: one engine per process

    def __init__(self, settings: Settings, family: str, *, drafts: bool = False) -> None:
        """Read the statistics. `drafts`: a draft model is loaded as well, whose layers are left alone.

        Raises StatsError, and ValueError if there are not as many budgets as the statistics have layers.
        """
        self.settings, self.family, self.drafts = settings, family, drafts
        self.stats: Stats | None = load_stats(settings.stats) if settings.stats is not None else None
        if self.stats is not None and settings.budgets is not None:
            settings.policy.layer_budgets(settings.budgets, len(self.stats.facts.layers))
        self.layers: list[Layer] = []
        self.refused: list[tuple[Any, ValueError]] = []
        self.step_rows: StepRows | None = None
        self.budgets: tuple[int, ...] | None = None
        self.fetched_bytes = 0
        self.placements: list[Placement] = []

    def collect(self, runner: Any) -> None:
        """Keep a layer that vLLM has just made. Raises UnsupportedRouterError, or ValueError for too many slots."""
        try:
            layer = Layer(runner)
            check_slots(self.settings.policy, layer.spec.top_k)
        except ValueError as error:
            if not self.drafts:
                raise
            self.refused.append((runner, error))  # `bind` finds out whose layer it is
        else:
            self.layers.append(layer)

    def bind(self, model_runner: Any) -> None:
        """Check the loaded model, give every layer its router, and run the canary. Then the engine may serve."""
        policy, model = self.settings.policy, model_runner.get_model()
        inside = {id(module) for module in model.modules()}
        for runner, error in self.refused:
            if id(runner) in inside:
                raise error
        self.layers = [layer for layer in self.layers if id(layer.runner) in inside]  # without a draft model's
        check_layers(model_runner, self.layers)
        self.layers.sort(key=lambda layer: layer.index)
        config = model_runner.vllm_config
        expert_parallel = bool(config.parallel_config.enable_expert_parallel)
        self.placements = read_placements(self.layers, expert_ranks() if expert_parallel else _single_rank)
        if self.stats is not None or policy.needs_placement:
            trained = config.load_config.load_format != "dummy"
            facts = model_facts(self.layers, model, self.family, trained=trained)
            if self.stats is not None:
                self.stats.check(facts, policy.needs - PLACEMENT)
            if policy.needs_placement:
                self.stats = stats_with_placement(policy, facts if self.stats is None else self.stats, self.placements)
        if policy.budget is not None:
            budgets = policy.budget if self.settings.budgets is None else self.settings.budgets
            self.budgets = policy.layer_budgets(budgets, len(self.layers))
        device = torch.device(model_runner.device)
        size, wide = _row_limits(config, int(model_runner.max_num_tokens))
        self.step_rows = StepRows(size, device, wide)
        ranks, add = _tensor_ranks() if self.settings.debug else (1, None)
        for position, layer in enumerate(self.layers):
            stats = NO_STATS if self.stats is None else self.stats.layer(position)
            route = make_router(policy, layer.spec, stats, hidden=layer.hidden, max_rows=wide, device=device)
            copies = Copies(layer.router, device) if config.parallel_config.enable_eplb else None
            counters = RankCounters(self.placements[position], device, ranks, add, copies)
            layer.activate(route, self.step_rows, counters)
        self.step_rows.by_request = any(isinstance(layer.route, TorchRouter) for layer in self.layers)
        chain([layer.route.holding for layer in self.layers if layer.route is not None])
        self._write_budgets(self.budgets)
        dtype = model_runner.model_config.dtype
        for layer in self.layers:
            canary(layer, self.step_rows, policy, dtype)
        self._write_budgets(self.budgets)
        for layer in self.layers:
            layer.calls = 0
            assert layer.route is not None
            layer.route.clear()
            assert layer.rank_counters is not None
            layer.rank_counters.clear()
        self.step_rows.enabled = self.settings.enabled
        self.fetched_bytes = fetched_bytes(self.layers[0])
        Engine.newest = self
        log.info("%s", self)

    def before_step(self) -> StepRows:
        """The rows to describe a step in. RuntimeError if a newer engine of this process took the layers' names."""
        if Engine.newest is not self:
            raise RuntimeError("a newer engine with moebudget was started in this process: run one engine per process")
        assert self.step_rows is not None
        if self.settings.debug:
            check_agreement(self.layers)
        return self.step_rows

    def after_dummy_run(self) -> None:
        """RuntimeError if a forward pass did not call a layer's router: its model routes in another way."""
        silent = [layer.name for layer in self.layers if not layer.calls]
        if silent:
            raise RuntimeError(
                f"{len(silent)} of {len(self.layers)} layers did not call their router in a forward pass, {silent[0]} "
                'first: this model bypasses it, so no budget would hold; remove "moebudget" from --additional-config'
            )

    def change(self, budget: object = None, enabled: bool | None = None) -> None:
        """Change budgets (one number, or one per layer) and on/off, from the next step on; None changes nothing.

        Raises ValueError that names the value or both lengths, before anything is changed.
        """
        assert self.step_rows is not None
        budgets = None if budget is None else self.settings.policy.layer_budgets(budget, len(self.layers))
        if budgets is not None:
            self.budgets = budgets
            self._write_budgets(budgets)
        if enabled is not None:
            self.step_rows.enabled = enabled

    def _write_budgets(self, budgets: tuple[int, ...] | None) -> None:
        """Write budgets to the device between two steps: with several ranks, no step may see both values."""
        if budgets is None:
            return
        assert self.step_rows is not None
        _synchronize(self.step_rows.kind.device)
        for layer, budget in zip(self.layers, budgets, strict=True):
            assert layer.route is not None
            layer.route.set_budget(budget)
        _synchronize(self.step_rows.kind.device)

    def totals(self) -> list[dict[str, float]]:
        """Counters of each layer, by name; the one place that reads them on the host."""
        routes = [layer.route for layer in self.layers]
        values = [route.totals.tolist() for route in routes if route is not None]
        return [dict(zip(COUNTERS, value, strict=True)) for value in values]

    def state(self) -> dict[str, Any]:
        """Policy, budgets, layers and counters in plain types, as RPC returns them."""
        assert self.step_rows is not None
        layers = self.totals()
        summed = {name: sum(layer[name] for layer in layers) for name in COUNTERS}
        spec = self.layers[0].spec
        return {
            "policy": self.settings.policy.name,
            "enabled": self.step_rows.enabled,
            "budgets": None if self.budgets is None else list(self.budgets),
            "layers": [layer.name for layer in self.layers],
            "experts": spec.num_experts,
            "top_k": spec.top_k,
            "path": self._path,
            "fetched_bytes_per_expert": self.fetched_bytes,
            "counters": Counters(len(layers), summed).as_dict(),
            "per_layer": layers,
            **rank_state(self.layers),
        }

    @property
    def _path(self) -> str:
        return ", ".join(sorted({layer.route.path for layer in self.layers if layer.route is not None}))

    def __str__(self) -> str:
        budgets = sorted(set(self.budgets or ()))
        limits = "" if not budgets else f", budget {budgets[0]}" + (f" to {budgets[-1]}" if len(budgets) > 1 else "")
        devices = self.placements[0].devices
        spec, copies = self.layers[0].spec, int(self.layers[0].router.global_num_experts)
        where = f" in {copies} copies" if copies > spec.num_experts else ""
        where += f" over {devices} ranks" if devices > 1 else ""
        method = type(self.layers[0].runner.routed_experts.quant_method).__name__
        return (
            f"moebudget: {self.settings.policy.name}{limits} on {len(self.layers)} layers of {spec.num_experts} "
            f"experts{where}, {spec.top_k} per token; {self._path} path, experts by {method}, "
            f"{self.fetched_bytes} bytes per expert{'' if self.settings.enabled else '; off until enabled'}"
        )


def _single_rank(experts: Any) -> list[Any]:
    """Gather over one rank."""
    return [experts]


def _tensor_ranks() -> tuple[int, Callable[[Tensor], Tensor]]:
    """The number of ranks that see the same rows (all, without data parallelism), and a sum over them."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return int(group.world_size), group.all_reduce


def _row_limits(vllm_config: Any, tokens: int) -> tuple[int, int]:
    """The most rows of any step, and the most rows that a captured graph holds or that vote."""
    captured = int(vllm_config.compilation_config.max_cudagraph_capture_size or 0)
    speculative = vllm_config.speculative_config
    per_request = 1 + (0 if speculative is None else int(speculative.num_speculative_tokens or 0))
    size = max(tokens, captured)
    return size, min(size, max(captured, per_request * int(vllm_config.scheduler_config.max_num_seqs)))


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
