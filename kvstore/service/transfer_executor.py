"""Transfer executor: performs the transfers of the hierarchy in threads and reports their results to it.

Rules:

1. There is no `await` between an answer of a tier and the hierarchy's decision on it, so the state cannot change in
   between.
2. A transfer is late if it has not ended `LATE_SECONDS` after its deadline. A late transfer counts as a failure of its
   tier, and no promotion waits for it any longer. The places in the pool that it reads or writes stay in use until its
   thread returns (rule 1 of `kvstore.hierarchy.machine`). If no thread has begun a late transfer, it never begins. A
   hanging tier therefore occupies only the places of the transfers that its threads have begun.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from kvstore.block import BlockHash
from kvstore.buffers import ByteArray
from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import TierFailed
from kvstore.hierarchy.machine import Hierarchy
from kvstore.hierarchy.transfers import OPERATIONS, Confirm, Demote, Fetch, Find, TierTransfer
from kvstore.messages import Address, BlockChanges, TierStatus
from kvstore.ports import BackingTier, MemoryTier
from kvstore.tiers.daemon_threads import DaemonThreads

THREADS_PER_TIER = 4  # number of threads that perform the transfers of one tier
LATE_SECONDS = 0.5  # a transfer is late if it has not ended this long after its deadline (rule 2)

Tell = Callable[[Nanos], None]
"""A function that reports the result of a transfer to the hierarchy; its argument is the current instant."""

log = logging.getLogger(__name__)


class TransferExecutor:
    """Performs the transfers of one hierarchy. The caller has to call `settle` after each call of a method of `Hierarchy`."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        tiers: Sequence[BackingTier],
        pool: MemoryTier,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        on_answer: Callable[[], None],
        on_moved: Callable[[str, str, float], None] = lambda *_: None,
    ):
        """Start without transfers.

        Args:
            hierarchy: Decides the transfers, and learns their results.
            tiers: Backing tiers, in the order of the hierarchy.
            pool: Memory of the pool, from which and to which blocks are copied.
            clock: Clock of the transfers' deadlines.
            tasks: Task group in which the transfers run.
            on_answer: Called after the hierarchy has decided on an answer of a tier, a failure, or a late transfer;
                this function has to call `settle`.
            on_moved: Called after each transfer that a thread has made without an error, with the tier's name, the
                operation and its duration in seconds.
        """
        self._hierarchy = hierarchy
        self._tiers = tiers
        self._pool = pool
        self._clock = clock
        self._tasks = tasks
        self._on_answer = on_answer
        self._on_moved = on_moved
        self._threads_by_tier = [DaemonThreads(f"kvstore-{tier.name}", THREADS_PER_TIER) for tier in tiers]
        # For the log: each tier that fails now, as its index and True if writing fails or False if reading fails.
        self._failing: set[tuple[int, bool]] = set()
        self._running: set[asyncio.Task[None]] = set()

    def settle(self) -> None:
        """Begin the transfers that the hierarchy has decided. A `Find` in an index in memory is made at once."""
        while transfers := self._hierarchy.commands():
            for transfer in transfers:
                if isinstance(transfer, Find) and self._tiers[transfer.tier].finds_in_memory:
                    self._report(transfer, self._call(transfer))
                else:
                    task = self._tasks.create_task(self._perform(transfer))
                    self._running.add(task)
                    task.add_done_callback(self._running.discard)

    def held(self) -> list[BlockChanges]:
        """Return the blocks of each tier, as far as the node knows them without asking a server."""
        changes = []
        for index, tier in enumerate(self._tiers):
            names: dict[bytes, list[BlockHash]] = {}
            for key in tier.held() if tier.finds_in_memory else self._hierarchy.held(index):
                names.setdefault(key.digest, []).append(key.name)
            changes += [BlockChanges(digest=each, stored=tuple(names[each]), tier=tier.name) for each in names]
        return changes

    def status(self) -> tuple[TierStatus, ...]:
        """Return the state of all tiers, in their order. Blocks that did not fit into a tier's queue count as refused.

        The failures in this state are those that the tiers count: they count a hanging call only when it returns. The
        hierarchy counts it when its transfer is late (`TierCounters.failures`).
        """
        return tuple(
            replace(status, refused=status.refused + self._hierarchy.counters(index).dropped)
            for index, status in enumerate(tier.status() for tier in self._tiers)
        )

    def close(self) -> None:
        """Cancel running transfers. Do not wait for threads that hang; these end with the process."""
        for task in self._running:
            task.cancel()
        for threads in self._threads_by_tier:
            threads.close()

    async def _perform(self, transfer: TierTransfer) -> None:
        started = self._clock.now()
        call = self._threads_by_tier[transfer.tier].submit(self._call, transfer)
        outcome = asyncio.wrap_future(call)
        try:
            await asyncio.wait([outcome], timeout=seconds(max(transfer.deadline - started, 0)) + LATE_SECONDS)
            if not outcome.done():
                if call.cancel():
                    raise TierFailed("all threads of the tier hang")
                self._hierarchy.late(transfer, started, self._clock.now())
                self._note_failure(transfer, "no answer in time")
                self._on_answer()
            tell = await outcome
            self._on_moved(
                self._tiers[transfer.tier].name, OPERATIONS[type(transfer)], seconds(self._clock.now() - started)
            )
            self._report(transfer, tell)
        except TierFailed as error:
            self._hierarchy.failed(transfer, started, self._clock.now())
            self._note_failure(transfer, str(error))
        except Exception:  # supervisor: a tier with a bug may raise any exception; only this transfer fails
            log.exception("tier raised an unexpected error")
            self._hierarchy.failed(transfer, started, self._clock.now())
        finally:
            call.cancel()  # has an effect only if the node stops before a thread has begun the call
            outcome.cancel()
        self._on_answer()

    def _call(self, transfer: TierTransfer) -> Tell:
        """Perform a transfer in the current thread; return a function that reports its result."""
        tier = self._tiers[transfer.tier]
        match transfer:
            case Find(promotion_id=promotion_id, keys=keys, deadline=deadline):
                return partial(self._hierarchy.found, promotion_id, tier.find(keys, deadline))
            case Fetch(promotion_id=promotion_id, addresses=addresses, deadline=deadline):
                fetched = tier.get([each.key for each in addresses], self._views(addresses), deadline)
                return partial(self._hierarchy.fetched, promotion_id, fetched)
            case Demote(demotion_id=demotion_id, addresses=addresses, checksums=checksums, deadline=deadline):
                kept = tier.put([each.key for each in addresses], self._views(addresses), deadline, checksums)
                return partial(self._hierarchy.kept, demotion_id, kept)
            case Confirm(confirm_id=confirm_id, keys=keys, deadline=deadline):
                there = tier.holds(keys, deadline)
                return lambda _: self._hierarchy.confirmed(confirm_id, there)

    def _views(self, addresses: Sequence[Address]) -> list[ByteArray]:
        return [self._pool.view(address) for address in addresses]

    def _report(self, transfer: TierTransfer, tell: Tell) -> None:
        tier = self._tiers[transfer.tier]
        tell(self._clock.now())
        if gone := tier.gone():
            self._hierarchy.gone(transfer.tier, gone)
        if (isinstance(transfer, Find) and tier.finds_in_memory) or self._clock.now() >= transfer.deadline:
            return  # a look-up in memory or a late call does not show that the tier works, even if it succeeds
        if (direction := _direction(transfer)) in self._failing:
            self._failing.discard(direction)
            log.info("tier works again", extra={"tier": tier.name, "writing": direction[1]})

    def _note_failure(self, transfer: TierTransfer, cause: str) -> None:
        if (direction := _direction(transfer)) not in self._failing:
            self._failing.add(direction)
            log.warning(
                "tier fails", extra={"tier": self._tiers[transfer.tier].name, "writing": direction[1], "cause": cause}
            )


def _direction(transfer: TierTransfer) -> tuple[int, bool]:
    return transfer.tier, isinstance(transfer, Demote)
