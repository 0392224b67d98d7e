"""From what a directory says to what the membership hears."""

from fleet.clock import SECOND
from fleet.control.messages import Found, Listed, Missing, Seen, Withdrawn
from fleet.control.sightings import Sightings
from fleet.discovery import Record
from fleet.ids import Incarnation, WorkerId

A, B = WorkerId("a"), WorkerId("b")


def seen(worker_id=A, renewal: str | None = "1", incarnation: str = "one") -> Seen:
    return Seen(
        record=Record(worker_id=worker_id, incarnation=Incarnation(incarnation), address="10.0.0.1:1", lease_seconds=9),
        renewal=renewal,
    )


def found(worker_id=A, incarnation: str = "one") -> Found:
    return Found(worker_id=worker_id, incarnation=Incarnation(incarnation), address="10.0.0.1:1", lease=9 * SECOND)


def withdrawn(worker_id=A, incarnation: str = "one") -> Withdrawn:
    return Withdrawn(worker_id=worker_id, incarnation=Incarnation(incarnation))


def test_only_what_was_renewed_is_found_again():
    sightings = Sightings()

    assert sightings.handle(Listed(all=(seen(),))) == [found()]
    assert sightings.handle(Listed(all=(seen(),))) == []
    assert sightings.handle(seen()) == []
    assert sightings.handle(seen(renewal="2")) == [found()]


def test_where_a_directory_ends_leases_to_be_there_is_to_be_renewed():
    sightings = Sightings()
    sightings.handle(Listed(all=(seen(renewal=None),)))

    assert sightings.handle(Listed(all=(seen(renewal=None),))) == [found()]


def test_a_listing_is_all_there_is():
    sightings = Sightings()
    sightings.handle(Listed(all=(seen(A), seen(B))))

    assert sightings.handle(Listed(all=(seen(B),))) == [withdrawn(A)]
    assert sightings.handle(Listed(all=())) == [withdrawn(B)]


def test_what_is_missing_is_withdrawn_once_in_its_last_incarnation():
    sightings = Sightings()
    sightings.handle(seen())
    assert sightings.handle(seen(incarnation="two")) == [found(incarnation="two")]

    assert sightings.handle(Missing(worker_id=A)) == [withdrawn(incarnation="two")]
    assert sightings.handle(Missing(worker_id=A)) == []
    assert sightings.handle(seen()) == [found()], "it was forgotten"
