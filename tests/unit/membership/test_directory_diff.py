"""Directory diff: readings of a directory become membership events."""

from fleet.core.clock import SECOND
from fleet.core.discovery import WorkerRecord
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.directory_diff import DirectoryDiff
from fleet.membership.messages import DirectoryListing, DirectoryRenewal, RecordMissing, RecordSeen, RecordWithdrawn

A, B = WorkerId("a"), WorkerId("b")


def seen(worker_id=A, renewal: str | None = "1", incarnation: str = "one") -> RecordSeen:
    return RecordSeen(
        record=WorkerRecord(
            worker_id=worker_id, incarnation=Incarnation(incarnation), address="10.0.0.1:1", lease_seconds=9
        ),
        renewal=renewal,
    )


def found(worker_id=A, incarnation: str = "one") -> DirectoryRenewal:
    return DirectoryRenewal(
        worker_id=worker_id, incarnation=Incarnation(incarnation), address="10.0.0.1:1", lease=9 * SECOND
    )


def withdrawn(worker_id=A, incarnation: str = "one") -> RecordWithdrawn:
    return RecordWithdrawn(worker_id=worker_id, incarnation=Incarnation(incarnation))


def test_only_what_was_renewed_is_found_again():
    readings = DirectoryDiff()

    assert readings.handle(DirectoryListing(all=(seen(),))) == [found()]
    assert readings.handle(DirectoryListing(all=(seen(),))) == []
    assert readings.handle(seen()) == []
    assert readings.handle(seen(renewal="2")) == [found()]


def test_records_count_as_renewed_if_directory_ends_leases():
    readings = DirectoryDiff()
    readings.handle(DirectoryListing(all=(seen(renewal=None),)))

    assert readings.handle(DirectoryListing(all=(seen(renewal=None),))) == [found()]


def test_a_listing_is_all_there_is():
    readings = DirectoryDiff()
    readings.handle(DirectoryListing(all=(seen(A), seen(B))))

    assert readings.handle(DirectoryListing(all=(seen(B),))) == [withdrawn(A)]
    assert readings.handle(DirectoryListing(all=())) == [withdrawn(B)]


def test_missing_record_is_withdrawn_once_with_last_incarnation():
    readings = DirectoryDiff()
    readings.handle(seen())
    assert readings.handle(seen(incarnation="two")) == [found(incarnation="two")]

    assert readings.handle(RecordMissing(worker_id=A)) == [withdrawn(incarnation="two")]
    assert readings.handle(RecordMissing(worker_id=A)) == []
    assert readings.handle(seen()) == [found()], "it was forgotten"
