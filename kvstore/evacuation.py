"""Bringing blocks of a node's pool to where other nodes find them, because the worker that warmed them goes.

Rules:

1. They go to the first tier that others read: Redis, then S3. A node that stays needs nothing more: its memory and its disk stay
   too. One that goes as well writes to its peers' memory (`PeerTier.leave`), else to its disk, for its successor. A tier with
   `keep = "none"` is only read, and a budget of writes counts here too.
2. They go the way of all blocks that go down (`kvstore.hierarchy`): the bounded queue of the tier, its breaker, its checksums, and
   the same events for watchers. Only whether they are worth it has been decided by who asks.
3. Nobody waits for it but who asks, and until his time is over. Blocks that the tier is known to have are passed over, and
   so are those that are not in the pool; a tier that fails ends it.
"""

import asyncio
from collections.abc import Callable, Sequence

from kvstore.backing import Backing
from kvstore.block import ChainHash
from kvstore.clock import Clock, Nanos
from kvstore.hierarchy import Hierarchy
from kvstore.machine import BlockMachine
from kvstore.messages import BlockKey, Evacuated

LOOK_AGAIN_SECONDS = 0.01  # at a tier that writes; a batch takes longer


class Evacuations:
    """Of one node. Any number at a time: they share the tier's queue, and what is on its way for one is for all."""

    def __init__(
        self,
        machine: BlockMachine,
        hierarchy: Hierarchy,
        backing: Backing,
        settle: Callable[[], None],
        clock: Clock,
    ):
        """Nothing goes yet.

        Args:
            machine: Has the blocks.
            hierarchy: Moves them.
            backing: Knows the tiers.
            settle: Has done what the hierarchy decided.
            clock: Of the deadlines.
        """
        self._machine = machine
        self._hierarchy = hierarchy
        self._backing = backing
        self._settle = settle
        self._clock = clock

    async def evacuate(self, digest: bytes, names: Sequence[ChainHash], *, leaving: bool, deadline: Nanos) -> Evacuated:
        """Bring away those of these blocks that are in the pool, in this order.

        Args:
            digest: Of the namespace.
            names: Of the blocks, what is worth most first.
            leaving: Whether the node goes as well.
            deadline: When to answer at the latest.

        Raises:
            NamespaceUnknown: It was never opened.
        """
        block_bytes = self._machine.block_bytes(digest)
        refuge = self._backing.refuge(leaving=leaving)
        if refuge is None:
            return Evacuated(done=len(names))
        keys = [BlockKey(digest, name) for name in names]
        here = [key for key in dict.fromkeys(keys) if self._machine.is_present(key)]
        wanted = [key for key in here if not self._hierarchy.has(refuge, key)]
        handed = settled = 0  # leading ones of them: given to the tier, and through with it
        while True:
            now = self._clock.now()
            handed += self._hand_down(refuge, wanted[handed:], block_bytes, now)
            self._settle()
            while settled < handed and not self._is_open(refuge, wanted[settled]):
                settled += 1
            fenced = self._hierarchy.is_fenced(refuge)
            if fenced or now >= deadline or settled == len(wanted):
                break
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        open_ones = {key for key in wanted[settled:handed] if self._is_open(refuge, key)}.union(wanted[handed:])
        moved = sum(self._hierarchy.has(refuge, key) for key in wanted)
        return Evacuated(
            tier=self._backing.tiers[refuge].name,
            done=next((index for index, key in enumerate(keys) if key in open_ones), len(keys)),
            moved=moved,
            there=len(here) - len(wanted),
            refused=len(wanted) - moved - len(open_ones),
            fenced=fenced,
        )

    def _hand_down(self, refuge: int, waiting: Sequence[BlockKey], block_bytes: int, now: Nanos) -> int:
        """Have the tier keep those of these leading ones that there is room for; what is there or on its way costs no second write."""
        leading = waiting[: self._hierarchy.room(refuge)]
        keys = [
            key
            for key in leading
            if not self._hierarchy.has(refuge, key)
            and not self._hierarchy.is_going_down(refuge, key)
            and self._backing.may_write(refuge, block_bytes)
        ]
        self._hierarchy.hand_down(refuge, keys, now)
        return len(leading)

    def _is_open(self, refuge: int, key: BlockKey) -> bool:
        return self._hierarchy.is_going_down(refuge, key) and not self._hierarchy.has(refuge, key)
