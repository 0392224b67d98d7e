"""S3-FIFO eviction: a small, a main and a ghost queue, in which a use does not move a block.

The policy is that of Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023).
Rules:

1. A new block goes to the end of the small queue, or of the main queue if the ghost queue contains its key. A use is
   counted, up to `MOST_USES`, only if it is more than `SAME_USE` after the previous use.
2. While the small queue has at least the share `SMALL` of all blocks, or the main queue is empty, the first block of
   the small queue is evicted. If at least two uses of this block were counted, it moves to the end of the main queue
   instead, and its count starts again at zero.
3. Otherwise the first block of the main queue is evicted. If its count is positive, it moves to the end of the main
   queue instead, and its count is reduced by one.
4. The ghost queue holds the keys that were evicted from the small queue last. It has at most as many keys as the main
   queue has blocks, but at least one.

If a pinned block is chosen, it leaves its queue and is admitted again later (rule 8 of `kvstore.pool.machine`). It then
usually goes to the end of the main queue. For a block of the small queue this follows from rule 1, because its key is
in the ghost queue. For a block of the main queue, the policy remembers the key for `IN_USE`.
"""

from collections import OrderedDict
from typing import Generic

from kvstore.clock import SECOND, Nanos
from kvstore.eviction.policy import SAME_USE, K

SMALL = 0.1
"""If the small queue has a smaller share of all blocks than this, the main queue evicts instead (rule 2). The value is
from the paper, which found that other values give similar results."""

MOST_USES = 3

IN_USE = Nanos(30 * SECOND)
"""Time for which a key that left the main queue is remembered. It is the default limit of read leases, because the
block of such a key may be pinned by a read lease."""

# Maximum number of keys that are remembered after they left the main queue. The oldest one is forgotten first.
MOST_IN_USE = 65_536


class _EntryUses:
    __slots__ = ("count", "last")

    def __init__(self, now: Nanos):
        self.count = 0  # number of counted uses since the block entered its queue, minus the reductions of rule 3
        self.last = now


class S3FifoEviction(Generic[K]):
    """S3-FIFO policy: cheap, and good for traffic in which many blocks are used only once.

    On chat traffic, a block has often left the small queue before the second turn of its conversation comes.
    """

    def __init__(self) -> None:
        self._small: OrderedDict[K, _EntryUses] = OrderedDict()
        self._main: OrderedDict[K, _EntryUses] = OrderedDict()
        self._ghost: OrderedDict[K, None] = OrderedDict()
        self._left: OrderedDict[K, Nanos] = OrderedDict()  # instant at which each remembered key left the main queue
        self._now = Nanos(0)

    def admit(self, key: K, size_bytes: int, now: Nanos) -> None:  # noqa: ARG002 - the policy counts blocks, not bytes
        self._now = now
        uses = self._small.get(key) or self._main.get(key)
        if uses is not None:
            if now - uses.last > SAME_USE and uses.count < MOST_USES:
                uses.count += 1
            uses.last = now
        elif key in self._ghost:
            del self._ghost[key]
            self._main[key] = _EntryUses(now)
        elif (left := self._left.pop(key, None)) is not None and now - left <= IN_USE:
            self._main[key] = _EntryUses(now)
        else:
            self._small[key] = _EntryUses(now)

    def withdraw(self, key: K) -> None:
        if self._main.pop(key, None) is not None:
            self._left[key] = self._now
            if len(self._left) > MOST_IN_USE:
                self._left.popitem(last=False)
            return
        del self._small[key]
        self._ghost[key] = None
        while len(self._ghost) > max(1, len(self._main)):
            self._ghost.popitem(last=False)

    def choose(self) -> K | None:
        while self:
            if self._small and (not self._main or len(self._small) >= SMALL * len(self)):
                key, uses = next(iter(self._small.items()))
                if uses.count <= 1:
                    return key
                del self._small[key]
                uses.count = 0
                self._main[key] = uses
            else:
                key, uses = next(iter(self._main.items()))
                if not uses.count:
                    return key
                uses.count -= 1
                self._main.move_to_end(key)
        return None

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __contains__(self, key: K) -> bool:
        return key in self._small or key in self._main
