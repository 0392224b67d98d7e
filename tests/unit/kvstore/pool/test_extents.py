import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.clock import Nanos
from kvstore.eviction.lru import LruEviction
from kvstore.pool.extents import PAGE_BYTES, FreeExtents
from kvstore.pool.machine import BlockMachine
from tests.support.kvstore.builders import LEASE, a_namespace

PAGES = 24


def test_freed_space_is_reused_for_another_size():
    extents = FreeExtents(8 * PAGE_BYTES)
    small = [extents.take(PAGE_BYTES) for _ in range(8)]
    assert extents.take(1) is None

    for offset in small:
        extents.give_back(offset, PAGE_BYTES)

    assert extents.take(8 * PAGE_BYTES) == 0


def test_smallest_fitting_extent_is_taken():
    extents = FreeExtents(8 * PAGE_BYTES)
    first = extents.take(2 * PAGE_BYTES)
    extents.take(PAGE_BYTES)
    extents.give_back(first, 2 * PAGE_BYTES)

    assert extents.take(2 * PAGE_BYTES) == first


def test_remainder_below_a_page_is_never_taken():
    extents = FreeExtents(2 * PAGE_BYTES + 100)

    assert extents.capacity_bytes == 2 * PAGE_BYTES
    assert extents.take(2 * PAGE_BYTES + 100) is None


@given(
    holes=st.lists(st.integers(0, PAGES - 1), max_size=PAGES, unique=True),
    length=st.integers(1, 5 * PAGE_BYTES),
    count=st.integers(0, PAGES),
)
def test_take_several_equals_repeated_take(holes, length, count):
    at_once, in_turn = (FreeExtents(PAGES * PAGE_BYTES) for _ in range(2))
    for extents in (at_once, in_turn):
        extents.take(PAGES * PAGE_BYTES)
        for page in holes:
            extents.give_back(page * PAGE_BYTES, PAGE_BYTES)

    offsets = at_once.take_several(length, count)

    one_by_one = [offset for _ in range(count) if (offset := in_turn.take(length)) is not None]
    assert offsets == one_by_one
    assert sorted(at_once.free_extents()) == sorted(in_turn.free_extents())
    at_once.check()


class ExtentsAgainstPages(RuleBasedStateMachine):
    """Compare the extents with a list of all pages, in random histories."""

    def __init__(self):
        super().__init__()
        self.extents = FreeExtents(PAGES * PAGE_BYTES)
        self.owners: list[int | None] = [None] * PAGES
        self.taken: list[tuple[int, int]] = []

    @rule(length=st.integers(1, 9 * PAGE_BYTES))
    def take(self, length):
        pages = -(-length // PAGE_BYTES)
        offset = self.extents.take(length)
        if offset is None:
            free = "".join("." if owner is None else "x" for owner in self.owners)
            assert "." * pages not in free
            return
        first = offset // PAGE_BYTES
        assert self.owners[first : first + pages] == [None] * pages
        self.owners[first : first + pages] = [offset] * pages
        self.taken.append((offset, length))

    @precondition(lambda self: self.taken)
    @rule(choice=st.randoms(use_true_random=False))
    def give_back(self, choice):
        offset, length = self.taken.pop(choice.randrange(len(self.taken)))
        self.extents.give_back(offset, length)
        self.owners = [None if owner == offset else owner for owner in self.owners]

    @invariant()
    def agrees(self):
        self.extents.check()
        assert self.extents.free_bytes == self.owners.count(None) * PAGE_BYTES


TestExtentsAgainstPages = ExtentsAgainstPages.TestCase
TestExtentsAgainstPages.settings = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("sizes_kib", [(128,), (64, 256, 1024), (132, 528, 68), (64, 4096)])
def test_mixed_block_sizes_use_95_percent_of_the_space(sizes_kib):
    """Write many random chains of blocks of several sizes; each new block evicts the oldest blocks, whatever their size."""
    chance = random.Random(1)
    namespaces = [a_namespace(model=f"{kib} KiB", block_bytes=kib << 10) for kib in sizes_kib]
    machine = BlockMachine(256 << 20, LruEviction(), epoch=1)
    for namespace in namespaces:
        machine.open(namespace, Nanos(0))
    shares = []
    while len(shares) < 200:
        digest = chance.choice(namespaces).digest
        names = [chance.randbytes(16) for _ in range(chance.randint(1, 40))]
        reservation = machine.reserve(digest, names, owner="w", lease=LEASE, now=Nanos(0))
        machine.publish(reservation.reservation_id, dict.fromkeys(range(40), 1), owner="w", now=Nanos(0))
        stats = machine.stats()
        assert reservation.refused == 0
        if stats.evicted > 100:
            shares.append(stats.bytes / stats.capacity_bytes)

    assert sum(shares) / len(shares) >= 0.95
    machine.check()
