"""Demotions: decides when blocks are copied from the pool to the backing tiers, and asks tiers which blocks they have.

The class `Demotions` is a part of `kvstore.hierarchy.machine`, whose `Hierarchy.offer` chooses the blocks by the
admission rule of each tier. `kvstore.service.transfer_executor` copies the bytes. Rules:

1. No client waits for a demotion. Each tier has a bounded queue; blocks that do not fit are dropped and counted.
2. Blocks that are being copied are pinned in the pool until the copying thread reports that it is done. The pin has no
   deadline.
3. A tier may have lost blocks without reporting it, so what the node knows of the tier can be wrong. An evacuation
   therefore queries the tier again, with at most one pending query for each block. Blocks that the tier does not
   confirm count as lost.
"""

from collections.abc import Sequence

from msgspec import Struct

from kvstore.clock import SECOND, Nanos
from kvstore.hierarchy.tier_states import TierState, TierStates
from kvstore.hierarchy.transfer_queue import TransferQueue
from kvstore.hierarchy.transfers import Confirm, ConfirmId, Demote, DemotionId
from kvstore.messages import BlockKey, PinnedBlocks
from kvstore.pool.machine import BlockMachine

MAX_DEMOTIONS = 2  # maximum number of batches that are demoted to one tier at the same time; further blocks wait
DEMOTE_WITHIN = Nanos(30 * SECOND)
CONFIRM_WITHIN = Nanos(2 * SECOND)


class Demotions:
    """Decides which queued blocks are copied from the pool to each tier of one node, and when."""

    def __init__(self, pool: BlockMachine, tiers: TierStates, queue: TransferQueue):
        self._pool = pool
        self._tiers = tiers
        self._queue = queue
        self._demotions: dict[DemotionId, _Demotion] = {}
        self._late: set[DemotionId] = set()  # running demotions that missed their deadline and count as failures
        self._confirmations: dict[ConfirmId, Confirm] = {}
        # for each block of a `Confirm` that has not ended: index of the tier, and key of the block
        self._unconfirmed: set[tuple[int, BlockKey]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._demotions and not self._confirmations and not any(tier.queue for tier in self._tiers)

    def begin_demotions(self, tier: TierState, now: Nanos) -> None:
        """Begin to demote the blocks in a tier's queue, unless the circuit breaker for writing forbids it.

        At most `MAX_DEMOTIONS` batches are demoted to the tier at a time; the other blocks stay in the queue.
        """
        while tier.queue and tier.demoting < MAX_DEMOTIONS and tier.writing.would_allow(now):
            first, size_bytes = next(iter(tier.queue.items()))
            limit = self._queue.batch_blocks(size_bytes)
            keys: list[BlockKey] = []
            while tier.queue and len(keys) < limit:
                key = next(iter(tier.queue))
                if key.digest != first.digest:
                    break
                del tier.queue[key]
                keys.append(key)
            pinned = self._pool.pin(keys, now)
            if not pinned.addresses:
                self._pool.unpin(pinned.pin_id, now)
                # All blocks of the batch left the pool while they waited in the queue, so the tier is not called.
                # The attempt that the circuit breaker allows is therefore not used up.
                continue
            tier.writing.allows(now)  # use up the one attempt that the circuit breaker allows after a pause
            demotion = _Demotion(
                id=DemotionId(self._queue.new_id()),
                tier=tier.index,
                pinned=pinned,
                keys=frozenset(each.key for each in pinned.addresses),
                began=now,
                until=Nanos(now + DEMOTE_WITHIN),
            )
            self._demotions[demotion.id] = demotion
            tier.demoting += 1
            self._queue.put(Demote(demotion.id, tier.index, pinned.addresses, pinned.checksums, demotion.until))

    def is_demoting(self, tier: TierState, key: BlockKey) -> bool:
        """Return whether a block waits in a tier's queue or is being copied to the tier."""
        demotions = (demotion for demotion in self._demotions.values() if demotion.tier == tier.index)
        return key in tier.queue or any(key in demotion.keys for demotion in demotions)

    def kept(self, demotion_id: DemotionId, answers: Sequence[bool], now: Nanos) -> None:
        """Record the end of a `Demote` command, and begin queued demotions.

        `answers` tells for each block of the command whether the tier has the block now.
        """
        demotion, tier, was_late = self._ended(demotion_id, now)
        if any(answers) or now < demotion.until:
            tier.writing.succeeded()
        elif not was_late:
            tier.failed(tier.writing, demotion.began, now)
        there = [a.key for a, kept in zip(demotion.pinned.addresses, answers, strict=True) if kept]
        tier.counters.kept += len(there)
        self._tiers.know(tier, there)
        self.begin_demotions(tier, now)

    def demotion_failed(self, demotion_id: DemotionId, started: Nanos, now: Nanos) -> None:
        """Record that a `Demote` command has failed, and begin queued demotions if the circuit breaker allows it."""
        _, tier, was_late = self._ended(demotion_id, now)
        if not was_late:
            tier.failed(tier.writing, started, now)
        self.begin_demotions(tier, now)

    def demotion_is_late(self, demotion_id: DemotionId, started: Nanos, now: Nanos) -> None:
        """Count a failure, because a `Demote` command missed its deadline.

        The demotion itself ends only when its thread reports that it is done.
        """
        tier = self._tiers[self._demotions[demotion_id].tier]
        tier.failed(tier.writing, started, now)
        self._late.add(demotion_id)

    def confirm(self, tier: TierState, keys: Sequence[BlockKey], now: Nanos) -> bool:
        """Ask a tier which of these blocks it still has. Blocks of a pending `Confirm` command are not asked for again.

        Return False if the tier's circuit breaker does not allow a call now, otherwise True.
        """
        asked = tuple(key for key in keys if not self.is_being_confirmed(tier, key))
        if not asked:
            return True
        if not tier.reading.allows(now):
            return False
        confirmation = Confirm(ConfirmId(self._queue.new_id()), tier.index, asked, Nanos(now + CONFIRM_WITHIN))
        self._confirmations[confirmation.confirm_id] = confirmation
        self._unconfirmed.update((tier.index, key) for key in asked)
        self._queue.put(confirmation)
        return True

    def is_being_confirmed(self, tier: TierState, key: BlockKey) -> bool:
        """Return True while a `Confirm` command for this block is pending at this tier."""
        return (tier.index, key) in self._unconfirmed

    def confirmed(self, confirm_id: ConfirmId, answers: Sequence[bool]) -> None:
        """Record the end of a `Confirm` command. `answers` tells for each of its keys whether the tier has the block."""
        confirmation = self._answered(confirm_id)
        if confirmation is None:
            return  # the deadline of the `Confirm` has passed, and its blocks count as lost already
        tier = self._tiers[confirmation.tier]
        tier.reading.succeeded()
        self._tiers.forget(tier, [key for key, there in zip(confirmation.keys, answers, strict=True) if not there])

    def confirm_failed(self, confirm_id: ConfirmId, started: Nanos, now: Nanos) -> None:
        """Record that a `Confirm` command failed or missed its deadline. Its blocks count as lost (rule 3)."""
        confirmation = self._answered(confirm_id)
        if confirmation is None:
            return  # the deadline of the `Confirm` has passed, and its blocks count as lost already
        tier = self._tiers[confirmation.tier]
        tier.failed(tier.reading, started, now)
        self._tiers.forget(tier, confirmation.keys)

    def check(self) -> None:
        """Assert that the counts and limits of this class are consistent; for tests."""
        assert self._late <= self._demotions.keys()
        for tier in self._tiers:
            assert (
                tier.demoting
                == sum(demotion.tier == tier.index for demotion in self._demotions.values())
                <= MAX_DEMOTIONS
            )
        assert self._unconfirmed == {(each.tier, key) for each in self._confirmations.values() for key in each.keys}

    def _ended(self, demotion_id: DemotionId, now: Nanos) -> tuple["_Demotion", TierState, bool]:
        """Remove a demotion that has ended, and unpin its blocks.

        Return the demotion, its tier, and True if the demotion had missed its deadline.
        """
        demotion = self._demotions.pop(demotion_id)
        tier = self._tiers[demotion.tier]
        was_late = demotion_id in self._late
        self._late.discard(demotion_id)
        tier.demoting -= 1
        self._pool.unpin(demotion.pinned.pin_id, now)
        return demotion, tier, was_late

    def _answered(self, confirm_id: ConfirmId) -> Confirm | None:
        confirmation = self._confirmations.pop(confirm_id, None)
        if confirmation is not None:
            self._unconfirmed.difference_update((confirmation.tier, key) for key in confirmation.keys)
        return confirmation


class _Demotion(Struct, frozen=True):
    """One batch of blocks for which a `Demote` command was made, until the copying thread reports that it is done."""

    id: DemotionId
    tier: int
    pinned: PinnedBlocks
    keys: frozenset[BlockKey]
    began: Nanos
    until: Nanos
