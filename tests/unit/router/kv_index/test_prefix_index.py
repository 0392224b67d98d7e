"""The prefix index: compared with a brute-force reference, and its limits of memory."""

import random
import tracemalloc

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fleet.core.ids import StoreId, WorkerId
from fleet.router.kv_index.prefix_index import Holder, PrefixIndex, engine_cache_holder, keys_of, store_tier_holder
from kvstore.block import chain
from tests.support.builders import a_prompt

A, B, C = (engine_cache_holder(WorkerId(name)) for name in "abc")


def an_index(**held: list[int]) -> PrefixIndex:
    index = PrefixIndex()
    for name, keys in held.items():
        holder = engine_cache_holder(WorkerId(name))
        index.add(holder, capacity=1000)
        index.stored(holder, keys)
    return index


def test_each_holder_gets_its_own_leading_blocks():
    index = an_index(a=[1, 2, 3], b=[1], c=[1, 2, 3, 4, 5])

    assert index.longest([1, 2, 3, 4, 9]) == {A: 3, B: 1, C: 4}


def test_blocks_behind_a_hole_do_not_count():
    index = an_index(a=[1, 2, 3, 4, 5, 6, 7, 8], b=[1, 2, 3])
    index.removed(A, [4])

    assert index.longest([1, 2, 3, 4, 5, 6, 7, 8]) == {A: 3, B: 3}


def test_hole_of_one_holder_does_not_affect_another():
    index = an_index(a=list(range(100)), b=list(range(100)))
    index.removed(A, [50])

    assert index.longest(list(range(100))) == {A: 50, B: 100}


def test_run_does_not_continue_behind_a_common_hole():
    index = an_index(a=[1, 4], b=[1, 2, 4])

    assert index.longest([1, 2, 3, 4]) == {A: 1, B: 2}


def test_unknown_prompt_has_no_holders():
    index = an_index(a=[2, 3])

    assert index.longest([1, 2, 3]) == {}
    assert index.longest([]) == {}


def test_removed_holder_frees_blocks_and_bit():
    index = an_index(a=[1, 2], b=[2, 3])

    index.remove(A)

    assert len(index) == 2
    assert index.longest([1, 2]) == {}
    index.add(C, capacity=10)
    index.stored(C, [2])
    assert index.longest([2, 3]) == {B: 2, C: 1}
    index.check()


def test_restarts_do_not_lengthen_the_masks():
    index = an_index(a=[1])
    for restart in range(300):
        holder = engine_cache_holder(WorkerId(f"restart-{restart}"))
        index.add(holder, capacity=10)
        index.stored(holder, [1])
        index.remove(holder)

    assert max(index.holders) <= 2


def test_holder_never_exceeds_its_capacity():
    index = PrefixIndex()
    index.add(A, capacity=3)

    index.stored(A, [1, 2, 3, 4])

    assert index.held_by(A) == 3
    assert index.overflowed == 1
    index.removed(A, [1])
    index.stored(A, [4])
    assert index.held_by(A) == 3


def test_block_stored_twice_counts_once():
    index = an_index(a=[1, 2])

    index.stored(A, [1, 2])

    assert index.held_by(A) == 2
    index.removed(A, [1, 1, 7])
    assert index.held_by(A) == 1
    index.check()


def test_memory_is_freed_when_all_holders_leave():
    rng = random.Random(7)
    index = PrefixIndex()
    tracemalloc.start()
    baseline = tracemalloc.get_traced_memory()[0]
    for _ in range(5):
        index.add(A, capacity=5_000)
        index.add(B, capacity=5_000)
        for _ in range(20_000):
            index.stored(A, [rng.getrandbits(64)])
            index.stored(B, [rng.getrandbits(64)])
        full = tracemalloc.get_traced_memory()[0]
        assert index.held_by(A) == 5_000
        index.remove(A)
        index.remove(B)
    left = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()

    assert full - baseline > 1_000_000
    assert left - baseline < 10_000


BYTES_A_BLOCK = 400
"""Maximum bytes for a block of one worker: two table entries, an integer, and the unused room of tables that have just grown."""


def test_day_of_churn_stays_within_memory_cap():
    """Simulate a day: all caches are always full, their content is replaced each hour, and one of four workers restarts each hour."""
    rng = random.Random(5)
    workers, capacity = [engine_cache_holder(WorkerId(f"w{number}")) for number in range(4)], 1_500
    tracemalloc.start()
    index = PrefixIndex()
    baseline = tracemalloc.get_traced_memory()[0]
    cap = BYTES_A_BLOCK * capacity * len(workers)
    latest: dict[Holder, list[int]] = {}
    peaks = []
    for _ in range(24):
        tracemalloc.reset_peak()
        for worker in workers:
            if worker in index and rng.random() < 0.25:
                index.remove(worker)
            if worker not in index:
                index.add(worker, capacity)
                latest[worker] = []
            for _ in range(10):
                new = [rng.getrandbits(64) for _ in range(capacity // 5)]
                index.removed(worker, latest[worker][: len(latest[worker]) + len(new) - capacity])
                latest[worker] = [*latest[worker], *new][-capacity:]
                index.stored(worker, new)
        peaks.append(tracemalloc.get_traced_memory()[1] - baseline)
    held = index.blocks
    latest.clear()
    for worker in workers:
        index.remove(worker)
    left = tracemalloc.get_traced_memory()[0] - baseline
    tracemalloc.stop()

    assert set(held.values()) == {capacity}
    assert max(peaks) < cap
    assert max(peaks[12:]) < 1.1 * max(peaks[:12])
    assert left < max(peaks) / 100


def test_block_keys_are_the_first_eight_hash_bytes():
    hashes = chain(a_prompt(96), 32)

    assert keys_of(hashes) == tuple(int.from_bytes(name[:8], "little") for name in hashes)


def test_worker_and_store_of_one_name_are_distinct_holders():
    assert engine_cache_holder(WorkerId("x")) != store_tier_holder(StoreId("x"), "")


KEYS = st.integers(0, 11)
HOLDERS = st.sampled_from([Holder(name) for name in "abcd"])


class IndexEqualsOracle(RuleBasedStateMachine):
    """Comparison with a dictionary of sets in random histories. Few keys and holders let rare cases happen often."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.oracle: dict[Holder, set[int]] = {}

    @rule(holder=HOLDERS)
    def join(self, holder: Holder) -> None:
        if holder not in self.oracle:
            self.index.add(holder, capacity=12)
            self.oracle[holder] = set()

    @precondition(lambda self: self.oracle)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.oracle)))
        self.index.remove(holder)
        del self.oracle[holder]

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), start=KEYS, length=st.integers(1, 12))
    def store(self, data: st.DataObject, start: int, length: int) -> None:
        holder = data.draw(st.sampled_from(sorted(self.oracle)))
        keys = range(start, min(12, start + length))
        self.index.stored(holder, keys)
        self.oracle[holder].update(keys)

    @precondition(lambda self: self.oracle)
    @rule(data=st.data(), keys=st.lists(KEYS, max_size=4))
    def evict(self, data: st.DataObject, keys: list[int]) -> None:
        holder = data.draw(st.sampled_from(sorted(self.oracle)))
        self.index.removed(holder, keys)
        self.oracle[holder].difference_update(keys)

    @precondition(lambda self: self.oracle)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(sorted(self.oracle)))
        self.index.cleared(holder)
        self.oracle[holder].clear()

    @rule(prompt=st.lists(KEYS, unique=True, max_size=12) | st.just(list(range(12))))
    def ask(self, prompt: list[int]) -> None:
        assert self.longest(prompt) == self.expected(prompt)

    @invariant()
    def consistent(self) -> None:
        self.index.check()
        assert self.longest(list(range(12))) == self.expected(list(range(12)))
        assert len(self.index) == len(set().union(*self.oracle.values()))

    def longest(self, prompt: list[int]) -> dict[Holder, int]:
        """Return the answer of the index, after a check that it does not depend on the bisection threshold."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fleet.router.kv_index.prefix_index.WORTH_BISECTING", 1)
            bisected = self.index.longest(prompt)
        assert self.index.longest(prompt) == bisected
        return bisected

    def expected(self, prompt: list[int]) -> dict[Holder, int]:
        depths = {}
        for holder, held in self.oracle.items():
            depth = 0
            while depth < len(prompt) and prompt[depth] in held:
                depth += 1
            if depth:
                depths[holder] = depth
        return depths


TestIndexEqualsOracle = IndexEqualsOracle.TestCase
