"""Evacuation: copies blocks of a node's pool to a tier where other nodes find them, before the blocks' worker ends.

Rules:

1. Blocks are copied to Redis, or to S3 if there is no Redis tier. Without these tiers, a node that continues to run
   copies nothing, because its memory and its disk stay. A node that ends together with its worker copies the blocks to
   its peers' memory (`PeerBackend.leave`), or, without a peer tier, to its disk, where its successor finds them. A tier
   with `keep = "none"` is never written, and the write budget applies. If a tier fails repeatedly, the next tier in
   this order is used.
2. Blocks are demoted in the same way as without an evacuation (`kvstore.hierarchy.machine`): through the tier's bounded
   queue, circuit breaker and checksums, with the same events for watchers. The only difference is that the tier's
   admission rule is not applied, because the requester has chosen the blocks.
3. Only the requester waits for an evacuation, at most until the deadline of its request. Blocks that are not in the
   pool, or that the tier has, are skipped. A tier that may have lost a block without reporting it is queried again, for
   many blocks at a time.
4. Blocks whose write fails are offered again when the tier's circuit breaker allows it, until the deadline. The
   requester learns how many transfers of the tier failed and decides when to stop. A failure of a block counts only if
   other blocks have arrived at the tier since the first failure of this block. After `STRIKES` counted failures, the
   block is abandoned.
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

LOOK_AGAIN_SECONDS = 0.01  # pause between two checks whether writes have ended; writing a batch takes longer than this
# Maximum number of blocks for which a tier is asked at once whether it still has them. For 256 blocks this takes one round
# trip to Redis, or half a second of requests to an object store.
ASKED_AT_ONCE = 256
STRIKES = 3  # number of counted failures after which a block is abandoned (rule 4)
GIVEN_UP_AFTER = 3
"""Number of consecutive failed writes after which the next tier is used. If each write fails at once, this takes at
most a third of a second."""


class Evacuations:
    """Performs the evacuations of one node. Several may run at a time; those to one tier share its queue and transfers.

    The constructor gets `settle`, a function that performs the hierarchy's decisions.
    """

    def __init__(
        self,
        machine: BlockMachine,
        hierarchy: Hierarchy,
        backing: BackingTiers,
        settle: Callable[[], None],
        clock: Clock,
    ):
        self._machine = machine
        self.hierarchy = hierarchy
        self._backing = backing
        self._settle = settle
        self._clock = clock

    async def evacuate(
        self, digest: bytes, names: Sequence[BlockHash], *, leaving: bool, deadline: Nanos
    ) -> EvacuationResult:
        """Evacuate the blocks of `names` that are in the pool, in the order of `names`, and answer by the deadline.

        The caller puts the most valuable blocks first. `leaving` is True if the node will end together with its worker.
        Raise NamespaceUnknown if the namespace is not open.
        """
        block_bytes = self._machine.block_bytes(digest)
        evacuation_tier = self._backing.evacuation_tier(leaving=leaving, is_given_up=self._is_given_up)
        if evacuation_tier is None:
            return EvacuationResult(done=len(names))
        self._backing.begin_evacuation(evacuation_tier)
        tier = self._backing.tiers[evacuation_tier]
        failed_before = self.hierarchy.counters(evacuation_tier).failures
        keys = [BlockKey(digest, name) for name in names]
        evacuation = Evacuation(
            self.hierarchy,
            evacuation_tier,
            [key for key in dict.fromkeys(keys) if self._machine.is_present(key)],
            charge=partial(self._backing.may_write, evacuation_tier, block_bytes),
            failures=lambda: self.hierarchy.counters(evacuation_tier).failures + tier.status().failures,
        )
        while True:
            now = self._clock.now()
            evacuation.advance(now)
            self._settle()
            evacuation.collect()
            if evacuation.is_done or now >= deadline:
                break
            await asyncio.sleep(LOOK_AGAIN_SECONDS)
        remaining = evacuation.remaining()
        return EvacuationResult(
            tier=tier.name,
            done=next((index for index, key in enumerate(keys) if key in remaining), len(keys)),
            moved=evacuation.moved,
            there=evacuation.there,
            refused=evacuation.refused,
            failed=self.hierarchy.counters(evacuation_tier).failures - failed_before,
        )

    def _is_given_up(self, tier: int) -> bool:
        return self.hierarchy.failed_writes(tier) >= GIVEN_UP_AFTER


class Evacuation:
    """Performs one evacuation, to one tier.

    Each block is in one of five states: the tier is believed to have it (unsure), the tier is being asked for it
    (confirming), the block waits for its demotion (waiting), is being demoted (under way), or is done.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        evacuation_tier: int,
        keys: Sequence[BlockKey],
        *,
        charge: Callable[[], bool],
        failures: Callable[[], int],
    ):
        """Divide the blocks into those that the tier is believed to have and those that have to be copied.

        Nothing is copied yet. `charge` charges the write of one block to the tier's write budget, and returns False if
        too little of it is left. `failures` returns the number of the tier's failures since the node started.
        """
        self.moved = self.there = self.refused = 0  # numbers of blocks that are done, by result (`EvacuationResult`)
        self.hierarchy = hierarchy
        self._tier = evacuation_tier
        self._keys = keys
        self._charge = charge
        self._failures = failures
        # The fields below hold the indices of blocks in `keys`.
        self._unsure: list[int] = []  # blocks that the tier is believed to have, and for which it was not queried yet
        self._confirming: list[int] = []  # blocks for which the tier is being queried now
        self._waiting: list[int] = []
        # blocks that are being demoted, each with the number of the tier's failures when its demotion was queued
        self._under_way: dict[int, int] = {}
        self._paid: set[int] = set()
        self._failed_at: dict[int, int] = {}  # for each block that failed: number of moved blocks at its first failure
        self._strikes: dict[int, int] = {}
        for index, key in enumerate(keys):
            if not hierarchy.has(evacuation_tier, key):
                self._waiting.append(index)
            elif hierarchy.forgets(evacuation_tier):
                self._unsure.append(index)
            else:
                self.there += 1

    @property
    def is_done(self) -> bool:
        return not (self._unsure or self._confirming or self._waiting or self._under_way)

    def remaining(self) -> set[BlockKey]:
        """Return the blocks that are not done yet."""
        return {self._keys[index] for index in (*self._unsure, *self._confirming, *self._waiting, *self._under_way)}

    def advance(self, now: Nanos) -> None:
        """Query the tier for unsure blocks, and demote blocks that the tier does not have, if its queue has room."""
        can_be_asked = self._ask(now)
        unclear = [*self._confirming[:1], *self._unsure[:1]] if can_be_asked else []
        # Blocks after an unconfirmed block wait, because the unconfirmed block is more valuable. If the tier does not
        # have it, it has to be copied before the blocks after it.
        until = min(unclear, default=len(self._keys))
        due = [index for index in self._waiting[: self.hierarchy.room(self._tier)] if index < until]
        del self._waiting[: len(due)]
        failures = self._failures()
        handed = []
        for index in due:
            key = self._keys[index]
            if self.hierarchy.has(self._tier, key):
                self.moved += 1
            elif self.hierarchy.is_demoting(self._tier, key):
                self._under_way[index] = failures
            elif index in self._paid or self._charge():
                self._paid.add(index)
                self._under_way[index] = failures
                handed.append(key)
            else:
                self.refused += 1
        self.hierarchy.demote_now(self._tier, handed, now)

    def collect(self) -> None:
        """Record the results of confirmations and demotions that have ended."""
        confirming, self._confirming = self._confirming, []
        for index in confirming:
            if self.hierarchy.is_being_confirmed(self._tier, self._keys[index]):
                self._confirming.append(index)
            elif self.hierarchy.has(self._tier, self._keys[index]):
                self.there += 1
            else:
                insort(self._waiting, index)
        failures = self._failures()
        # Demotions end about in the order in which they began. The check stops at the first demotion that has not
        # ended, so its cost grows only with the number of new results.
        back = list(takewhile(lambda index: not self._is_going_down(index), self._under_way))
        arrived = {index for index in back if self.hierarchy.has(self._tier, self._keys[index])}
        for index in back:
            has_failed = failures > self._under_way.pop(index)
            if index in arrived:
                continue
            if has_failed and not self._gives_up(index):
                insort(self._waiting, index)
            else:  # the tier refuses the block, the pool has lost it, or it is abandoned (rule 4)
                self.refused += 1
        self.moved += len(arrived)

    def _gives_up(self, index: int) -> bool:
        """Record a failure of a block; return True if rule 4 abandons the block."""
        others_arrived = self.moved > self._failed_at.setdefault(index, self.moved)
        self._strikes[index] = self._strikes.get(index, 0) + others_arrived
        return self._strikes[index] >= STRIKES

    def _ask(self, now: Nanos) -> bool:
        """Query the tier for the next blocks that it is believed to have; return False if it cannot be queried now."""
        if self._confirming or not self._unsure:
            return True
        asked = self._unsure[:ASKED_AT_ONCE]
        if not self.hierarchy.confirm(self._tier, [self._keys[index] for index in asked], now):
            return False
        self._confirming = asked
        del self._unsure[:ASKED_AT_ONCE]
        return True

    def _is_going_down(self, index: int) -> bool:
        key = self._keys[index]
        return self.hierarchy.is_demoting(self._tier, key) and not self.hierarchy.has(self._tier, key)
