"""Events that the membership hears, changes that it announces, and what directories say."""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.discovery import WorkerRecord
from fleet.core.ids import Incarnation, WorkerId


class Register(Struct, frozen=True, kw_only=True):
    """A worker is here, or still here."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    forwarded: bool = False
    """True if another router has taken this registration and passes it on; then nobody asks again soon if it is refused here."""


class Deregister(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    incarnation: Incarnation


class DirectoryRenewal(Struct, frozen=True, kw_only=True):
    """A directory has a worker, whose lease was renewed just now."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    lease: Nanos


class Registration(Struct, frozen=True, kw_only=True):
    """A worker has registered with another router, and so much of its lease is left."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    lease: Nanos


class RecordWithdrawn(Struct, frozen=True, kw_only=True):
    """A directory had a worker, and has it no more."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerStreamOpened(Struct, frozen=True, kw_only=True):
    """This router has a stream to a worker, which has said which incarnation it is."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerStreamClosed(Struct, frozen=True, kw_only=True):
    """The stream has ended; whether the worker is still there is not known yet."""

    worker_id: WorkerId


class MemberUnreachable(Struct, frozen=True, kw_only=True):
    """This router could not reach a member: nobody answered at its address, or it was silent for longer than the heartbeat timeout."""

    worker_id: WorkerId
    incarnation: Incarnation


class MembershipTicked(Struct, frozen=True, kw_only=True):
    """Time passed: leases may have ended."""


ReachabilityEvent = WorkerStreamOpened | WorkerStreamClosed | MemberUnreachable
MembershipEvent = (
    Register | Deregister | DirectoryRenewal | Registration | RecordWithdrawn | ReachabilityEvent | MembershipTicked
)


class MemberJoined(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    incarnation: Incarnation
    address: str


class MemberLeft(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId


class RegistrationSuperseded(Struct, frozen=True, kw_only=True):
    """Answer to a `Register` of an incarnation that a newer one has replaced; nothing changed."""

    worker_id: WorkerId
    incarnation: Incarnation


class NameOccupied(Struct, frozen=True, kw_only=True):
    """Answer to a `Register` of a name that another incarnation holds; nothing changed."""

    worker_id: WorkerId
    incarnation: Incarnation
    holder: str
    """Address of the process that holds the name; empty: it is not known."""

    lease: Nanos | None
    """The rest of its lease; None: the router has a stream to it, and it keeps the name as long as that lasts."""


MembershipChange = MemberJoined | MemberLeft
RegistrationRefusal = RegistrationSuperseded | NameOccupied
MembershipCommand = MembershipChange | RegistrationRefusal


class RecordSeen(Struct, frozen=True, kw_only=True):
    """A directory has this record."""

    record: WorkerRecord
    renewal: str | None = None
    """Differs after every renewal of the lease; None: the directory ends leases itself, so that what it has is being renewed."""


class RecordMissing(Struct, frozen=True, kw_only=True):
    """A directory has no record of this worker any more."""

    worker_id: WorkerId


class DirectoryListing(Struct, frozen=True, kw_only=True):
    """All that a directory has."""

    all: tuple[RecordSeen, ...]


DirectoryReading = DirectoryListing | RecordSeen | RecordMissing
