"""Which experts lie in a device's slots: a cache that gives up the least frequently used. It moves no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

Load = tuple[int, int]  # an expert and the slot that it goes to


@dataclass(frozen=True, slots=True)
class Fetch:
    """What one step found in the cache: experts that were there, experts that were copied, parts it ran in."""

    hits: int
    misses: int
    passes: int


class LfuCache:
    """`slots` places for experts, named by any whole number. The least frequently used one gives way.

    A use is a step that runs the expert, however many rows do; uses are remembered after an expert was given up. Of
    equally used ones the longest unused gives way. An expert that the running pass needs never does.

    `plan`, then for every pass `reserve`, copy, `commit`: an expert counts as held only after its copy was ordered,
    so one that failed is fetched again. Raises ValueError below one slot.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1, or no expert could run")
        self.slots = slots
        self.slot_of: dict[int, int] = {}
        self._held: list[int | None] = [None] * slots
        self._uses: Counter[int] = Counter()
        self._last: dict[int, int] = {}
        self._clock = 0

    def plan(self, needed: Iterable[int]) -> list[list[int]]:
        """Count a step's use of these experts and split them into passes that fit, those held already first.

        A step that needs more than the slots hold runs in several passes. All but the first use half of the slots, so
        that the most used experts outlast it.
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
        """Free slots for those of the group that are not held; what lay there is given up at once."""
        group = list(group)
        missing = [e for e in group if e not in self.slot_of]
        if not missing:
            return []
        kept = {self.slot_of[e] for e in group if e in self.slot_of}
        free = sorted((s for s in range(self.slots) if s not in kept), key=self._worth)[: len(missing)]
        for slot in free:
            expert, self._held[slot] = self._held[slot], None
            if expert is not None:
                del self.slot_of[expert]
        return list(zip(missing, free, strict=True))

    def _worth(self, slot: int) -> tuple[int, int, int]:
        expert = self._held[slot]
        return (-1, -1, slot) if expert is None else (self._uses[expert], self._last[expert], expert)

    def commit(self, loads: Iterable[Load]) -> None:
        """The copies of these were ordered."""
        for expert, slot in loads:
            self._held[slot], self.slot_of[expert] = expert, slot

    def step(self, needed: Iterable[int]) -> Fetch:
        """A whole step at once, for counting."""
        misses, size = 0, 0
        passes = self.plan(needed)
        for group in passes:
            loads = self.reserve(group)
            self.commit(loads)
            misses, size = misses + len(loads), size + len(group)
        return Fetch(size - misses, misses, len(passes))
