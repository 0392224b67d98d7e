"""Events and commands of the membership machine, and readings of a directory."""

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.discovery import WorkerRecord
from fleet.core.ids import Incarnation, WorkerId


class Register(Struct, frozen=True, kw_only=True):
    """Event: a worker registers, or renews its registration."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    forwarded: bool = False
    """True if another router has passed this registration on.

    The worker does not know this router, so it will not register here again if it is rejected.
    """


class Deregister(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    incarnation: Incarnation


class DirectoryRenewal(Struct, frozen=True, kw_only=True):
    """Event: a directory contains the record of a worker, and this router has just seen that the worker's lease was renewed.

    `lease` is the duration of the lease from now on.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    lease: Nanos


class Registration(Struct, frozen=True, kw_only=True):
    """Event: a worker is registered with another router. `lease` is the remaining time of its lease at that router."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    lease: Nanos


class RecordWithdrawn(Struct, frozen=True, kw_only=True):
    """Event: a directory no longer contains the record of a worker."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerStreamOpened(Struct, frozen=True, kw_only=True):
    """Event: the router's stream to a worker has opened, and the worker has stated its incarnation."""

    worker_id: WorkerId
    incarnation: Incarnation


class WorkerStreamClosed(Struct, frozen=True, kw_only=True):
    """Event: the router's stream to a worker has ended. The worker itself may still run."""

    worker_id: WorkerId


class MemberUnreachable(Struct, frozen=True, kw_only=True):
    """Event: the router cannot reach a member, which did not answer, or sent nothing for longer than the heartbeat timeout."""

    worker_id: WorkerId
    incarnation: Incarnation


class MembershipTicked(Struct, frozen=True, kw_only=True):
    """Event: time has passed, so leases may have ended."""


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
    """Rejection of a registration from an incarnation that a newer one has replaced; nothing changed."""

    worker_id: WorkerId
    incarnation: Incarnation


class NameOccupied(Struct, frozen=True, kw_only=True):
    """Rejection of a registration for a name that another incarnation holds; no member has changed."""

    worker_id: WorkerId
    incarnation: Incarnation
    holder: str
    """Address of the process that has the name; empty if unknown."""

    lease: Nanos | None
    """Remaining time of the lease of the process that has the name. None: this router has a stream to the process, and the
    process keeps the name until the stream ends.
    """


MembershipChange = MemberJoined | MemberLeft
RegistrationRefusal = RegistrationSuperseded | NameOccupied
MembershipCommand = MembershipChange | RegistrationRefusal


class RecordSeen(Struct, frozen=True, kw_only=True):
    """Reading of a directory: it contains this record."""

    record: WorkerRecord
    renewal: str | None = None
    """A text that changes with every renewal of the lease; None: the directory itself removes records whose lease has
    ended, so each record in it is valid.
    """


class RecordMissing(Struct, frozen=True, kw_only=True):
    """Reading of a directory: it no longer contains a record of this worker."""

    worker_id: WorkerId


class DirectoryListing(Struct, frozen=True, kw_only=True):
    """Reading of a directory: all records that the directory contains."""

    all: tuple[RecordSeen, ...]


DirectoryReading = DirectoryListing | RecordSeen | RecordMissing
