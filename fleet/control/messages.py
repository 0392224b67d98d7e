"""Events that the membership hears, and changes that it announces."""

from msgspec import Struct

from fleet.ids import Incarnation, WorkerId


class Register(Struct, frozen=True, kw_only=True):
    """A worker is here, or still here."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str


class Deregister(Struct, frozen=True, kw_only=True):
    worker_id: WorkerId
    incarnation: Incarnation


class Ticked(Struct, frozen=True, kw_only=True):
    """Time passed: leases may have ended."""


ControlEvent = Register | Deregister | Ticked


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
