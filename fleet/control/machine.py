"""Membership under leases.

Rules:

1. A worker is a member from its registration until its lease ends, it deregisters, or another incarnation of it
   registers. Registering again renews the lease.
2. A new incarnation, or a new address, takes the place of the old at once: what was known of the old one is void, so
   the change is announced as a departure and an arrival.
3. Whoever has been replaced stays replaced: an old incarnation that registers again is told so and changes nothing,
   and neither does its deregistration. Two processes that were given the same name by mistake would otherwise take
   turns. The last `REMEMBERED` replaced incarnations of a worker are known.
4. A worker that a directory has is a member as if it had registered, for as long as the directory's lease says. But who has
   registered here, and not deregistered, is alive: what a directory says of another incarnation is old news, and that the
   directory has it no more is no departure.
5. A worker that another router tells of is a member for the rest of the lease that it has there. Of one that is a member already
   in another incarnation nothing is taken: the other router may not have heard of the change, and whoever is alive renews.
"""

from collections import deque
from collections.abc import Mapping
from typing import assert_never

from msgspec import Struct

from fleet.clock import MILLISECOND, Nanos
from fleet.control.messages import (
    ControlCommand,
    ControlEvent,
    Deregister,
    Found,
    MemberJoined,
    MemberLeft,
    Register,
    Superseded,
    Ticked,
    Told,
    Withdrawn,
)
from fleet.control.settings import ControlSettings
from fleet.ids import Incarnation, WorkerId

REMEMBERED = 8  # restarts of one worker that can be confused; a supervisor starts one at a time


class Member(Struct, kw_only=True):
    """One entry, and when it ends."""

    joined: MemberJoined
    lease_end: Nanos
    registered_until: Nanos | None = None
    """When the lease ends that it has from here; None: it was only found."""

    def registered(self, now: Nanos) -> bool:
        return self.registered_until is not None and now < self.registered_until


class Membership:
    """Who is here."""

    def __init__(self, settings: ControlSettings) -> None:
        self.lease = Nanos(settings.lease_ms * MILLISECOND)
        self._members: dict[WorkerId, Member] = {}
        self._replaced: dict[WorkerId, deque[Incarnation]] = {}

    def handle(self, event: ControlEvent, now: Nanos) -> list[ControlCommand]:
        match event:
            case Register():
                return self._register(event, now)
            case Deregister():
                return self._deregister(event)
            case Found():
                return self._find(event, now)
            case Told():
                return self._hear_of(event, now)
            case Withdrawn():
                return self._withdraw(event, now)
            case Ticked():
                return self._expire(now)
            case _:
                assert_never(event)

    @property
    def members(self) -> Mapping[WorkerId, MemberJoined]:
        """In order of arrival."""
        return {worker_id: member.joined for worker_id, member in self._members.items()}

    def registrations(self, now: Nanos) -> list[Told]:
        """Who has registered here, and for how much longer that counts."""
        return [
            Told(
                worker_id=worker_id,
                incarnation=member.joined.incarnation,
                address=member.joined.address,
                lease=Nanos(member.registered_until - now),
            )
            for worker_id, member in self._members.items()
            if member.registered_until is not None and member.registered(now)
        ]

    def check(self) -> None:
        """Assert what must hold between any two events."""
        for worker_id, member in self._members.items():
            assert member.joined.worker_id == worker_id, member
            assert member.joined.incarnation not in self._replaced.get(worker_id, ()), member

    def _register(self, event: Register, now: Nanos) -> list[ControlCommand]:
        lease_end = Nanos(now + self.lease)
        joined = MemberJoined(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address)
        commands = self._join(joined, lease_end)
        known = self._members.get(event.worker_id)
        if known is not None and known.joined == joined:
            known.registered_until = lease_end
        return commands

    def _find(self, event: Found, now: Nanos) -> list[ControlCommand]:
        joined = MemberJoined(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address)
        known = self._members.get(event.worker_id)
        if known is not None and known.joined != joined and known.registered(now):
            return []
        return self._join(joined, Nanos(now + event.lease))

    def _hear_of(self, event: Told, now: Nanos) -> list[ControlCommand]:
        joined = MemberJoined(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address)
        known = self._members.get(event.worker_id)
        if known is not None and known.joined != joined:
            return []
        return self._join(joined, Nanos(now + min(event.lease, self.lease)))

    def _join(self, joined: MemberJoined, lease_end: Nanos) -> list[ControlCommand]:
        """Take or renew a membership until `lease_end`."""
        worker_id, incarnation = joined.worker_id, joined.incarnation
        if incarnation in self._replaced.get(worker_id, ()):
            return [Superseded(worker_id=worker_id, incarnation=incarnation)]
        known = self._members.get(worker_id)
        if known is not None and known.joined == joined:
            known.lease_end = max(known.lease_end, lease_end)
            return []
        changes: list[ControlCommand] = []
        if known is not None:
            changes.append(MemberLeft(worker_id=worker_id))
            if known.joined.incarnation != incarnation:
                self._remember(worker_id, known.joined.incarnation)
            del self._members[worker_id]
        self._members[worker_id] = Member(joined=joined, lease_end=lease_end)
        return [*changes, joined]

    def _remember(self, worker_id: WorkerId, replaced: Incarnation) -> None:
        self._replaced.setdefault(worker_id, deque(maxlen=REMEMBERED)).append(replaced)

    def _deregister(self, event: Deregister) -> list[ControlCommand]:
        known = self._members.get(event.worker_id)
        if known is None or known.joined.incarnation != event.incarnation:
            return []
        return [self._leave(event.worker_id)]

    def _withdraw(self, event: Withdrawn, now: Nanos) -> list[ControlCommand]:
        known = self._members.get(event.worker_id)
        if known is None or known.joined.incarnation != event.incarnation or known.registered(now):
            return []
        return [self._leave(event.worker_id)]

    def _expire(self, now: Nanos) -> list[ControlCommand]:
        ended = [worker_id for worker_id, member in self._members.items() if now >= member.lease_end]
        return [self._leave(worker_id) for worker_id in ended]

    def _leave(self, worker_id: WorkerId) -> MemberLeft:
        """Forget the worker, and whom it replaced: memory is bounded by the members."""
        del self._members[worker_id]
        self._replaced.pop(worker_id, None)
        return MemberLeft(worker_id=worker_id)
