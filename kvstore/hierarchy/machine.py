"""Tier hierarchy: decides which blocks are copied between a node's pool and its backing tiers.

`kvstore.hierarchy.promotions` decides which chains are copied from the tiers to the pool, and
`kvstore.hierarchy.demotions` which blocks are copied from the pool to the tiers. Both use
`kvstore.hierarchy.tier_states`, which holds what the node knows about each tier, and
`kvstore.hierarchy.transfer_queue`, which holds the decided transfers. None of these modules does I/O. The first three
modules have further rules of their own. The following rules hold for all modules:

1. Only the pool machine leases and evicts blocks. The hierarchy reserves slots of the pool for promoted blocks, and
   pins the blocks that it demotes. These slots and blocks stay reserved or pinned until the copying thread reports that
   it is done.
2. A circuit breaker protects the node from a failing tier: the tier's blocks count as misses until a trial after a
   pause succeeds. Reading and writing have separate breakers.
"""

from collections.abc import Iterable, Sequence

from kvstore.block import BlockHash
from kvstore.clock import Nanos
from kvstore.errors import NamespaceUnknown
from kvstore.hierarchy.demotions import Demotions
from kvstore.hierarchy.promotions import Promotions
from kvstore.hierarchy.tier_states import TierRule, TierStates
from kvstore.hierarchy.transfer_queue import TransferQueue
from kvstore.hierarchy.transfers import Confirm, ConfirmId, Demote, DemotionId, PromotionId, TierCounters, TierTransfer
from kvstore.messages import BlockChanges, BlockKey, FetchResult
from kvstore.pool.machine import BlockMachine

BATCH_BYTES = 8 << 20
"""Maximum number of bytes that one transfer copies, unless one block is larger. This is large enough for a disk's full
speed, and small enough that the first blocks arrive soon."""


class Hierarchy:
    """Decides all transfers of one node. `rules` has one rule per tier, in the order in which the tiers are asked.

    After each call, the caller has to perform the transfers of `commands()` and to send `changes()` to the watchers.
    """

    def __init__(self, pool: BlockMachine, rules: Sequence[TierRule], batch_bytes: int = BATCH_BYTES):
        self._pool = pool
        self._tiers = TierStates(rules)
        self._queue = TransferQueue(batch_bytes)
        self._promotions = Promotions(pool, self._tiers, self._queue)
        self._demotions = Demotions(pool, self._tiers, self._queue)

    # The methods below are for promotions.

    @property
    def refused(self) -> int:
        """Number of promotions since the node started that were not begun because too many others were running."""
        return self._promotions.refused

    def promotion_seconds(self, key: BlockKey, size_bytes: int) -> float | None:
        """Return the predicted seconds to promote a block from the first working tier that is believed to have it.

        Return None if no working tier has the block, or if the speed of the tier was not measured yet.
        """
        for tier in self._tiers:
            if key in tier.known and tier.reading.closed:
                return tier.speed.latest(size_bytes)
        return None

    def loading(self, digest: bytes, names: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of `names` are being promoted or looked for.

        The caller passes only blocks that are not in the pool.
        """
        return self._promotions.loading(digest, names)

    def prefetch(
        self, digest: bytes, chain: Sequence[BlockHash], held: int, max_wait: Nanos, now: Nanos, tenant: bytes = b""
    ) -> int:
        """Promote the blocks of a chain after the `held` blocks that are in the pool; see `Promotions.prefetch`."""
        return self._promotions.prefetch(digest, chain, held, max_wait, now, tenant)

    def found(self, promotion_id: PromotionId, count: int, now: Nanos) -> None:
        """Record that a tier has the first `count` blocks of a `Find` command, and continue the promotion."""
        self._promotions.found(promotion_id, count, now)

    def fetched(self, promotion_id: PromotionId, answers: Sequence[FetchResult], now: Nanos) -> None:
        """Record the results of a `Fetch` command, one for each of its blocks, and continue the promotion."""
        self._promotions.fetched(promotion_id, answers, now)

    @property
    def has_promoted(self) -> bool:
        """True if there are promoted blocks that no call of `promoted` has counted yet."""
        return self._promotions.has_promoted

    def promoted(self, digest: bytes, names: Iterable[BlockHash]) -> dict[str, int]:
        """Return how many of these blocks were promoted from each tier.

        Each promoted block is counted in one call only.
        """
        return self._promotions.promoted(digest, names)

    def forget_origins(self, digest: bytes, names: Iterable[BlockHash]) -> None:
        """Forget from which tiers these blocks were promoted, because they left the pool."""
        self._promotions.forget_origins(digest, names)

    # The methods below are for demotions.

    def offer(self, digest: bytes, names: Iterable[BlockHash], now: Nanos) -> None:
        """Offer blocks that were written or used in the pool to all tiers.

        The admission rule of each tier decides which of these blocks are demoted to the tier.
        """
        try:
            size_bytes = self._pool.block_bytes(digest)
        except NamespaceUnknown:
            return  # the namespace has been closed since the blocks were used
        keys = [BlockKey(digest, name) for name in names]
        for tier in self._tiers:
            if tier.rule.admission is None:
                continue
            for key in keys:
                if key not in tier.known and tier.rule.admission.admits(key, size_bytes, now):
                    tier.enqueue(key, size_bytes)
            self._demotions.begin_demotions(tier, now)

    def demote_now(self, tier: int, keys: Sequence[BlockKey], now: Nanos) -> int:
        """Queue blocks for a tier regardless of its admission rule, because they are being evacuated.

        Return how many leading blocks of `keys` fit into the queue. Raise NamespaceUnknown if their namespace is not
        open.
        """
        which = self._tiers[tier]
        taken = keys[: which.room]
        for key in taken:
            which.enqueue(key, self._pool.block_bytes(key.digest))
        self._demotions.begin_demotions(which, now)
        return len(taken)

    def room(self, tier: int) -> int:
        """Return how many more blocks fit into a tier's queue."""
        return self._tiers[tier].room

    def is_demoting(self, tier: int, key: BlockKey) -> bool:
        """Return whether a block waits in a tier's queue or is being copied to the tier."""
        return self._demotions.is_demoting(self._tiers[tier], key)

    def kept(self, demotion_id: DemotionId, answers: Sequence[bool], now: Nanos) -> None:
        """Record the end of a `Demote` command, and begin queued demotions.

        `answers` tells for each block of the command whether the tier has the block now.
        """
        self._demotions.kept(demotion_id, answers, now)

    def has(self, tier: int, key: BlockKey) -> bool:
        """Return whether a tier is believed to have a block.

        A tier for which `forgets` is True may have lost the block.
        """
        return key in self._tiers[tier].known

    def forgets(self, tier: int) -> bool:
        """Return whether a tier may lose blocks without reporting it, such as a server that is short of memory."""
        return not self._tiers[tier].rule.finds_in_memory

    def confirm(self, tier: int, keys: Sequence[BlockKey], now: Nanos) -> bool:
        """Ask a tier which of these blocks it still has. Blocks of a pending `Confirm` command are not asked for again.

        Return False if the tier's circuit breaker does not allow a call now; the caller may try again later.
        """
        return self._demotions.confirm(self._tiers[tier], keys, now)

    def is_being_confirmed(self, tier: int, key: BlockKey) -> bool:
        """Return True while a `Confirm` command for this block is pending at this tier."""
        return self._demotions.is_being_confirmed(self._tiers[tier], key)

    def confirmed(self, confirm_id: ConfirmId, answers: Sequence[bool]) -> None:
        """Record the end of a `Confirm` command. `answers` tells for each of its keys whether the tier has the block."""
        self._demotions.confirmed(confirm_id, answers)

    def failed_writes(self, tier: int) -> int:
        """Return how many writes to a tier have failed since the last successful one."""
        return self._tiers[tier].writing.failures

    # The methods below are for both promotions and demotions.

    def failed(self, transfer: TierTransfer, started: Nanos, now: Nanos) -> None:
        """Record that a transfer failed and that its thread no longer uses its buffers.

        If the transfer has already been reported as late (`late`), it is not counted as a second failure. If it were
        counted again, one hang of a disk would count as two failures, and the pause of the circuit breaker would be
        twice as long.
        """
        match transfer:
            case Demote(demotion_id=demotion_id):
                self._demotions.demotion_failed(demotion_id, started, now)
            case Confirm(confirm_id=confirm_id):
                self._demotions.confirm_failed(confirm_id, started, now)
            case _:
                self._promotions.failed(transfer, started, now)

    def late(self, transfer: TierTransfer, started: Nanos, now: Nanos) -> None:
        """Record that a transfer missed its deadline. Its buffers stay in use until its thread reports the end."""
        match transfer:
            case Demote(demotion_id=demotion_id):
                self._demotions.demotion_is_late(demotion_id, started, now)
            case Confirm(confirm_id=confirm_id):
                self._demotions.confirm_failed(confirm_id, started, now)
            case _:
                self._promotions.late(transfer, started, now)

    def gone(self, tier: int, keys: Sequence[BlockKey]) -> None:
        """Record that a tier has removed blocks by itself, without a command of this node."""
        self._tiers.gone(self._tiers[tier], keys)

    def tick(self, now: Nanos) -> None:
        """Begin queued demotions to the tiers whose circuit breaker allows a write now."""
        for tier in self._tiers:
            self._demotions.begin_demotions(tier, now)

    def commands(self) -> list[TierTransfer]:
        """Return the decided transfers in order. Each transfer is returned only once."""
        return self._queue.take_all()

    def changes(self) -> list[BlockChanges]:
        """Return the changes of the tiers' contents that watchers must receive. Each change is returned only once."""
        return self._tiers.changes()

    def held(self, tier: int) -> list[BlockKey]:
        """Return the blocks that this node believes to be in a tier, for watchers that have just connected."""
        return list(self._tiers[tier].known)

    def counters(self, tier: int) -> TierCounters:
        return self._tiers[tier].counters

    @property
    def is_idle(self) -> bool:
        """True if no transfer is running or queued."""
        return self._promotions.is_idle and self._demotions.is_idle

    def check(self) -> None:
        """Assert that the state of all parts is consistent; for tests."""
        self._promotions.check()
        self._demotions.check()
        self._tiers.check()
