"""Who holds how much of a prompt.

Rules:

1. A *holder* is whatever keeps blocks that can be reused: a worker's engine cache, or one namespace in one tier of a
   store node.
   Every holder has a bit; a block's key maps to the bits of all who hold it. Bits are recycled, so masks stay short.
2. A key is the first 8 bytes of a chain hash as an integer. Two blocks whose keys collide make the router believe in
   a hit that is not there; engines and store compare all 16 bytes, so this costs a computation and nothing else.
3. A holder's *leading blocks* are the consecutive blocks of a prompt that it holds, from the first one on. Holders may
   evict blocks in any order; what lies behind a hole does not count, since no engine could use it.
4. A holder is never believed to hold more blocks than it has room for: what would go beyond is not noted (and counted
   in `overflowed`). The index therefore takes at most memory for the sum of all capacities, and nothing when all left.

A dict of integers and one set of integers a holder: no object per block. Sets hold the same integer objects as the
dict where a block has one holder, and make the removal of a holder cost what it holds, not what everybody holds.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, pairwise, repeat
from operator import and_
from typing import NamedTuple, NewType

from fleet.core.ids import StoreId, WorkerId
from kvstore.block import HASH_BYTES, BlockHash
from kvstore.messages import POOL_TIER

Holder = NewType("Holder", str)


class StoreNamespace(NamedTuple):
    """Blocks of one layout in one store."""

    store_id: StoreId
    fingerprint: str


WORTH_BISECTING = 64  # keys; fewer are looked up in the time of the bisection
KEY_BYTES = 8  # of the hash; the rest is for the store, where a collision would hurt


def engine_cache_holder(worker_id: WorkerId) -> Holder:
    return Holder(f"worker/{worker_id}")


def store_tier_holder(store_id: StoreId, fingerprint: str, tier: str = POOL_TIER) -> Holder:
    return Holder(f"store/{store_id}/{fingerprint}/{tier}")


def keys_of(hashes: Sequence[BlockHash]) -> tuple[int, ...]:
    """Keys of chain hashes, in order."""
    return struct.unpack("<" + f"Q{HASH_BYTES - KEY_BYTES}x" * len(hashes), b"".join(hashes))


def runs(masks: Mapping[int, int], keys: Sequence[int]) -> list[tuple[int, int]]:
    """Whose leading blocks end where: numbers of blocks, and the bits of those who hold so many and not one more (rule 3).

    Where nobody holds a block, nobody's run goes on, holes or not: so a bisection for such a block, which finds
    the end of the longest run when there are no holes, always bounds the part that is then looked at key by key.
    """
    if not keys or keys[0] not in masks:
        return []
    if len(keys) > WORTH_BISECTING:
        keys = keys[: bisect_left(keys, True, key=lambda key: key not in masks)]  # held sorts before not held
    holders = list(map(masks.get, keys, repeat(0)))
    if 0 in holders:
        del holders[holders.index(0) :]
    held = len(holders)
    first = holders[0]
    if holders.count(first) == held:  # all who hold the first block hold as many
        return [(held, first)]
    running = list(accumulate(holders, and_))
    running.append(0)
    return [
        (depth, mask & ~following)
        for depth, (mask, following) in enumerate(pairwise(running), start=1)
        if mask != following
    ]


class PrefixIndex:
    """Which holders have which blocks. Unknown holders are programmer errors; unknown blocks are not."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._held: dict[Holder, set[int]] = {}
        self._bits: dict[Holder, int] = {}
        self._capacities: dict[Holder, int] = {}
        self.holders: dict[int, Holder] = {}  # by bit
        self._free_bits: list[int] = []
        self.overflowed = 0

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._masks)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._bits

    def held_by(self, holder: Holder) -> int:
        """Blocks that a holder is believed to hold."""
        return len(self._held[holder])

    def add(self, holder: Holder, capacity: int) -> None:
        """Note a holder with room for `capacity` blocks, and nothing in it yet."""
        assert holder not in self._bits, holder
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bits)
        self._bits[holder] = bit
        self.holders[bit] = holder
        self._held[holder] = set()
        self._capacities[holder] = capacity

    def remove(self, holder: Holder) -> None:
        """Forget a holder and all its blocks."""
        self.cleared(holder)
        bit = self._bits.pop(holder)
        del self.holders[bit], self._held[holder], self._capacities[holder]
        if self._bits:
            self._free_bits.append(bit)
        else:
            self._free_bits.clear()
            self._masks = {}  # a dict that has shrunk keeps its table; a new one has none

    def stored(self, holder: Holder, keys: Iterable[int]) -> None:
        bit, held, masks = self._bits[holder], self._held[holder], self._masks
        new = tuple(keys)
        if not held.isdisjoint(new):
            new = tuple(key for key in new if key not in held)
        if len(new) > (room := self._capacities[holder] - len(held)):
            new = tuple(dict.fromkeys(new))
            self.overflowed += max(0, len(new) - room)
            new = new[:room]
        held.update(new)
        if masks.keys().isdisjoint(new):  # as most are, of which nobody has told before: one step for all of them
            masks.update(dict.fromkeys(new, bit))
        else:
            for key in new:
                masks[key] = masks.get(key, 0) | bit

    def removed(self, holder: Holder, keys: Iterable[int]) -> None:
        held = self._held[holder]
        gone = held.intersection(keys)
        self._unmark(self._bits[holder], gone)
        held -= gone

    def cleared(self, holder: Holder) -> None:
        self._unmark(self._bits[holder], self._held[holder])
        self._held[holder] = set()

    def bit(self, holder: Holder) -> int:
        """What stands for a holder in `runs`, until it is removed."""
        return self._bits[holder]

    def runs(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """`longest`, for those who know the bits of holders."""
        return runs(self._masks, keys)

    def longest(self, keys: Sequence[int]) -> dict[Holder, int]:
        """Leading blocks by holder (rule 3), of those that hold at least the first block."""
        depths: dict[Holder, int] = {}
        for depth, bits in self.runs(keys):
            self._credit(bits, depth, depths)
        return depths

    def _credit(self, bits: int, depth: int, depths: dict[Holder, int]) -> None:
        while bits:
            bit = bits & -bits
            depths[self.holders[bit]] = depth
            bits ^= bit

    def _unmark(self, bit: int, keys: AbstractSet[int]) -> None:
        take, others = self._masks.pop, ~bit
        self._masks.update([(key, rest) for key in keys if (rest := take(key) & others)])

    def check(self) -> None:
        """Assert that both views of the same facts agree."""
        assert len(set(self._bits.values())) == len(self._bits)
        assert not set(self._free_bits) & set(self.holders)
        assert {bit: holder for holder, bit in self._bits.items()} == self.holders
        expected: dict[int, int] = {}
        for holder, held in self._held.items():
            assert len(held) <= self._capacities[holder], holder
            for key in held:
                expected[key] = expected.get(key, 0) | self._bits[holder]
        assert expected == self._masks

    @property
    def blocks(self) -> Mapping[Holder, int]:
        return {holder: len(held) for holder, held in self._held.items()}
