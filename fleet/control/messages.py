"""Events that the membership hears, changes that it announces, and what directories say."""

from msgspec import Struct

from fleet.clock import Nanos
from fleet.discovery import Record
from fleet.ids import Incarnation, WorkerId


class Register(Struct, frozen=True, kw_only=True):
    """A worker is here, or still here."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str


class Deregister(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    incarnation: Incarnation


class Found(Struct, frozen=True, kw_only=True):
    """A directory has a worker, whose lease was renewed just now."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    lease: Nanos


class Told(Struct, frozen=True, kw_only=True):
    """A worker has registered with another router, and so much of its lease is left."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    lease: Nanos


class Withdrawn(Struct, frozen=True, kw_only=True):
    """A directory had a worker, and has it no more."""

    worker_id: WorkerId
    incarnation: Incarnation


class Ticked(Struct, frozen=True, kw_only=True):
    """Time passed: leases may have ended."""


ControlEvent = Register | Deregister | Found | Told | Withdrawn | Ticked


class MemberJoined(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    incarnation: Incarnation
    address: str


class MemberLeft(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId


class Superseded(Struct, frozen=True, kw_only=True):
    """Answer to a `Register` of an incarnation that a newer one has replaced; nothing changed."""

    worker_id: WorkerId
    incarnation: Incarnation


MembershipChange = MemberJoined | MemberLeft
ControlCommand = MembershipChange | Superseded


class Seen(Struct, frozen=True, kw_only=True):
    """A directory has this record."""

    record: Record
    renewal: str | None = None
    """Differs after every renewal of the lease; None: the directory ends leases itself, so that what it has is being renewed."""


class Missing(Struct, frozen=True, kw_only=True):
    """A directory has no record of this worker any more."""

    worker_id: WorkerId


class Listed(Struct, frozen=True, kw_only=True):
    """All that a directory has."""

    all: tuple[Seen, ...]


Sighting = Listed | Seen | Missing
