"""Re-routing of the decode steps of a transformers model: `with attach(model, policy, stats): model.generate(...)`."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moebudget.core.counters import Counters, read_counters
from moebudget.core.layer_router import LayerRouter, chain
from moebudget.core.placement import Placement
from moebudget.core.policy import Policy
from moebudget.core.stats import Stats, place, require_stats
from moebudget.core.types import NO_STATS
from moebudget.engines.config import resolve
from moebudget.engines.transformers.families import facts_of, model_facts, model_type, moe_layers
from moebudget.engines.transformers.graphs import StepGraphs
from moebudget.engines.transformers.observe import restore
from moebudget.engines.transformers.steps import route_forward
from moebudget.methods.registry import parse

MARK = "_moebudget_policy"  # attribute of a model that holds the attached policy


class BypassedError(RuntimeError):
    """A forward pass bypassed the experts module of a layer, so the policy could not act there."""


class Run:
    """A policy attached to a model: its counters, its budget, and the decode rows of the next forward pass."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        stats: Stats | None,
        finished_ids: frozenset[int] | None,
        prefill: Policy | None = None,
        graphs: bool = True,
    ) -> None:
        self.model, self.policy, self.finished_ids = model, policy, finished_ids
        self.layers = moe_layers(model)
        self.routers = self._routers(policy, stats)
        self.graphs = StepGraphs(graphs)
        self.prefill_routers = None if prefill is None else self._routers(prefill, stats)
        self._steps: Tensor | None = None  # [S, B] rows of the decode steps in this forward pass; None: prefill
        self._voting: Tensor | None = None  # [S, B] bool: which of these rows vote; None: all
        self._explicit: Tensor | None = None  # [S, B] rows that `decode_steps` names
        self._shift: Tensor | None = None  # [T, d] added to the output of the running layer's experts
        self._prompt = False  # `generate` is reading its prompt
        self._ends = self._ending_ids()
        self._seen = 0
        self.forwards = 0

    def _routers(self, policy: Policy, stats: Stats | None) -> list[LayerRouter]:
        require_stats(policy.name, policy.needs, stats)
        if stats is not None and policy.needs:
            stats.check(model_facts(self.layers, model_type(self.model)), policy.needs)
        routers = [
            LayerRouter(policy, NO_STATS if stats is None else stats.layer(i), layer.weight.device)
            for i, layer in enumerate(self.layers)
        ]
        chain(routers)
        return routers

    @property
    def counters(self) -> Counters:
        """Totals over all layers since `attach` or `reset`."""
        return read_counters(self.routers)

    @property
    def prefill_counters(self) -> Counters | None:
        """Totals of the prefill policy; None if there is none. Every forward pass with a prompt is one step."""
        return None if self.prefill_routers is None else read_counters(self.prefill_routers)

    def reset(self) -> None:
        """Set all counters to zero."""
        for router in [*self.routers, *(self.prefill_routers or [])]:
            router.totals.zero_()

    def set_budget(self, budget: int | Sequence[int]) -> None:
        """Change the budget from the next step on: one for all layers, or one per layer. Raises ValueError."""
        budgets = self.policy.layer_budgets(budget, len(self.layers))
        for router, layer_budget in zip(self.routers, budgets, strict=True):
            router.set_budget(layer_budget)

    @contextmanager
    def decode_steps(self, rows: Tensor) -> Iterator[None]:
        """Name the rows that form decode steps in the forward passes inside, for teacher forcing and custom loops.

        rows [S, B] int64: row r of step s is token `rows[s, r]` of the flattened [batch * positions]; -1: no row.
        Tokens that no step names are prefill: they keep their native routes and do not vote.
        """
        self._explicit = rows
        try:
            yield
        finally:
            self._explicit = None

    def _ending_ids(self, *configs: Any) -> frozenset[int]:
        """Tokens that only a finished row is fed: `finished_ids`, or the end and padding tokens of the configs."""
        if self.finished_ids is not None:
            return self.finished_ids
        values = [
            getattr(config, name, None)
            for config in configs or (getattr(self.model, "generation_config", None), self.model.config)
            for name in ("eos_token_id", "pad_token_id")
        ]
        flat = [x for value in values for x in (value if isinstance(value, list | tuple) else [value])]
        return frozenset(x for x in flat if x is not None)

    def _watch_prompt(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the method by which `generate` reads its prompt, whole or in pieces, with all settings resolved."""

        def watched(input_ids: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
            self._prompt, self._ends = True, self._ending_ids(generation_config)
            try:
                return prefill(input_ids, generation_config, *args, **kwargs)
            finally:
                self._prompt = False

        return watched

    def _before_forward(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._seen = 0
        self._voting = self._shift = None
        self.forwards += 1
        if self._explicit is not None:
            self._steps = self._explicit
            return
        arguments = inspect.signature(self.model.forward).bind_partial(*args, **kwargs).arguments
        arguments = {**arguments, **arguments.get("kwargs", {})}
        tokens = arguments.get("input_ids")
        inputs = tokens if tokens is not None else arguments.get("inputs_embeds")
        cache = arguments.get("past_key_values")
        cache = arguments.get("cache") if cache is None else cache
        self._steps = None
        if self._prompt:
            return
        if inputs is None or inputs.shape[1] > 1 or cache is None or int(cache.get_seq_length()) == 0:
            self._ends = self._ending_ids()
            return
        self._steps = torch.arange(inputs.shape[0], device=inputs.device)[None]  # [1, B]
        if tokens is not None and self._ends:
            ends = torch.tensor(sorted(self._ends), device=tokens.device)
            self._voting = ~torch.isin(tokens.T, ends)

    def _after_forward(self, _module: nn.Module, _args: tuple[Any, ...], _output: Any) -> None:
        self._steps = None  # the inner decoder may be called directly before the next pass
        if self._seen != len(self.layers):
            raise BypassedError(
                f"{self._seen} of {len(self.layers)} Mixture-of-Experts layers called their experts module in this "
                "forward pass; a fused block (for example from the kernels hub) bypasses routing: load the model "
                "without it"
            )

    def _before_experts(self, position: int) -> Callable[..., Any]:
        layer, router = self.layers[position], self.routers[position]
        prefill = None if self.prefill_routers is None else self.prefill_routers[position]
        decode = functools.partial(self.graphs, layer, router)
        signature = inspect.signature(type(layer.experts).forward)

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._seen += 1
            if self._steps is None and prefill is None:
                return None
            call = signature.bind(module, *args, **kwargs)
            names = list(call.arguments)[1:4]  # hidden, ids, weights
            hidden, ids, weights = (call.arguments[name] for name in names)
            routed = route_forward(layer, decode, prefill, (hidden, ids, weights), self._steps, self._voting)
            call.arguments[names[1]], call.arguments[names[2]] = routed.ids, routed.weights
            self._shift = routed.shift
            return call.args[1:], call.kwargs

        return hook

    def _after_experts(self, _module: nn.Module, _args: tuple[Any, ...], output: Tensor) -> Tensor:
        shift, self._shift = self._shift, None
        return output if shift is None else output + shift.to(output.dtype)


def place_experts(model: nn.Module, stats: Stats | None, devices: int) -> Stats:
    """The statistics with the model's experts placed on `devices` in equal blocks; without any, its facts alone."""
    facts = facts_of(model)
    return place(facts if stats is None else stats, Placement.contiguous(facts.experts, devices))


@contextmanager
def attach(
    model: nn.Module,
    policy: Policy | str | Mapping[str, Any],
    stats: Stats | None = None,
    *,
    budgets: Sequence[int] | None = None,
    finished_ids: frozenset[int] | None = None,
    prefill: Policy | str | None = None,
    graphs: bool = True,
) -> Iterator[Run]:
    """Re-route the model's decode steps by `policy` inside the `with` block, and restore the model afterwards.

    `policy` may be a config that `moebudget tune` wrote, read from JSON. A forward pass is a decode step if it feeds
    one token per row on top of a filled cache and is not part of the prompt of `generate`. Everything else is prefill
    and stays bit for bit what the model computes. Rows that are fed one of `finished_ids` (default: the
    end-of-sequence and padding tokens of the model or the `generate` call) have finished: they do not vote, and they
    add no expert to those fetched. Pass `finished_ids=frozenset()` if a custom loop feeds such tokens within a text.
    Steps that feed several tokens per row (assisted generation) count as prefill unless `run.decode_steps` names
    their rows.

    `budgets`, one per Mixture-of-Experts layer in order, override the policy's budget. Prefill keeps its native routes
    unless `prefill` names a policy for it, such as ExFold's `exfold_prefill:p=4`. All tokens of a forward pass that
    are not in decode steps, padding included, are one batch to that policy.

    `generate` compiles static-cache decoding on some devices. That is switched off while a policy is attached, because
    the hooks count on the host. On a GPU a layer's policy is captured in a CUDA graph at its second step with the same
    number of rows. `graphs=False` runs it launch by launch; use it for a policy that reads tensors on the host.

    Raises UnsupportedModelError, StatsError or MissingStatisticError before anything is changed, RuntimeError if a
    policy is attached to the model already. Warns on exit if there was no decode step.
    """
    policy, stats, budgets = resolve(policy, stats, budgets)
    prefill = parse(prefill) if isinstance(prefill, str) else prefill
    if getattr(model, MARK, None) is not None:
        raise RuntimeError(
            f"a policy is attached to this model already ({getattr(model, MARK)!s}); leave that block first"
        )
    run = Run(model, policy, stats, finished_ids, prefill, graphs)
    if budgets is not None:
        run.set_budget(budgets)
    with ExitStack() as undo:
        setattr(model, MARK, policy)
        undo.callback(delattr, model, MARK)
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            had, before = hasattr(generation, "disable_compile"), getattr(generation, "disable_compile", None)
            generation.disable_compile = True
            undo.callback(
                (lambda: setattr(generation, "disable_compile", before))
                if had
                else (lambda: delattr(generation, "disable_compile"))
            )
        if hasattr(model, "_prefill"):
            undo.callback(restore, model, "_prefill", model.__dict__.get("_prefill"))
            model._prefill = run._watch_prompt(model._prefill)  # type: ignore[arg-type,assignment]
        undo.callback(model.register_forward_pre_hook(run._before_forward, with_kwargs=True).remove)
        undo.callback(model.register_forward_hook(run._after_forward).remove)
        for position, layer in enumerate(run.layers):
            hook = run._before_experts(position)
            undo.callback(layer.experts.register_forward_pre_hook(hook, with_kwargs=True).remove)
            undo.callback(layer.experts.register_forward_hook(run._after_experts).remove)
        yield run
    if run.forwards and not run.counters.steps:
        warnings.warn(
            f"policy {policy.name!r} was active in 0 decode steps of {run.forwards} forward passes: they were all "
            "prefill (is the cache off, or is this a log-likelihood task?), so the model ran with native routing",
            stacklevel=3,
        )
