"""Promotions: decides when chains are copied from the backing tiers to the pool.

The class `Promotions` is a part of `kvstore.hierarchy.machine`. Rules:

1. A promotion follows one chain, from the first block that is not in the pool. It asks the tiers one after the other,
   in the order of the settings, for one batch at a time. A batch is readable as soon as it has arrived. The promotion
   ends at the first block that no tier has or can deliver in time (blocks after a gap are useless), when the pool has
   no space, or at its deadline. After its end it begins no transfer, but a transfer that is running still finishes.
2. No block is promoted twice at a time. A request for blocks that are being promoted joins their promotion and may
   extend its deadline.
3. A batch is copied from a tier only if the copy is predicted to end before the promotion's deadline. The deadline is
   the end of the max wait of the request, which is the time that computing the blocks again would take.
4. Slots for promoted blocks are reserved without a deadline, because the thread that copies a block may hang as long as
   the disk hangs. The slots stay reserved until the thread reports that it is done.
"""

from collections.abc import Iterable, Sequence

from kvstore.block import BlockHash
from kvstore.clock import SECOND, Nanos
from kvstore.errors import NamespaceUnknown
from kvstore.hierarchy.tier_states import TierState, TierStates
from kvstore.hierarchy.transfer_queue import TransferQueue
from kvstore.hierarchy.transfers import Fetch, Find, PromotionId
from kvstore.messages import NODE, Address, BlockKey, BlockOutcome, FetchResult, Slot, WriteReservation
from kvstore.pool.machine import BlockMachine

MAX_PROMOTIONS = 64
# maximum number of blocks in one promotion; a longer chain needs another request for its further blocks
MAX_PROMOTION_BLOCKS = 4096
MAX_UNREPORTED = 1 << 16
"""Maximum number of promoted blocks whose tier is remembered until a match reports it to a client. If there are more,
the oldest ones are reported as blocks that were in the pool already."""

FETCH_AT_LEAST = Nanos(1 * SECOND)
"""Minimum time from a `Fetch` command to its deadline, even if the max wait of the request ends earlier."""


class Promotions:
    """Decides which chains are copied from the tiers of one node to its pool, and from which tier."""

    def __init__(self, pool: BlockMachine, tiers: TierStates, queue: TransferQueue):
        self._pool = pool
        self._tiers = tiers
        self._queue = queue
        self._promotions: dict[PromotionId, _Promotion] = {}
        self._loading: dict[BlockKey, _Promotion] = {}
        # Reservations of promotions that ended because a transfer was late. They are kept, because the thread of the
        # transfer may still write to the slots.
        self._late_reservations: dict[PromotionId, WriteReservation] = {}
        # Name of the tier from which each block was promoted. An entry is removed when a match reports the block to a
        # client, or when the block leaves the pool.
        self._promoted: dict[BlockKey, str] = {}
        self.refused = 0  # number of promotions that were not begun because of MAX_PROMOTIONS

    @property
    def is_idle(self) -> bool:
        return not self._promotions and not self._late_reservations

    def loading(self, digest: bytes, names: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of `names` are being promoted or looked for.

        The caller passes only blocks that are not in the pool.
        """
        for count, name in enumerate(names):
            if BlockKey(digest, name) not in self._loading:
                return count
        return len(names)

    def prefetch(
        self, digest: bytes, chain: Sequence[BlockHash], held: int, max_wait: Nanos, now: Nanos, tenant: bytes = b""
    ) -> int:
        """Promote the blocks of a chain after the `held` leading blocks, which are in the pool.

        `max_wait` is the maximum time that the requester will wait: the time that computing the blocks would take. The
        promoted blocks count towards the quota of `tenant`. Return the number of consecutive blocks after the `held`
        blocks that are being promoted or looked for. Promote nothing and return 0 if `max_wait` is 0, or if too many
        promotions are running.
        """
        missing = chain[held : held + MAX_PROMOTION_BLOCKS]
        if not missing or max_wait <= 0 or not self._tiers:
            return 0
        deadline = Nanos(now + max_wait)
        promotion = self._loading.get(BlockKey(digest, missing[0]))
        if promotion is None:
            if len(self._promotions) >= MAX_PROMOTIONS:
                self.refused += 1
                return 0
            keys = [BlockKey(digest, name) for name in missing]
            # Stop before a block that is being promoted already. Its promotion also copies the blocks after it, as far
            # as its chain is the same.
            keys = keys[: next((i for i, key in enumerate(keys) if key in self._loading), None)]
            block_bytes = self._pool.block_bytes(digest)
            chain = tuple(chain[: held + len(keys)])
            promotion = _Promotion(
                PromotionId(self._queue.new_id()), digest, block_bytes, chain, held, deadline, tenant
            )
            self._promotions[promotion.id] = promotion
            self._loading.update(dict.fromkeys(keys, promotion))
            self._ask_tiers(promotion, 0, now)
        else:
            promotion.deadline = max(promotion.deadline, deadline)
        return self.loading(digest, missing)

    def found(self, promotion_id: PromotionId, count: int, now: Nanos) -> None:
        """Record that a tier has the first `count` blocks of a `Find` command, and continue the promotion."""
        promotion = self._promotions.get(promotion_id)
        if promotion is None:
            return  # the promotion has ended
        tier = self._tiers[promotion.tier]
        if not tier.rule.finds_in_memory:
            tier.reading.succeeded()
        self._forget_lost(promotion, tier, count)
        if count == 0:
            self._ask_tiers(promotion, promotion.tier + 1, now)
            return
        if tier.speed.seconds(count * promotion.block_bytes, now) > (promotion.deadline - now) / SECOND:
            tier.counters.too_slow += 1
            self._ask_tiers(promotion, promotion.tier + 1, now)
            return
        count = min(count, self._queue.batch_blocks(promotion.block_bytes))
        names = promotion.chain[: promotion.position + count]
        try:
            reservation = self._pool.reserve(
                promotion.digest, names, owner=NODE, lease=None, now=now, tenant=promotion.tenant
            )
        # The namespace had no blocks and was closed meanwhile, so no client needs these blocks any more.
        except NamespaceUnknown:
            self._end(promotion)
            return
        run = [place for place in reservation.reserved if place.index >= promotion.position]
        # Either the pool has no space (`run` is empty), or another writer has just reserved the first block of the
        # batch.
        if not run or run[0].index != promotion.position:
            self._give_back(reservation, now)
            self._ask_tiers(promotion, promotion.tier, now) if run else self._end(promotion)
            return
        run = [place for index, place in enumerate(run) if place.index == promotion.position + index]
        promotion.reservation = reservation
        promotion.places = tuple(place.index for place in run)
        promotion.began = now
        promotion.until = Nanos(max(promotion.deadline, now + FETCH_AT_LEAST))
        addresses = tuple(self._address(promotion.digest, place.slot) for place in run)
        self._queue.put(Fetch(promotion.id, tier.index, addresses, promotion.until))

    def fetched(self, promotion_id: PromotionId, answers: Sequence[FetchResult], now: Nanos) -> None:
        """Record the results of a `Fetch` command, one for each of its blocks, and continue the promotion."""
        promotion = self._promotions.get(promotion_id)
        if promotion is None:
            self._release(promotion_id, now)
            return
        tier = self._tiers[promotion.tier]
        good = next((i for i, answer in enumerate(answers) if answer.outcome is not BlockOutcome.MOVED), len(answers))
        if good or now < promotion.until:
            tier.reading.succeeded()
        else:
            # No block arrived by the deadline, for example because the fetch waited behind a call that hangs.
            tier.failed(tier.reading, promotion.began, now)
        tier.speed.measured(good * promotion.block_bytes, now - promotion.began, now)
        tier.counters.loaded += good
        keys = [BlockKey(promotion.digest, promotion.chain[index]) for index in promotion.places]
        self._tiers.know(
            tier, [key for key, answer in zip(keys, answers, strict=True) if answer.outcome is BlockOutcome.MOVED]
        )
        if not tier.rule.finds_in_memory:
            self._tiers.forget(
                tier, [k for k, a in zip(keys, answers, strict=True) if a.outcome is not BlockOutcome.MOVED]
            )
        self._publish(promotion, answers[:good], now)
        self._promoted.update(dict.fromkeys(keys[:good], tier.rule.name))
        while len(self._promoted) > MAX_UNREPORTED:
            del self._promoted[next(iter(self._promoted))]
        # After a complete batch, begin again with the first tier. If this tier did not deliver a block that it had
        # announced, the next tier may have the block.
        self._ask_tiers(promotion, 0 if good == len(answers) else promotion.tier + 1, now)

    @property
    def has_promoted(self) -> bool:
        """True if there are promoted blocks that no call of `promoted` has counted yet."""
        return bool(self._promoted)

    def promoted(self, digest: bytes, names: Iterable[BlockHash]) -> dict[str, int]:
        """Return how many of these blocks were promoted from each tier.

        Each promoted block is counted in one call only.
        """
        found: dict[str, int] = {}
        for name in names:
            if (tier := self._promoted.pop(BlockKey(digest, name), None)) is not None:
                found[tier] = found.get(tier, 0) + 1
        return found

    def forget_origins(self, digest: bytes, names: Iterable[BlockHash]) -> None:
        """Forget from which tiers these blocks were promoted, because they left the pool."""
        if self._promoted:
            for name in names:
                self._promoted.pop(BlockKey(digest, name), None)

    def failed(self, transfer: Find | Fetch, started: Nanos, now: Nanos) -> None:
        """Record that a `Find` or `Fetch` command failed, and continue its promotion with the next tier.

        If the promotion has ended already, release its slots.
        """
        promotion = self._promotions.get(transfer.promotion_id)
        if promotion is None:
            self._release(transfer.promotion_id, now)
            return
        tier = self._tiers[transfer.tier]
        tier.failed(tier.reading, started, now)
        if isinstance(transfer, Fetch):
            self._publish(promotion, (), now)
        self._ask_tiers(promotion, promotion.tier + 1, now)

    def late(self, transfer: Find | Fetch, started: Nanos, now: Nanos) -> None:
        """End a promotion whose `Find` or `Fetch` command missed its deadline.

        Keep its slots reserved, because the thread may still write to them.
        """
        tier = self._tiers[transfer.tier]
        tier.failed(tier.reading, started, now)
        promotion = self._promotions[transfer.promotion_id]
        if promotion.reservation is not None:
            self._late_reservations[promotion.id], promotion.reservation = promotion.reservation, None
        self._end(promotion)

    def check(self) -> None:
        """Assert that the state of all promotions is consistent; for tests."""
        assert len(self._promotions) <= MAX_PROMOTIONS
        for promotion in self._promotions.values():
            for name in promotion.chain[promotion.position :]:
                assert self._loading[BlockKey(promotion.digest, name)] is promotion
        assert set(self._loading.values()) <= set(self._promotions.values())

    def _ask_tiers(self, promotion: "_Promotion", tier_index: int, now: Nanos) -> None:
        """Ask one tier for the next batch: the first tier, from `tier_index` on, whose circuit breaker allows a call.

        Blocks that are already in the pool are skipped. End the promotion if no block is left, if its deadline has
        passed, or if no tier can be asked.
        """
        while promotion.position < len(promotion.chain) and self._pool.is_present(
            BlockKey(promotion.digest, promotion.chain[promotion.position])
        ):
            self._advance(promotion, 1)  # the block is in the pool, or another writer has reserved it
        if promotion.position == len(promotion.chain) or now >= promotion.deadline:
            self._end(promotion)
            return
        batch = self._queue.batch_blocks(promotion.block_bytes)
        for tier in self._tiers.from_index(tier_index):
            if not tier.reading.allows(now):
                continue
            promotion.tier = tier.index
            keys = tuple(
                BlockKey(promotion.digest, name)
                for name in promotion.chain[promotion.position : promotion.position + batch]
            )
            self._queue.put(Find(promotion.id, tier.index, keys, promotion.deadline))
            return
        self._end(promotion)

    def _forget_lost(self, promotion: "_Promotion", tier: TierState, count: int) -> None:
        """Forget blocks that a tier was believed to have but did not find (rule 1 of `kvstore.hierarchy.tier_states`).

        A tier with an index in memory reports the blocks that it removes, so the node's knowledge of it is usually
        right. It can be wrong for a block if a report about the block was delayed. Only the first missing block is
        therefore forgotten. A tier without such an index reports no removals, and may still have blocks after the first
        missing one. Nevertheless the rest of the chain is forgotten too: offering these blocks to the tier once more
        costs little, while finding each miss separately would cost one look-up per block.
        """
        if count < self._queue.batch_blocks(promotion.block_bytes):
            missing = promotion.chain[promotion.position + count :]
            missing = missing[:1] if tier.rule.finds_in_memory else missing
            self._tiers.forget(tier, [BlockKey(promotion.digest, name) for name in missing])

    def _publish(self, promotion: "_Promotion", answers: Sequence[FetchResult], now: Nanos) -> None:
        """Publish the blocks that have arrived, and release the other slots of the reservation."""
        assert promotion.reservation is not None
        reservation, promotion.reservation = promotion.reservation, None
        checksums = {index: answer.crc32c for index, answer in zip(promotion.places, answers, strict=False)}
        self._pool.publish(reservation.reservation_id, checksums, owner=NODE, now=now)
        self._advance(promotion, len(answers))

    def _address(self, digest: bytes, slot: Slot) -> Address:
        address = self._pool.writable(digest, slot)
        assert address is not None, "the place was reserved just now"
        return address

    def _release(self, promotion_id: PromotionId, now: Nanos) -> None:
        """Release the slots of a promotion that ended because a transfer was late. The transfer has finished now."""
        if (reservation := self._late_reservations.pop(promotion_id, None)) is not None:
            self._give_back(reservation, now)

    def _give_back(self, reservation: WriteReservation, now: Nanos) -> None:
        if reservation.reserved:
            self._pool.publish(reservation.reservation_id, {}, owner=NODE, now=now)

    def _advance(self, promotion: "_Promotion", blocks: int) -> None:
        for name in promotion.chain[promotion.position : promotion.position + blocks]:
            del self._loading[BlockKey(promotion.digest, name)]
        promotion.position += blocks

    def _end(self, promotion: "_Promotion") -> None:
        self._advance(promotion, len(promotion.chain) - promotion.position)
        del self._promotions[promotion.id]


class _Promotion:
    """Promotion of one chain. `position` is the index in the chain of the first block that is not in the pool."""

    __slots__ = (
        "began",
        "block_bytes",
        "chain",
        "deadline",
        "digest",
        "id",
        "places",
        "position",
        "reservation",
        "tenant",
        "tier",
        "until",
    )

    def __init__(
        self,
        promotion_id: PromotionId,
        digest: bytes,
        block_bytes: int,
        chain: tuple[BlockHash, ...],
        position: int,
        deadline: Nanos,
        tenant: bytes,
    ):
        self.id = promotion_id
        self.digest = digest
        self.block_bytes = block_bytes
        self.chain = chain
        self.position = position
        self.deadline = deadline
        self.tenant = tenant
        self.tier = 0  # index of the tier that was asked last
        self.reservation: WriteReservation | None = None  # reservation of the running batch
        self.places: tuple[int, ...] = ()  # the blocks of the running batch, as indices into the chain
        self.began = Nanos(0)
        self.until = Nanos(0)
