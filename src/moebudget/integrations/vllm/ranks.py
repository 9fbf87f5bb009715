"""The ranks of an engine: where its experts lie, what each of them fetches, and a proof that all choose alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moebudget.integrations.vllm.board import PADDING, VOTES
from moebudget.integrations.vllm.layout import UnsupportedEngineError
from moebudget.placement import Placement
from moebudget.policy import Policy
from moebudget.stats import ModelFacts, Stats, place


class Placed(Protocol):
    """A layer of vLLM, see `hook.Layer`."""

    name: str
    runner: Any
    watch: Watch | None


def expert_ranks() -> Callable[[Any], list[Any]]:
    """A function that gathers one host object of every expert-parallel rank, in the order of the ranks."""
    from vllm.distributed.parallel_state import get_ep_group

    group = get_ep_group()

    def gather(own: Any) -> list[Any]:
        found: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(found, own, group=group.cpu_group)
        return found

    return gather


def held(layer: Placed) -> list[int]:
    """The experts (of EPLB: copies) that this rank holds: vLLM's map has -1 for others, and is None without others."""
    where = layer.runner.routed_experts.expert_map_manager.expert_map
    experts = int(layer.runner.router.global_num_experts)
    if where is None:
        return list(range(experts))
    return [expert for expert, local in enumerate(where[:experts].tolist()) if local >= 0]


def read_placements(layers: Sequence[Placed], gather: Callable[[Any], list[Any]]) -> list[Placement]:
    """Each layer's placement, from what every rank says of its own experts: `gather` returns it of all ranks.

    Raises UnsupportedEngineError if an expert lies on several ranks or on none.
    """
    everyone = gather([held(layer) for layer in layers])
    placements = []
    for position, layer in enumerate(layers):
        ranks = [rank[position] for rank in everyone]
        experts = int(layer.runner.router.global_num_experts)
        times = torch.bincount(torch.tensor([expert for rank in ranks for expert in rank]), minlength=experts)
        wrong = (times != 1).nonzero()[:, 0].tolist()
        if wrong:
            raise UnsupportedEngineError(
                f"{layer.name}: vLLM's expert {wrong[0]} lies on {int(times[wrong[0]])} of {len(ranks)} ranks; "
                "moebudget counts it as fetched once, on the one rank that holds it; please report this engine's "
                "arguments"
            )
        device = torch.empty(experts, dtype=torch.int64)
        for rank, some in enumerate(ranks):
            device[some] = rank
        placements.append(Placement(device, len(ranks)))
    return placements


def placed(policy: Policy, known: Stats | ModelFacts, placements: Sequence[Placement]) -> Stats:
    """The statistics (or, without any, the model's facts) with the engine's placement, in the place of any other.

    Costs of experts that the statistics hold stay. Raises UnsupportedEngineError where all experts lie on one device.
    """
    if placements[0].devices < 2:
        raise UnsupportedEngineError(
            f"policy {policy.name!r} looks at the devices of experts, and here every expert lies on one (tensor "
            "parallelism alone splits each over all ranks): start with --enable-expert-parallel on several ranks, or "
            "use a policy without a placement, such as base"
        )
    stats = place(known, placements)
    costs = {} if isinstance(known, ModelFacts) else known.tensors
    return Stats(
        stats.facts, {**stats.tensors, **{n: t for n, t in costs.items() if n == "placement_cost"}}, stats.info
    )


class Copies:
    """Which copy of each chosen expert EPLB is about to run: vLLM's own mapping, once more and without its records.

    vLLM deals the rows of an expert out over its copies by their place in the batch, after the policy has chosen, and
    writes new maps into the same tensors whenever it moves experts.
    """

    def __init__(self, router: Any, device: torch.device) -> None:
        from vllm.model_executor.layers.fused_moe.router import base_router

        self.router, self.module = router, base_router
        with torch.inference_mode(False):
            self.load = torch.zeros(int(router.global_num_experts), dtype=torch.int32, device=device)
            self.record = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [T, K] of experts -> ids [T, K] of copies, vLLM's physical experts."""
        state = self.router.eplb_state
        return self.module.eplb_map_to_physical_and_record(  # type: ignore[no-any-return]
            topk_ids=ids,
            expert_load_view=self.load,
            logical_to_physical_map=state.logical_to_physical_map,
            logical_replica_count=state.logical_replica_count,
            record_enabled=self.record,
            num_unpadded_tokens=None,
        )


class Watch:
    """What is noted of one layer's chosen experts, step by step, in device tensors that captured graphs write.

    fetched [R + 1] float64: experts (of EPLB: copies) of each rank, and of the rank with most; None on one device.
    compared [2] float64: steps whose choice was compared over all ranks, and those in which ranks differed; None
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
        """`add` sums a tensor over `ranks` ranks; None: nothing is compared. `placement` is that of `copies`."""
        self.ranks, self.add, self.copies = ranks, add, copies
        with torch.inference_mode(False):
            self.device = placement.device.to(device)
            several = placement.devices > 1
            self.fetched = torch.zeros(placement.devices + 1, dtype=torch.float64, device=device) if several else None
            self.compared = None if add is None else torch.zeros(2, dtype=torch.float64, device=device)

    def clear(self) -> None:
        for counts in (self.fetched, self.compared):
            if counts is not None:
                counts.zero_()

    def __call__(self, ids: Tensor, rows: Tensor) -> None:
        """ids [T, K], row classes [T]."""
        if self.fetched is not None:
            count_fetched(ids if self.copies is None else self.copies(ids), rows, self.device, self.fetched)
        if self.add is not None:
            assert self.compared is not None
            # Padding holds what was left in memory, and while vLLM warms up for a capture its sums do, too.
            own, voted = fingerprint(ids.masked_fill((rows == PADDING)[:, None], -1)), (rows == VOTES).any()
            # All ranks hold the same number if and only if the sum is that many times one's own, on every rank.
            other = (self.add(own.clone()) != self.ranks * own).any()
            self.compared += torch.stack([voted, voted & other])


def count_fetched(ids: Tensor, rows: Tensor, device: Tensor, totals: Tensor) -> None:
    """Add a step to totals [R + 1]: experts of each rank that a voting row runs, and of the rank with most."""
    if totals.is_cuda:
        from moebudget.kernels.ranks import count_ranks

        count_ranks(ids, rows, device, totals)
        return
    n, ranks = len(device), len(totals) - 1
    runs = torch.where((rows == VOTES)[:, None], ids.long(), n).reshape(-1)
    found = totals.new_zeros(n + 1).scatter_(0, runs, 1.0)[:n]
    fetched = totals.new_zeros(ranks).scatter_add_(0, device, found)
    totals[:ranks] += fetched
    totals[ranks] += fetched.amax()


def fingerprint(ids: Tensor) -> Tensor:
    """A hash of ids [T, K] and their places: three numbers below 2^16, which float32 sums exactly over 256 ranks.

    Three, because vLLM takes a multiple of 16 bytes for a tensor of the model, whose sums it leaves out in warm-ups.
    """
    place = torch.arange(ids.numel(), device=ids.device)
    x = place * 65536 + ids.reshape(-1).long()
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):  # splitmix64
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * factor
    total = x.sum()
    return torch.stack([(total >> shift) & 0xFFFF for shift in (0, 16, 32)]).float()


def watched(layers: Sequence[Placed]) -> dict[str, Any]:
    """What the layers' watches have counted, in plain types, for a worker's state.

    expert_parallel (None on one device): ranks; fetched, by rank, and fetched_most, of the rank with most, summed over
    layers and steps; per_layer, the same. debug (None unless debugging): compared and different, in layers and steps.
    """
    watches = [layer.watch for layer in layers if layer.watch is not None]
    fetched = [watch.fetched.tolist() for watch in watches if watch.fetched is not None]
    compared = [watch.compared.tolist() for watch in watches if watch.compared is not None]
    sums = [sum(column) for column in zip(*fetched, strict=True)]
    counts = [sum(column) for column in zip(*compared, strict=True)]
    return {
        "expert_parallel": {
            "ranks": len(sums) - 1, "fetched": sums[:-1], "fetched_most": sums[-1], "per_layer": fetched,
        } if sums else None,
        "debug": dict(zip(("compared", "different"), counts, strict=True)) if counts else None,
    }  # fmt: skip


def check_agreement(layers: Sequence[Placed]) -> None:
    """RuntimeError that names the layer if ranks were found to choose differently; waits for the device."""
    for layer in layers:
        if layer.watch is not None and layer.watch.compared is not None and layer.watch.compared[1]:
            steps, different = layer.watch.compared.tolist()
            raise RuntimeError(
                f"{layer.name}: ranks chose different experts in {different:.0f} of {steps:.0f} steps, so sums over "
                "them are wrong; please report this with the engine's arguments"
            )
