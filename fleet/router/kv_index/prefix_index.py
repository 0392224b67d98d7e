"""Prefix index: which worker or store tier holds which blocks of a prompt, and how accurate this view of the caches is.

Rules:

1. A *holder* is anything that keeps reusable blocks: a worker's prefix cache, or one namespace in one tier of a store node. Each holder has
   a bit, and the key of a block maps to a mask: the bits of all holders of the block. New holders get the bits of holders that have left,
   so masks stay short.
2. A block key is the first 8 bytes of a block hash as an integer. If the keys of two blocks collide, the router expects a
   hit that is not there. Engines and stores compare all 16 bytes, so the only effect is that the block is computed.
3. The *leading blocks* of a holder are the consecutive blocks of a prompt that it holds, from the first one on. Holders may
   evict blocks in any order; blocks behind a hole do not count, because no engine could use them.
4. A holder is never believed to hold more blocks than its capacity: further blocks are not added (and are counted
   in `overflowed`). So the memory of the index is bounded by the sum of all capacities, and is freed when all holders leave.

The index is a dict of integers and one set of integers for each holder, without an object for each block. If a block has one holder, the
holder's set and the dict share one integer object. The time to remove a holder is proportional to the number of its blocks.

The worker registry (`fleet.router.state.worker_registry`) enters what workers report (`fleet.backends.workers.streams`), what store nodes
report (`fleet.backends.workers.store_watch`), and what external servers report (`fleet.backends.kv_events.stream`). These three modules
also detect gaps between sequence numbers. After a gap they replace everything that the index knows about the sender.

Rules of cache accuracy, which compares the predicted cached tokens with those that workers report:

5. The comparison is between the prompt tokens that placement expected to be cached and those that were cached, once for each request,
   on the worker that computed its prompt. Both are whole blocks and exclude the last token, which every engine computes.
6. The smaller of the two numbers counts as agreed, because both count tokens from the start of the prompt. Precision is the agreed tokens
   divided by the predicted ones, and recall the agreed tokens divided by the reported ones. The hit-rate error is the predicted minus the
   reported tokens, divided by all prompt tokens.
7. For each worker, the tokens of the latest `WINDOW` comparisons are summed; comparisons with nothing predicted and nothing reported are
   left out. If there are at least `ENOUGH` comparisons and the precision or the recall of the sums is below `DRIFTS`, the cache is said to
   drift. It no longer drifts when both are at least `RECOVERED`. Each change is reported once.
"""

import struct
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from itertools import accumulate, islice, pairwise, repeat
from operator import and_
from typing import NamedTuple, NewType

from msgspec import Struct

from fleet.core.ids import StoreId, WorkerId
from kvstore.block import HASH_BYTES, BlockHash
from kvstore.messages import POOL_TIER

Holder = NewType("Holder", str)


class StoreNamespace(NamedTuple):
    """Identifies the blocks in one store that belong to one fingerprint."""

    store_id: StoreId
    fingerprint: str


# Maximum number of blocks that `lost_blocks` looks up. With this number, the error of the estimated share of lost blocks is below 0.07 in
# 95 % of all cases.
SAMPLED_BLOCKS = 256
WORTH_BISECTING = 64  # number of a prompt's keys above which bisecting (`runs`) is faster than looking up each key
# Number of bytes of a block hash that form a block key. Stores compare the whole hash, because a collision there would return the KV of
# other tokens.
KEY_BYTES = 8

# Cache accuracy (rule 7):
WINDOW = 64  # number of latest comparisons that count for each worker
ENOUGH = 16  # number of comparisons that are needed before a cache can count as drifting
DRIFTS = 0.8  # a cache drifts if its precision or recall is below this; one evicted block in ten is still normal
RECOVERED = 0.9  # drift ends when precision and recall are at least this


def engine_cache_holder(worker_id: WorkerId) -> Holder:
    return Holder(f"worker/{worker_id}")


def store_tier_holder(store_id: StoreId, fingerprint: str, tier: str = POOL_TIER) -> Holder:
    return Holder(f"store/{store_id}/{fingerprint}/{tier}")


def keys_of(hashes: Sequence[BlockHash]) -> tuple[int, ...]:
    """Return the block keys of block hashes, in order."""
    return struct.unpack("<" + f"Q{HASH_BYTES - KEY_BYTES}x" * len(hashes), b"".join(hashes))


def runs(masks: Mapping[int, int], keys: Sequence[int]) -> list[tuple[int, int]]:
    """Return how many leading blocks of a prompt the holders have (rule 3).

    The result is a list of pairs, in ascending order: a number of leading blocks, and the bits of the holders with exactly this number.

    Leading blocks never go beyond a block that has no holder. So a long prompt is first cut at such a block, which is found by bisecting.
    Only the blocks before the cut are checked one by one.
    """
    if not keys or keys[0] not in masks:
        return []
    if len(keys) > WORTH_BISECTING:
        keys = keys[: bisect_left(keys, True, key=lambda key: key not in masks)]
    holders = list(map(masks.get, keys, repeat(0)))
    if 0 in holders:
        del holders[holders.index(0) :]
    held = len(holders)
    first = holders[0]
    if holders.count(first) == held:  # all holders of the first block have the same number of leading blocks
        return [(held, first)]
    running = list(accumulate(holders, and_))
    running.append(0)
    return [
        (depth, mask & ~following)
        for depth, (mask, following) in enumerate(pairwise(running), start=1)
        if mask != following
    ]


class PrefixIndex:
    """Maps block keys to their holders. A holder must be added before it is used. Methods accept keys that the index does not contain."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self.held: dict[Holder, set[int]] = {}
        self._bits: dict[Holder, int] = {}
        self._capacities: dict[Holder, int] = {}
        self.holders: dict[int, Holder] = {}  # the holders by their bits (rule 1)
        self._free_bits: list[int] = []
        self.overflowed = 0

    def __len__(self) -> int:
        """Return the number of distinct blocks that the holders together are believed to hold."""
        return len(self._masks)

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._bits

    def held_by(self, holder: Holder) -> int:
        """Return how many blocks a holder is believed to hold."""
        return len(self.held[holder])

    def lost_blocks(self, holder: Holder, alike: int, elsewhere: float) -> float:
        """Estimate how many blocks would have to be computed again if the cache of a holder were lost.

        Only a sample of the holder's blocks is looked up, so the cost does not grow with their number. Block keys are hashes, so the first
        blocks of the holder's set are a random sample.

        Args:
            holder: The holder.
            alike: Bits of the holders that can replace this one; a block that one of them has is not lost.
            elsewhere: The part of a block, from 0 to 1, that counts as lost if only holders outside `alike` have the block. It is above 0
                if loading a block takes time.
        """
        held, others = self.held[holder], ~self._bits[holder]
        if not held:
            return 0.0
        masks = [self._masks[key] & others for key in islice(held, SAMPLED_BLOCKS)]
        lost = sum(elsewhere if mask else 1.0 for mask in masks if not mask & alike)
        return lost / len(masks) * len(held)

    def add(self, holder: Holder, capacity: int) -> None:
        """Add an empty holder with room for `capacity` blocks."""
        assert holder not in self._bits, holder
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._bits)
        self._bits[holder] = bit
        self.holders[bit] = holder
        self.held[holder] = set()
        self._capacities[holder] = capacity

    def remove(self, holder: Holder) -> None:
        """Remove a holder and all its blocks."""
        self.cleared(holder)
        bit = self._bits.pop(holder)
        del self.holders[bit], self.held[holder], self._capacities[holder]
        if self._bits:
            self._free_bits.append(bit)
        else:
            self._free_bits.clear()
            self._masks = {}  # a dict keeps the memory of its table when entries are removed; a new dict releases it

    def stored(self, holder: Holder, keys: Iterable[int]) -> None:
        bit, held, masks = self._bits[holder], self.held[holder], self._masks
        new = tuple(keys)
        if not held.isdisjoint(new):
            new = tuple(key for key in new if key not in held)
        if len(new) > (room := self._capacities[holder] - len(held)):
            new = tuple(dict.fromkeys(new))
            self.overflowed += max(0, len(new) - room)
            new = new[:room]
        held.update(new)
        if masks.keys().isdisjoint(new):  # most blocks are new to the index, and are added in one step
            masks.update(dict.fromkeys(new, bit))
        else:
            for key in new:
                masks[key] = masks.get(key, 0) | bit

    def removed(self, holder: Holder, keys: Iterable[int]) -> None:
        held = self.held[holder]
        gone = held.intersection(keys)
        self._unmark(self._bits[holder], gone)
        held -= gone

    def cleared(self, holder: Holder) -> None:
        self._unmark(self._bits[holder], self.held[holder])
        self.held[holder] = set()

    def bit(self, holder: Holder) -> int:
        """Return the bit of a holder, valid until the holder is removed."""
        return self._bits[holder]

    def runs(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Return how many leading blocks of a prompt each holder has, in the form of the function `runs`."""
        return runs(self._masks, keys)

    def longest(self, keys: Sequence[int]) -> dict[Holder, int]:
        """Return the number of leading blocks of each holder that has at least the first block of a prompt (rule 3)."""
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
        """Assert that the map from keys to holders and the sets of keys by holder agree."""
        assert len(set(self._bits.values())) == len(self._bits)
        assert not set(self._free_bits) & set(self.holders)
        assert {bit: holder for holder, bit in self._bits.items()} == self.holders
        expected: dict[int, int] = {}
        for holder, held in self.held.items():
            assert len(held) <= self._capacities[holder], holder
            for key in held:
                expected[key] = expected.get(key, 0) | self._bits[holder]
        assert expected == self._masks

    @property
    def blocks(self) -> Mapping[Holder, int]:
        return {holder: len(held) for holder, held in self.held.items()}


class Knowledge(StrEnum):
    """How the router knows what a worker has cached. The values are public, because they are labels of metrics."""

    EXACT = "exact"  # the worker reports what it caches
    APPROXIMATE = "approximate"  # the worker reports nothing, and is assumed to hold the prompts that it was sent


class CacheComparison(Struct, frozen=True):
    """Compares the predicted with the reported cached tokens of one prompt, or the sums of both over several prompts (rule 6)."""

    prompt: int = 0
    predicted: int = 0
    reported: int = 0
    agreed: int = 0

    def __add__(self, other: "CacheComparison") -> "CacheComparison":
        return CacheComparison(
            self.prompt + other.prompt,
            self.predicted + other.predicted,
            self.reported + other.reported,
            self.agreed + other.agreed,
        )

    @property
    def precision(self) -> float:
        return self.agreed / self.predicted if self.predicted else 1.0

    @property
    def recall(self) -> float:
        return self.agreed / self.reported if self.reported else 1.0

    @property
    def hit_rate_error(self) -> float:
        return (self.predicted - self.reported) / self.prompt if self.prompt else 0.0


_NOTHING = CacheComparison()


def compare(prompt_tokens: int, predicted_tokens: int, reported_tokens: int, block_tokens: int) -> CacheComparison:
    """Compare the predicted with the reported cached tokens of one prompt (rule 5)."""
    most = max(0, prompt_tokens - 1) // block_tokens * block_tokens
    predicted, reported = max(0, min(predicted_tokens, most)), min(reported_tokens, most)
    return CacheComparison(prompt_tokens, predicted, reported, min(predicted, reported))


class CacheAccuracy:
    """Keeps the latest comparisons of one worker, and decides whether its cache drifts (rule 7)."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.drifting = False
        self.recent = CacheComparison()
        self._window: deque[CacheComparison] = deque()

    def __len__(self) -> int:
        return len(self._window)

    def note(self, compared: CacheComparison) -> bool:
        """Add the comparison of one prompt. Return True if the cache has begun to drift, or no longer drifts, because of it."""
        if not compared.predicted and not compared.reported:
            return False
        window, recent = self._window, self.recent
        gone = window.popleft() if len(window) == WINDOW else _NOTHING
        window.append(compared)
        self.recent = recent = CacheComparison(
            recent.prompt + compared.prompt - gone.prompt,
            recent.predicted + compared.predicted - gone.predicted,
            recent.reported + compared.reported - gone.reported,
            recent.agreed + compared.agreed - gone.agreed,
        )
        worst = min(recent.precision, recent.recall)
        drifting = worst < (RECOVERED if self.drifting else DRIFTS) and len(self._window) >= ENOUGH
        changed = drifting is not self.drifting
        self.drifting = drifting
        return changed

    def check(self) -> None:
        """Assert that `recent` is the sum of the comparisons in the window."""
        assert sum(self._window, start=CacheComparison()) == self.recent
        assert len(self._window) <= WINDOW
