"""Bringing blocks of a node's pool to where other nodes find them, because the worker that warmed them goes.

Rules:

1. They go to the first tier that others read: Redis, then S3. A node that stays needs nothing more: its memory and its disk stay
   too. One that goes as well writes to its peers' memory (`PeerShelf.leave`), else to its disk, for its successor. A tier with
   `keep = "none"` is only read, and a budget of writes counts here too. Where one fails again and again, the next is taken.
2. They go the way of all blocks that go down (`kvstore.hierarchy.machine`): the bounded queue of the tier, its breaker, its checksums, and
   the same events for watchers. Only whether they are worth it has been decided by who asks.
3. Nobody waits for it but who asks, and until his time is over. Passed over is what is not in the pool, and what the tier has. One
   that may have lost it without a word (evicted, expired, flushed) is asked again before that counts, many blocks at a time.
4. What fails is offered again once the tier's breaker lets somebody try, as long as there is time. Who asks learns how many
   batches have failed, and says when that is enough. Only what fails `STRIKES` times more once others have arrived is left.
"""

import asyncio
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

from kvstore.block import BlockHash
from kvstore.clock import Clock, Nanos
from kvstore.hierarchy.machine import Hierarchy
from kvstore.messages import BlockKey, EvacuationResult
from kvstore.pool.machine import BlockMachine
from kvstore.service.backing_tiers import BackingTiers

LOOK_AGAIN_SECONDS = 0.01  # at a tier that writes; a batch takes longer
ASKED_AT_ONCE = 256  # blocks: one round trip to Redis, half a second of requests to an object store
STRIKES = 3
GIVEN_UP_AFTER = 3  # writes to a tier that have failed in a row: a third of a second, if it fails at once


class Evacuations:
    """Of one node. Any number at a time: they share the tier's queue, and what is on its way for one is for all."""

    def __init__(
        self,
        machine: BlockMachine,
        hierarchy: Hierarchy,
        backing: BackingTiers,
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

    async def evacuate(
        self, digest: bytes, names: Sequence[BlockHash], *, leaving: bool, deadline: Nanos
    ) -> EvacuationResult:
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
        refuge = self._backing.refuge(leaving=leaving, is_given_up=self._is_given_up)
        if refuge is None:
            return EvacuationResult(done=len(names))
        self._backing.depart_to(refuge)
        tier = self._backing.tiers[refuge]
        failed_before = self._hierarchy.counters(refuge).failures
        keys = [BlockKey(digest, name) for name in names]
        departure = Evacuation(
            self._hierarchy,
            refuge,
            [key for key in dict.fromkeys(keys) if self._machine.is_present(key)],
            pay=partial(self._backing.may_write, refuge, block_bytes),
            failures=lambda: self._hierarchy.counters(refuge).failures + tier.status().failures,
        )
        while True:
            now = self._clock.now()
            departure.go_on(now)
            self._settle()
            departure.look()
            if departure.is_over or now >= deadline:
                break
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        still_here = departure.still_here()
        return EvacuationResult(
            tier=tier.name,
            done=next((index for index, key in enumerate(keys) if key in still_here), len(keys)),
            moved=departure.moved,
            there=departure.there,
            refused=departure.refused,
            failed=self._hierarchy.counters(refuge).failures - failed_before,
        )

    def _is_given_up(self, tier: int) -> bool:
        return self._hierarchy.failed_writes(tier) >= GIVEN_UP_AFTER


class Evacuation:
    """Blocks that are to go to one tier: each is doubted, or waits, or is under way, or dealt with."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        refuge: int,
        keys: Sequence[BlockKey],
        *,
        pay: Callable[[], bool],
        failures: Callable[[], int],
    ):
        """Nothing goes yet.

        Args:
            hierarchy: Moves them.
            refuge: Where to.
            keys: Of the blocks, each once, what is worth most first.
            pay: Takes the price of one write; False where it cannot be paid.
            failures: Of the tier, since it was opened.
        """
        self.moved = self.there = self.refused = 0  # blocks that are dealt with
        self._hierarchy = hierarchy
        self._refuge = refuge
        self._keys = keys
        self._pay = pay
        self._failures = failures
        # From here on blocks by their index, which is their order.
        self._unsure: list[int] = []  # known to be there, and not asked about yet
        self._confirming: list[int] = []  # being asked about
        self._waiting: list[int] = []
        self._under_way: dict[int, int] = {}  # with the tier's failures before it was handed down
        self._paid: set[int] = set()
        self._failed_at: dict[int, int] = {}  # with what had been moved when it failed first
        self._strikes: dict[int, int] = {}
        for index, key in enumerate(keys):
            if not hierarchy.has(refuge, key):
                self._waiting.append(index)
            elif hierarchy.forgets(refuge):
                self._unsure.append(index)
            else:
                self.there += 1

    @property
    def is_over(self) -> bool:
        return not (self._unsure or self._confirming or self._waiting or self._under_way)

    def still_here(self) -> set[BlockKey]:
        """Blocks that are not dealt with."""
        return {self._keys[index] for index in (*self._unsure, *self._confirming, *self._waiting, *self._under_way)}

    def go_on(self, now: Nanos) -> None:
        """Ask about what is known, and hand down what is not there, as far as there is room."""
        can_be_asked = self._ask(now)
        unclear = [*self._confirming[:1], *self._unsure[:1]] if can_be_asked else []
        until = min(unclear, default=len(self._keys))  # what is worth more may have to go before the rest
        due = [index for index in self._waiting[: self._hierarchy.room(self._refuge)] if index < until]
        del self._waiting[: len(due)]
        failures = self._failures()
        handed = []
        for index in due:
            key = self._keys[index]
            if self._hierarchy.has(self._refuge, key):
                self.moved += 1
            elif self._hierarchy.is_demoting(self._refuge, key):
                self._under_way[index] = failures
            elif index in self._paid or self._pay():
                self._paid.add(index)
                self._under_way[index] = failures
                handed.append(key)
            else:
                self.refused += 1
        self._hierarchy.demote_now(self._refuge, handed, now)

    def look(self) -> None:
        """What has come of it."""
        confirming, self._confirming = self._confirming, []
        for index in confirming:
            if self._hierarchy.is_being_confirmed(self._refuge, self._keys[index]):
                self._confirming.append(index)
            elif self._hierarchy.has(self._refuge, self._keys[index]):
                self.there += 1
            else:
                insort(self._waiting, index)
        failures = self._failures()
        # In the order in which they were handed down, which is that in which they come back: a look costs no more than what is new.
        back = list(takewhile(lambda index: not self._is_going_down(index), self._under_way))
        arrived = {index for index in back if self._hierarchy.has(self._refuge, self._keys[index])}
        for index in back:
            has_failed = failures > self._under_way.pop(index)
            if index in arrived:
                continue
            if has_failed and not self._is_out(index):
                insort(self._waiting, index)
            else:  # be it that the tier does not take it, or that it is not in the pool any more
                self.refused += 1
        self.moved += len(arrived)

    def _is_out(self, index: int) -> bool:
        """Whether it is the block that fails, and not the tier: note that it has failed once more."""
        others_arrived = self.moved > self._failed_at.setdefault(index, self.moved)
        self._strikes[index] = self._strikes.get(index, 0) + others_arrived
        return self._strikes[index] >= STRIKES

    def _ask(self, now: Nanos) -> bool:
        """Whether what is known to be there can be found out about now."""
        if self._confirming or not self._unsure:
            return True
        asked = self._unsure[:ASKED_AT_ONCE]
        if not self._hierarchy.confirm(self._refuge, [self._keys[index] for index in asked], now):
            return False
        self._confirming = asked
        del self._unsure[:ASKED_AT_ONCE]
        return True

    def _is_going_down(self, index: int) -> bool:
        key = self._keys[index]
        return self._hierarchy.is_demoting(self._refuge, key) and not self._hierarchy.has(self._refuge, key)
