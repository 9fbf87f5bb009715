"""Least-frequently-used cache of experts: decides which experts a device's slots hold, but moves no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

Load = tuple[int, int]  # an expert and the slot that it goes to


@dataclass(frozen=True, slots=True)
class Fetch:
    """Cache use of one step: experts that were held, experts that were copied, and passes in which it ran."""

    hits: int
    misses: int
    passes: int


class LfuCache:
    """A cache of `slots` experts, each named by a whole number, that evicts the least frequently used expert.

    A use is a step that executes the expert, for any number of rows. Uses are remembered after an eviction. Among
    equally used experts, the one unused for longest is evicted. An expert that the running pass needs is never
    evicted.

    Call `plan`, then for every pass `reserve`, copy, `commit`. An expert counts as held only after its copy was
    issued, so an expert whose copy failed is copied again. Raises ValueError if `slots` is below 1.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1, because a step needs at least one expert")
        self.slots = slots
        self.slot_of: dict[int, int] = {}
        self._held: list[int | None] = [None] * slots
        self._uses: Counter[int] = Counter()
        self._last: dict[int, int] = {}
        self._clock = 0

    def plan(self, needed: Iterable[int]) -> list[list[int]]:
        """Count a step's use of these experts, and split them into passes that fit; the first has the held experts.

        A step that needs more experts than there are slots runs in several passes. All passes after the first use half
        of the slots, so that they do not evict the most used experts.
        """
        needed = sorted(set(needed))
        self._clock += 1
        self._uses.update(needed)
        self._last.update(dict.fromkeys(needed, self._clock))
        held = [e for e in needed if e in self.slot_of]
        missing = sorted((e for e in needed if e not in self.slot_of), key=lambda e: self._uses[e])
        room = self.slots - len(held)
        later, width = missing[room:], max(1, self.slots // 2)
        passes = [held + missing[:room], *(later[i : i + width] for i in range(0, len(later), width))]
        return [group for group in passes if group]

    def reserve(self, group: Iterable[int]) -> list[Load]:
        """Free slots for the experts of the group that are not held; their previous experts are evicted at once."""
        group = list(group)
        missing = [e for e in group if e not in self.slot_of]
        if not missing:
            return []
        kept = {self.slot_of[e] for e in group if e in self.slot_of}
        free = sorted((s for s in range(self.slots) if s not in kept), key=self._eviction_order)[: len(missing)]
        for slot in free:
            expert, self._held[slot] = self._held[slot], None
            if expert is not None:
                del self.slot_of[expert]
        return list(zip(missing, free, strict=True))

    def _eviction_order(self, slot: int) -> tuple[int, int, int]:
        expert = self._held[slot]
        return (-1, -1, slot) if expert is None else (self._uses[expert], self._last[expert], expert)

    def commit(self, loads: Iterable[Load]) -> None:
        """Record that the copies of these experts were issued."""
        for expert, slot in loads:
            self._held[slot], self.slot_of[expert] = expert, slot

    def step(self, needed: Iterable[int]) -> Fetch:
        """Plan, reserve and commit a whole step, for counting without copies."""
        misses, size = 0, 0
        passes = self.plan(needed)
        for group in passes:
            loads = self.reserve(group)
            self.commit(loads)
            misses, size = misses + len(loads), size + len(group)
        return Fetch(size - misses, misses, len(passes))
