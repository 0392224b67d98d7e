"""What moves between a node's pool and the tiers below it: what is wanted comes up, what is worth keeping goes down. Pure.

Four parts: `kvstore.hierarchy.promotions` brings chains up, `kvstore.hierarchy.demotions` takes blocks down, and both share `kvstore.hierarchy.tier_states`, what is known of
each tier, and `kvstore.hierarchy.transfer_queue`, what is to be done. Each says its own rules; of all of it:

1. The pool's machine is the only one that leases and evicts. Blocks that come up get places reserved in it, blocks that
   go down are pinned in it: until the thread that copies them says that it is through, their bytes belong to it.
2. A tier that fails is fenced by a breaker: its blocks are misses, until one attempt after a pause finds it well. Reading and
   writing have one each.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore.block import BlockHash
from kvstore.clock import Nanos
from kvstore.errors import NamespaceUnknown
from kvstore.hierarchy.demotions import DemotionPool, Demotions
from kvstore.hierarchy.promotions import PromotionPool, Promotions
from kvstore.hierarchy.tier_states import TierRule, TierStates
from kvstore.hierarchy.transfer_queue import TransferQueue
from kvstore.hierarchy.transfers import Confirm, ConfirmId, Demote, DemotionId, PromotionId, TierCounters, TierTransfer
from kvstore.messages import BlockChanges, BlockKey, FetchResult

BATCH_BYTES = 8 << 20
"""That move at a time: enough for a disk's full speed, little enough for the first blocks of a load to be there soon."""


class HierarchyPool(PromotionPool, DemotionPool, Protocol):
    """What is needed of `kvstore.pool.machine.BlockMachine`."""


class Hierarchy:
    """See the module. After every call, `commands()` has to be performed, and `changes()` told."""

    def __init__(self, pool: HierarchyPool, rules: Sequence[TierRule], batch_bytes: int = BATCH_BYTES):
        """Nothing moves yet.

        Args:
            pool: Of this node.
            rules: Of the tiers below it, in the order in which they are asked.
            batch_bytes: That move at a time, and have a place in the pool meanwhile.
        """
        self._pool = pool
        self._tiers = TierStates(rules)
        self._queue = TransferQueue(batch_bytes)
        self._promotions = Promotions(pool, self._tiers, self._queue)
        self._demotions = Demotions(pool, self._tiers, self._queue)

    # Coming up

    @property
    def refused(self) -> int:
        """Loads that a limit of their number kept from beginning."""
        return self._promotions.refused

    def promotion_seconds(self, key: BlockKey, size_bytes: int) -> float | None:
        """How long a block takes from the first tier that is known to have it; None where there is none, or no speed."""
        for tier in self._tiers:
            if key in tier.known and tier.reading.closed:
                return tier.pace.latest(size_bytes)
        return None

    def loading(self, digest: bytes, names: Sequence[BlockHash]) -> int:
        """How many of these leading blocks, none of which is in the pool yet, are on their way or being looked for."""
        return self._promotions.loading(digest, names)

    def prefetch(
        self, digest: bytes, chain: Sequence[BlockHash], held: int, max_wait: Nanos, now: Nanos, tenant: bytes = b""
    ) -> int:
        """Somebody would use blocks of a chain beyond those in the pool; arguments and answer are those of `Promotions.prefetch`."""
        return self._promotions.prefetch(digest, chain, held, max_wait, now, tenant)

    def found(self, promotion_id: PromotionId, count: int, now: Nanos) -> None:
        """A tier has said how many of the blocks of a `Find` it holds."""
        self._promotions.found(promotion_id, count, now)

    def fetched(self, promotion_id: PromotionId, answers: Sequence[FetchResult], now: Nanos) -> None:
        """A `Fetch` is through: what of it came."""
        self._promotions.fetched(promotion_id, answers, now)

    @property
    def has_promoted(self) -> bool:
        """Whether `promoted` may say anything."""
        return self._promotions.has_promoted

    def promoted(self, digest: bytes, names: Iterable[BlockHash]) -> dict[str, int]:
        """How many of these blocks came up from which tier, as far as nobody was told before; the others were in the pool."""
        return self._promotions.promoted(digest, names)

    def left(self, digest: bytes, names: Iterable[BlockHash]) -> None:
        """Blocks are in the pool no more."""
        self._promotions.left(digest, names)

    # Going down

    def offer(self, digest: bytes, names: Iterable[BlockHash], now: Nanos) -> None:
        """Blocks of the pool were written or used: offer them to the tiers that should have them."""
        try:
            size_bytes = self._pool.block_bytes(digest)
        except NamespaceUnknown:
            return  # its blocks went before this was heard of
        keys = [BlockKey(digest, name) for name in names]
        for tier in self._tiers:
            if tier.rule.admission is None:
                continue
            for key in keys:
                if key not in tier.known and tier.rule.admission.admits(key, size_bytes, now):
                    tier.enqueue(key, size_bytes)
            self._demotions.begin_demotions(tier, now)

    def demote_now(self, tier: int, keys: Sequence[BlockKey], now: Nanos) -> int:
        """Have a tier keep blocks whatever its rule says, because the pool is given up.

        Returns:
            How many of these leading ones there was room for in its queue; call `commands()`.

        Raises:
            NamespaceUnknown: Theirs was never opened.
        """
        which = self._tiers[tier]
        taken = keys[: which.room]
        for key in taken:
            which.enqueue(key, self._pool.block_bytes(key.digest))
        self._demotions.begin_demotions(which, now)
        return len(taken)

    def room(self, tier: int) -> int:
        """For how many more blocks there is room in its queue."""
        return self._tiers[tier].room

    def is_demoting(self, tier: int, key: BlockKey) -> bool:
        """Whether a block waits for a tier, or is on its way to it."""
        return self._demotions.is_demoting(self._tiers[tier], key)

    def kept(self, demotion_id: DemotionId, answers: Sequence[bool], now: Nanos) -> None:
        """A `Demote` is through: what of it the tier has now."""
        self._demotions.kept(demotion_id, answers, now)

    def has(self, tier: int, key: BlockKey) -> bool:
        """Whether a tier is known to have a block. It may have gone since where `forgets`."""
        return key in self._tiers[tier].known

    def forgets(self, tier: int) -> bool:
        """Whether a tier may lose blocks without saying so: a server that restarts, or is short of memory."""
        return not self._tiers[tier].rule.finds_in_memory

    def confirm(self, tier: int, keys: Sequence[BlockKey], now: Nanos) -> bool:
        """Ask a tier which of these blocks it still has, but for those that it is being asked about already.

        Returns:
            False where it cannot be asked now: try again.
        """
        return self._demotions.confirm(self._tiers[tier], keys, now)

    def is_being_confirmed(self, tier: int, key: BlockKey) -> bool:
        """Whether a tier is being asked for a block right now; after that, `has` is what it said."""
        return self._demotions.is_being_confirmed(self._tiers[tier], key)

    def confirmed(self, confirm_id: ConfirmId, answers: Sequence[bool]) -> None:
        """A `Confirm` is through: what of it the tier has."""
        self._demotions.confirmed(confirm_id, answers)

    def failed_writes(self, tier: int) -> int:
        """How many writes to a tier have failed since one succeeded."""
        return self._tiers[tier].writing.failures

    # Both

    def failed(self, transfer: TierTransfer, started: Nanos, now: Nanos) -> None:
        """A command could not be performed, or not in time. Its buffers are free again.

        One that was late is no second failure: the longer a disk has hung, the longer it would then be left alone.
        """
        match transfer:
            case Demote(demotion_id=demotion_id):
                self._demotions.demotion_failed(demotion_id, started, now)
            case Confirm(confirm_id=confirm_id):
                self._demotions.confirm_failed(confirm_id, started, now)
            case _:
                self._promotions.failed(transfer, started, now)

    def late(self, transfer: TierTransfer, started: Nanos, now: Nanos) -> None:
        """A command has not come back in time. Its answer or failure is still awaited: until then its bytes are in use."""
        match transfer:
            case Demote(demotion_id=demotion_id):
                self._demotions.demotion_is_late(demotion_id, started, now)
            case Confirm(confirm_id=confirm_id):
                self._demotions.confirm_failed(confirm_id, started, now)
            case _:
                self._promotions.late(transfer, started, now)

    def gone(self, tier: int, keys: Sequence[BlockKey]) -> None:
        """A tier has let blocks go by itself."""
        self._tiers.gone(self._tiers[tier], keys)

    def tick(self, now: Nanos) -> None:
        """Time has passed: a tier that was fenced may be tried again."""
        for tier in self._tiers:
            self._demotions.begin_demotions(tier, now)

    def commands(self) -> list[TierTransfer]:
        """What has to be done, in order; each is handed out once."""
        return self._queue.taken()

    def changes(self) -> list[BlockChanges]:
        """What watchers have to learn; each change is handed out once."""
        return self._tiers.changes()

    def held(self, tier: int) -> list[BlockKey]:
        """What is known to be in a tier, for watchers that have heard nothing yet."""
        return list(self._tiers[tier].known)

    def counters(self, tier: int) -> TierCounters:
        return self._tiers[tier].counters

    @property
    def is_idle(self) -> bool:
        """Whether nothing moves, and nothing waits to."""
        return self._promotions.is_idle and self._demotions.is_idle

    def check(self) -> None:
        """Asserts what always holds; for tests."""
        self._promotions.check()
        self._demotions.check()
        self._tiers.check()
