"""The cache of experts: what it evicts, how it splits a step into passes, and its counts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from moebudget.engines.transformers.expert_cache import Fetch, LfuCache


def holding(cache: LfuCache) -> set[int]:
    return set(cache.slot_of)


def test_a_frequently_used_expert_outlasts_a_recently_used_one() -> None:
    cache = LfuCache(2)
    for needed in ([1], [1], [2], [3]):
        cache.step(needed)
    assert holding(cache) == {1, 3}


def test_of_equally_used_experts_the_longest_unused_is_evicted() -> None:
    cache = LfuCache(3)
    for needed in ([7], [5], [6], [4]):
        cache.step(needed)
    assert holding(cache) == {4, 5, 6}


def test_uses_are_remembered_after_an_eviction() -> None:
    cache = LfuCache(1)
    for needed in ([1], [1], [1], [2], [1]):
        cache.step(needed)
    two = LfuCache(2)
    for needed in ([1], [1], [1], [2], [2], [3], [1], [4]):  # 1 has four uses, of which one was a return
        two.step(needed)
    assert holding(cache) == {1}
    assert holding(two) == {1, 4}


def test_a_pass_never_evicts_an_expert_that_it_needs() -> None:
    """A fresh expert has the fewest uses, so it would be evicted first if its pass did not protect it."""
    cache = LfuCache(3)
    for _ in range(5):
        cache.step([1, 2, 3])
    for group in cache.plan([4, 5, 6]):
        loads = cache.reserve(group)
        cache.commit(loads)
        assert set(group) <= holding(cache)
    assert holding(cache) == {4, 5, 6}


def test_a_step_that_needs_more_experts_than_slots_runs_all_and_keeps_the_most_used() -> None:
    cache = LfuCache(4)
    for _ in range(9):
        cache.step([0, 1])
    seen: list[int] = []
    for group in cache.plan(range(12)):
        assert len(group) <= 4
        cache.commit(cache.reserve(group))
        assert set(group) <= holding(cache)
        seen += group
    assert sorted(seen) == list(range(12))
    assert {0, 1} <= holding(cache)
    assert seen[:2] == [0, 1], "held experts run before they are evicted"


def test_an_expert_whose_copy_failed_is_not_held() -> None:
    cache = LfuCache(2)
    cache.step([1, 2])
    (group,) = cache.plan([3])
    ((expert, slot),) = cache.reserve(group)  # and the copy fails
    assert expert == 3
    assert holding(cache) == {1, 2} - {[1, 2][slot]}
    assert cache.step([3]) == Fetch(hits=0, misses=1, passes=1)
    assert len(holding(cache)) == 2, "the freed slot is used before another expert is evicted"


def test_counts_equal_a_plain_simulation() -> None:
    """Compared with a second implementation of least-frequently-used, over steps that fit into the slots."""
    rng = random.Random(0)
    cache, held, uses, last = LfuCache(6), set[int](), Counter[int](), dict[int, int]()
    for clock in range(300):
        needed = set(rng.choices(range(20), weights=[1 / (1 + e) for e in range(20)], k=5))
        uses.update(needed)
        last |= dict.fromkeys(needed, clock)
        hits = len(needed & held)
        assert cache.step(needed) == Fetch(hits, len(needed) - hits, 1)
        held |= needed
        while len(held) > 6:
            held.remove(min(held - needed, key=lambda e: (uses[e], last[e], e)))
        assert holding(cache) == held
        assert sorted(cache.slot_of.values()) == sorted(set(cache.slot_of.values()))


def test_a_step_without_experts_has_no_pass() -> None:
    assert LfuCache(2).step([]) == Fetch(0, 0, 0)


@pytest.mark.parametrize("slots", [0, -3])
def test_a_cache_without_slots_is_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"slots={slots} must be at least 1"):
        LfuCache(slots)
