"""In-memory directory of workers for one process, used by tests and simulated clusters."""

import asyncio
from collections.abc import AsyncGenerator

from fleet.core.clock import Nanos
from fleet.core.discovery import WorkerRecord
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.messages import DirectoryListing, DirectoryReading, RecordMissing, RecordSeen
from fleet.membership.ports import DirectoryUnreachable, RegistryUnreachable, StatelessDirectory, WorkerSuperseded


class _SharedRecords:
    """Content that all views of one directory share."""

    def __init__(self) -> None:
        self.seen: dict[WorkerId, RecordSeen] = {}
        self.replaced: set[tuple[WorkerId, Incarnation]] = set()
        self.renewals = 0
        self.watchers: set[asyncio.Queue[DirectoryReading | None]] = set()

    def tell(self, sighting: DirectoryReading) -> None:
        for watcher in self.watchers:
            watcher.put_nowait(sighting)


class MemoryDirectory(StatelessDirectory):
    """Directory in memory. Implements `Registry` and `Directory` of `fleet.membership.ports`."""

    def __init__(self, lease_seconds: int = 9) -> None:
        self._lease_seconds = lease_seconds
        self.content = _SharedRecords()
        self._reachable = True
        self._watchers: set[asyncio.Queue[DirectoryReading | None]] = set()

    def beside(self) -> "MemoryDirectory":
        """Return another view of the same content, which can be cut off alone."""
        other = MemoryDirectory(self._lease_seconds)
        other.content = self.content
        return other

    def cut(self) -> None:
        """Cut this view off from the content."""
        self._reachable = False
        for watcher in self._watchers:
            watcher.put_nowait(None)

    def mend(self) -> None:
        self._reachable = True

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        content = self._reached()
        if (worker_id, incarnation) in content.replaced:
            raise WorkerSuperseded(f"{worker_id} is held by a newer process; every worker needs an id of its own")
        before = content.seen.get(worker_id)
        if before is not None and before.record.incarnation != incarnation:
            content.replaced.add((worker_id, before.record.incarnation))
        content.renewals += 1
        record = WorkerRecord(
            worker_id=worker_id, incarnation=incarnation, address=address, lease_seconds=self._lease_seconds
        )
        content.seen[worker_id] = RecordSeen(record=record, renewal=str(content.renewals))
        content.tell(content.seen[worker_id])
        return record.lease

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        content = self._reached()
        known = content.seen.get(worker_id)
        if known is not None and known.record.incarnation == incarnation:
            del content.seen[worker_id]
            content.tell(RecordMissing(worker_id=worker_id))

    async def readings(self) -> AsyncGenerator[DirectoryReading, None]:
        if not self._reachable:
            raise DirectoryUnreachable("it was cut off")
        watcher: asyncio.Queue[DirectoryReading | None] = asyncio.Queue()  # holds what this process itself writes
        for watchers in (self._watchers, self.content.watchers):
            watchers.add(watcher)
        try:
            yield DirectoryListing(all=tuple(self.content.seen.values()))
            while (sighting := await watcher.get()) is not None:
                yield sighting
            raise DirectoryUnreachable("it was cut off")
        finally:
            for watchers in (self._watchers, self.content.watchers):
                watchers.discard(watcher)

    def _reached(self) -> _SharedRecords:
        if not self._reachable:
            raise RegistryUnreachable("it was cut off")
        return self.content
