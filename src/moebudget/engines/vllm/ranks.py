"""Ranks of an engine: the placement of experts, fetched experts per rank, and a check that all ranks choose alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moebudget.core.placement import Placement
from moebudget.core.policy import Policy
from moebudget.core.stats import ModelFacts, Stats, place
from moebudget.core.types import RowKind
from moebudget.engines.vllm.compat import UnsupportedEngineError


class RankedLayer(Protocol):
    """A layer of vLLM on this rank, see `hook.Layer`."""

    name: str
    runner: Any
    rank_counters: RankCounters | None


def expert_ranks() -> Callable[[Any], list[Any]]:
    """A function that gathers one host object from every expert-parallel rank, in the order of the ranks."""
    from vllm.distributed.parallel_state import get_ep_group

    group = get_ep_group()

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    return gather


def held_experts(layer: RankedLayer) -> list[int]:
    """Experts (with EPLB: copies) that this rank holds. vLLM's map has -1 for those of other ranks; None: all here."""
    expert_map = layer.runner.routed_experts.expert_map_manager.expert_map
    experts = int(layer.runner.router.global_num_experts)
    if expert_map is None:
        return list(range(experts))
    return [expert for expert, local in enumerate(expert_map[:experts].tolist()) if local >= 0]


def read_placements(layers: Sequence[RankedLayer], gather: Callable[[Any], list[Any]]) -> list[Placement]:
    """Each layer's placement, from the experts that every rank holds; `gather` collects them from all ranks.

    Raises UnsupportedEngineError if several ranks hold an expert, or none does.
    """
    by_rank = gather([held_experts(layer) for layer in layers])
    placements = []
    for position, layer in enumerate(layers):
        ranks = [held[position] for held in by_rank]
        experts = int(layer.runner.router.global_num_experts)
        times = torch.bincount(torch.tensor([expert for held in ranks for expert in held]), minlength=experts)
        wrong = (times != 1).nonzero()[:, 0].tolist()
        if wrong:
            raise UnsupportedEngineError(
                f"{layer.name}: {int(times[wrong[0]])} of {len(ranks)} ranks hold vLLM's expert {wrong[0]}, but "
                "moebudget counts it as fetched once, by a single rank; please report this engine's arguments"
            )
        device = torch.empty(experts, dtype=torch.int64)
        for rank, held in enumerate(ranks):
            device[held] = rank
        placements.append(Placement(device, len(ranks)))
    return placements


def stats_with_placement(policy: Policy, stats: Stats | ModelFacts, placements: Sequence[Placement]) -> Stats:
    """Statistics (or, without any, the model's facts) with the engine's placement, which replaces any other.

    Keeps the costs of experts in the statistics. Raises UnsupportedEngineError if one device holds all experts.
    """
    if placements[0].devices < 2:
        raise UnsupportedEngineError(
            f"policy {policy.name!r} reads the devices of experts, and here one device holds them all (tensor "
            "parallelism alone splits each over all ranks): start with --enable-expert-parallel on several ranks, or "
            "use a policy without a placement, such as base"
        )
    known = {} if isinstance(stats, ModelFacts) else stats.tensors
    placed = place(stats, placements)
    cost = {name: tensor for name, tensor in known.items() if name == "placement_cost"}
    return Stats(placed.facts, {**placed.tensors, **cost}, placed.info)


class Copies:
    """The copy of each chosen expert that EPLB is about to run: vLLM's own mapping, repeated without its records.

    After the policy has chosen, vLLM spreads the rows of an expert over its copies by their position in the batch. It
    writes new maps into the same tensors whenever it moves experts.
    """

    def __init__(self, router: Any, device: torch.device) -> None:
        from vllm.model_executor.layers.fused_moe.router import base_router

        self.router, self.module = router, base_router
        with torch.inference_mode(False):
            self.load = torch.zeros(int(router.global_num_experts), dtype=torch.int32, device=device)
            self.record = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """Ids [T, K] of experts -> ids [T, K] of copies, vLLM's physical experts."""
        state = self.router.eplb_state
        return self.module.eplb_map_to_physical_and_record(  # type: ignore[no-any-return]
            topk_ids=ids,
            expert_load_view=self.load,
            logical_to_physical_map=state.logical_to_physical_map,
            logical_replica_count=state.logical_replica_count,
            record_enabled=self.record,
            num_unpadded_tokens=None,
        )


class RankCounters:
    """Counters of one layer's ranks, in device tensors that captured graphs write.

    fetched [R + 1] float64: experts (with EPLB: copies) fetched by each of R ranks, and by the rank with the most in
    each step; None on one device.
    compared [2] float64: steps whose choice was compared over all ranks, and steps in which ranks differed; None
    unless debugging.
    """

    def __init__(
        self,
        placement: Placement,
        device: torch.device,
        ranks: int = 1,
        add: Callable[[Tensor], Tensor] | None = None,
        copies: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`add` sums a tensor over `ranks` ranks; None: compare nothing. `placement` is that of `copies`, if any."""
        self.ranks, self.add, self.copies = ranks, add, copies
        with torch.inference_mode(False):
            self.device = placement.device.to(device)
            several = placement.devices > 1
            self.fetched = torch.zeros(placement.devices + 1, dtype=torch.float64, device=device) if several else None
            self.compared = None if add is None else torch.zeros(2, dtype=torch.float64, device=device)

    def clear(self) -> None:
        """Set all counters to 0."""
        for counts in (self.fetched, self.compared):
            if counts is not None:
                counts.zero_()

    def __call__(self, ids: Tensor, kind: Tensor) -> None:
        """Count a step with executed ids [T, K] and row kinds [T]."""
        if self.fetched is not None:
            count_fetched(ids if self.copies is None else self.copies(ids), kind, self.device, self.fetched)
        if self.add is not None:
            assert self.compared is not None
            # Padding holds leftovers in memory, and while vLLM warms up for a capture, so do its sums.
            local = fingerprint(ids.masked_fill((kind == RowKind.PAD.value)[:, None], -1))
            voted = (kind == RowKind.DECODE.value).any()
            # All ranks hold the same number if and only if on every rank the sum is R times the local number.
            differ = (self.add(local.clone()) != self.ranks * local).any()
            self.compared += torch.stack([voted, voted & differ])


def count_fetched(ids: Tensor, kind: Tensor, device: Tensor, totals: Tensor) -> None:
    """Add a step to totals [R + 1]: experts that the voting rows fetch on each rank, and on the rank with the most.

    ids [T, K], kind [T] int8 RowKind, device [N] int64 the rank of an expert.
    """
    if totals.is_cuda:
        from moebudget.kernels.ranks import count_ranks

        count_ranks(ids, kind, device, totals)
        return
    n, ranks = len(device), len(totals) - 1
    runs = torch.where((kind == RowKind.DECODE.value)[:, None], ids.long(), n).reshape(-1)
    experts = totals.new_zeros(n + 1).scatter_(0, runs, 1.0)[:n]
    fetched = totals.new_zeros(ranks).scatter_add_(0, device, experts)
    totals[:ranks] += fetched
    totals[ranks] += fetched.amax()


def fingerprint(ids: Tensor) -> Tensor:
    """Hash of ids [T, K] and their positions: three numbers below 2^16, which float32 sums exactly over 256 ranks.

    Three, because vLLM takes a tensor of a multiple of 16 bytes for one of the model and skips its sums in warm-ups.
    """
    position = torch.arange(ids.numel(), device=ids.device)
    x = position * 65536 + ids.reshape(-1).long()
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):  # splitmix64
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * factor
    total = x.sum()
    return torch.stack([(total >> shift) & 0xFFFF for shift in (0, 16, 32)]).float()


def rank_state(layers: Sequence[RankedLayer]) -> dict[str, Any]:
    """The layers' rank counters in plain types, as parts of a worker's state.

    expert_parallel (None on one device): ranks; fetched, by rank, and fetched_most, by the rank with the most, summed
    over layers and steps; per_layer, both per layer. debug (None unless debugging): compared and different, counted in
    layers and steps.
    """
    counters = [layer.rank_counters for layer in layers if layer.rank_counters is not None]
    fetched = [counts.fetched.tolist() for counts in counters if counts.fetched is not None]
    compared = [counts.compared.tolist() for counts in counters if counts.compared is not None]
    sums = [sum(column) for column in zip(*fetched, strict=True)]
    counts = [sum(column) for column in zip(*compared, strict=True)]
    return {
        "expert_parallel": {
            "ranks": len(sums) - 1, "fetched": sums[:-1], "fetched_most": sums[-1], "per_layer": fetched,
        } if sums else None,
        "debug": dict(zip(("compared", "different"), counts, strict=True)) if counts else None,
    }  # fmt: skip


def check_agreement(layers: Sequence[RankedLayer]) -> None:
    """Raise RuntimeError that names the layer if ranks have chosen differently; waits for the device."""
    for layer in layers:
        compared = None if layer.rank_counters is None else layer.rank_counters.compared
        if compared is not None and compared[1]:
            steps, different = compared.tolist()
            raise RuntimeError(
                f"{layer.name}: ranks chose different experts in {different:.0f} of {steps:.0f} steps, so sums over "
                "them are wrong; please report this with the engine's arguments"
            )
