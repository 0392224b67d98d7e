"""Directory diff: compares each reading of a directory with the records seen before, and returns membership events.

Rules:

1. A listing is complete: a worker that was known before and is missing in it has been withdrawn.
2. A lease starts when this process sees its renewal, by the clock of this process. If a record is seen again without a
   change, its lease has not been renewed. So the worker of a record that nobody renews is a member for one lease at most.
3. If the directory itself removes records whose lease has ended (`RecordSeen.renewal` is None), every record that it
   still contains counts as renewed.
"""

from typing import assert_never

from fleet.core.ids import WorkerId
from fleet.membership.messages import (
    DirectoryListing,
    DirectoryReading,
    DirectoryRenewal,
    RecordMissing,
    RecordSeen,
    RecordWithdrawn,
)


class DirectoryDiff:
    """Turns readings of a directory into membership events, by comparing them with the last record of each worker."""

    def __init__(self) -> None:
        self._seen: dict[WorkerId, RecordSeen] = {}

    def handle(self, sighting: DirectoryReading) -> list[DirectoryRenewal | RecordWithdrawn]:
        match sighting:
            case DirectoryListing():
                there = {seen.record.worker_id for seen in sighting.all}
                missing = [worker_id for worker_id in self._seen if worker_id not in there]
                changes = [each for worker_id in missing for each in self._miss(worker_id)]
                return [*changes, *(each for seen in sighting.all for each in self._see(seen))]
            case RecordSeen():
                return self._see(sighting)
            case RecordMissing():
                return self._miss(sighting.worker_id)
            case _:
                assert_never(sighting)

    def _see(self, seen: RecordSeen) -> list[DirectoryRenewal | RecordWithdrawn]:
        record = seen.record
        before = self._seen.get(record.worker_id)
        self._seen[record.worker_id] = seen
        if seen == before and seen.renewal is not None:
            return []
        return [
            DirectoryRenewal(
                worker_id=record.worker_id, incarnation=record.incarnation, address=record.address, lease=record.lease
            )
        ]

    def _miss(self, worker_id: WorkerId) -> list[DirectoryRenewal | RecordWithdrawn]:
        gone = self._seen.pop(worker_id, None)
        return [] if gone is None else [RecordWithdrawn(worker_id=worker_id, incarnation=gone.record.incarnation)]
