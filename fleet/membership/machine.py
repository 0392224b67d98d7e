"""Membership machine: decides by leases which workers are members of the cluster.

Rules:

1. A worker is a member from its registration until its lease ends, it deregisters, or another incarnation replaces it.
   If the worker registers again, its lease is renewed. The end of a lease ends no stream: attempts on the worker
   continue (`fleet.backends.workers.streams`, rule 3).
2. The name of a worker belongs to one incarnation. While this router has a stream to a worker, the name belongs to the
   incarnation with which the stream is open. Without a stream, the name belongs to the member until its lease ends. If
   another incarnation registers under the name in this time, it gets `NameOccupied`, and nothing changes.
3. A lease ends early if this router cannot reach the member (`MemberUnreachable`) and another incarnation registers
   under the name. So a killed process can be replaced at once. If the incarnation or the address of a member changes,
   everything that was known of the member becomes invalid. So the change is announced as a departure and an arrival.
4. A replaced incarnation stays replaced. If it registers again, it gets `RegistrationSuperseded`, and nothing changes.
   Its deregistration changes nothing either. Otherwise two processes that have the same name by mistake would replace
   each other again and again. The last `REMEMBERED_INCARNATIONS` replaced incarnations of each worker are remembered,
   until no incarnation of the worker is a member any more.
5. A worker in a directory is a member as if it had registered, for the lease that the directory states. A worker that
   has registered here counts as alive until its lease ends. Until then, a record of another incarnation in the
   directory does not replace it, and a missing record is no departure. A member that was only found in the directory
   leaves as soon as its record is missing. A record of another incarnation replaces such a member at once. But while
   this router has a stream to the member, the record replaces nothing: directories show changes with a delay, so the
   record may be older than the stream.
6. A worker that has registered with another router (`Registration`) becomes a member for the rest of its lease there, but
   at most for the lease of this router. If another incarnation is already a member of this router, it is not replaced,
   because the other router may not know of a restart. The incarnation that is alive will renew its registration.
7. A record in a directory, or a registration that another router passes on (`Register.forwarded`), is repeated only
   rarely. Therefore, if its name belongs to another incarnation, it is kept as a claim to the name until the claim's own
   lease ends. When the name becomes free, the incarnation with the latest claim becomes a member.
"""

from collections import deque
from collections.abc import Mapping
from typing import assert_never

from msgspec import Struct

from fleet.core.clock import MILLISECOND, Nanos
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.messages import (
    Deregister,
    DirectoryRenewal,
    MemberJoined,
    MemberLeft,
    MembershipCommand,
    MembershipEvent,
    MembershipTicked,
    MemberUnreachable,
    NameOccupied,
    RecordWithdrawn,
    Register,
    Registration,
    RegistrationSuperseded,
    WorkerStreamClosed,
    WorkerStreamOpened,
)
from fleet.membership.settings import MembershipSettings

# Maximum number of replaced incarnations of one worker that are remembered (rule 4). Few of them can run at the same
# time, because a supervisor starts only one process at a time.
REMEMBERED_INCARNATIONS = 8


class NameClaim(Struct, frozen=True, kw_only=True):
    """Remembers that an incarnation was announced under a name that belongs to another incarnation (rule 7)."""

    joined: MemberJoined
    lease_end: Nanos
    registered: bool
    """True if the incarnation has registered with another router; False if it was found in a directory."""


class Member(Struct, kw_only=True):
    """State of one member: its address and incarnation, the end of its lease, and whether it can be reached."""

    joined: MemberJoined
    lease_end: Nanos
    registered_until: Nanos | None = None
    """End of the lease that the member got by registering with this router; None: it has not registered here."""

    unreachable: bool = False
    """True if this router last failed to reach the member, or reached another incarnation in its place."""

    def registered(self, now: Nanos) -> bool:
        return self.registered_until is not None and now < self.registered_until


class Membership:
    """Decides for one router which workers are members, from registrations, directory records and stream events."""

    def __init__(self, settings: MembershipSettings) -> None:
        self.lease = Nanos(settings.lease_ms * MILLISECOND)
        self._members: dict[WorkerId, Member] = {}
        self._replaced: dict[WorkerId, deque[Incarnation]] = {}
        # For each worker with an open stream, its incarnation on the stream. A stream may last longer than the lease.
        self._connected: dict[WorkerId, Incarnation] = {}
        # For each name, the latest claim to it. A claim may last longer than the present member with this name.
        self._claims: dict[WorkerId, NameClaim] = {}

    def handle(self, event: MembershipEvent, now: Nanos) -> list[MembershipCommand]:
        match event:
            case Register():
                return self._register(event, now)
            case Deregister():
                return self._deregister(event, now)
            case DirectoryRenewal():
                return self._find(event, now)
            case Registration():
                return self._hear_of(event, now)
            case RecordWithdrawn():
                return self._withdraw(event, now)
            case WorkerStreamOpened():
                return self._connect(event, now)
            case WorkerStreamClosed():
                self._connected.pop(event.worker_id, None)
                return self._take_claim_up(event.worker_id, now)
            case MemberUnreachable():
                return self._lose(event, now)
            case MembershipTicked():
                return self._expire(now)
            case _:
                assert_never(event)

    @property
    def members(self) -> Mapping[WorkerId, MemberJoined]:
        """Members by id, in the order of their arrival."""
        return {worker_id: member.joined for worker_id, member in self._members.items()}

    def lease_end(self, worker_id: WorkerId) -> Nanos:
        """Return the time at which the lease of a member ends."""
        return self._members[worker_id].lease_end

    def registrations(self, now: Nanos) -> list[Registration]:
        """Return the workers that have registered here, with the remaining time of their leases."""
        return [
            Registration(
                worker_id=worker_id,
                incarnation=member.joined.incarnation,
                address=member.joined.address,
                lease=Nanos(member.registered_until - now),
            )
            for worker_id, member in self._members.items()
            if member.registered_until is not None and member.registered(now)
        ]

    def check(self) -> None:
        """Assert the invariants that hold between two events."""
        for worker_id, member in self._members.items():
            replaced = self._replaced.get(worker_id, ())
            assert member.joined.worker_id == worker_id, member
            assert member.joined.incarnation not in replaced, member
        for worker_id, claim in self._claims.items():
            assert claim.joined.worker_id == worker_id, claim
            assert claim.joined.incarnation not in self._replaced.get(worker_id, ()), claim
            assert worker_id in self._members or worker_id in self._connected, claim

    def _register(self, event: Register, now: Nanos) -> list[MembershipCommand]:
        lease_end = Nanos(now + self.lease)
        joined = MemberJoined(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address)
        if self._is_replaced(joined):
            return [RegistrationSuperseded(worker_id=event.worker_id, incarnation=event.incarnation)]
        if (occupied := self._occupied(joined, now)) is not None:
            if event.forwarded:
                self._claims[event.worker_id] = NameClaim(joined=joined, lease_end=lease_end, registered=True)
            return [occupied]
        return self._join(joined, lease_end, registered=True)

    def _find(self, event: DirectoryRenewal, now: Nanos) -> list[MembershipCommand]:
        joined = MemberJoined(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address)
        if self._is_replaced(joined):
            return [RegistrationSuperseded(worker_id=event.worker_id, incarnation=event.incarnation)]
        known = self._members.get(event.worker_id)
        lease_end = Nanos(now + event.lease)
        alive = known is not None and known.joined != joined and known.registered(now)
        if alive or self._connected.get(event.worker_id, event.incarnation) != event.incarnation:
            self._claims[event.worker_id] = NameClaim(joined=joined, lease_end=lease_end, registered=False)
            return []
        return self._join(joined, lease_end, registered=False)

    def _hear_of(self, event: Registration, now: Nanos) -> list[MembershipCommand]:
        joined = MemberJoined(worker_id=event.worker_id, incarnation=event.incarnation, address=event.address)
        if self._is_replaced(joined):
            return [RegistrationSuperseded(worker_id=event.worker_id, incarnation=event.incarnation)]
        known = self._members.get(event.worker_id)
        if (known is not None and known.joined != joined) or self._occupied(joined, now) is not None:
            return []
        return self._join(joined, Nanos(now + min(event.lease, self.lease)), registered=False)

    def _is_replaced(self, joined: MemberJoined) -> bool:
        return joined.incarnation in self._replaced.get(joined.worker_id, ())

    def _occupied(self, joined: MemberJoined, now: Nanos) -> NameOccupied | None:
        """Return a rejection if the name belongs to another incarnation (rules 2 and 3), else None."""
        worker_id, incarnation = joined.worker_id, joined.incarnation
        known = self._members.get(worker_id)
        connected = self._connected.get(worker_id)
        if connected == incarnation:
            return None
        if connected is not None:
            of_stream = known is not None and known.joined.incarnation == connected
            holder = known.joined.address if known is not None and of_stream else ""
            return NameOccupied(worker_id=worker_id, incarnation=incarnation, holder=holder, lease=None)
        if known is None or known.joined.incarnation == incarnation or known.unreachable or now >= known.lease_end:
            return None
        left = Nanos(known.lease_end - now)
        return NameOccupied(worker_id=worker_id, incarnation=incarnation, holder=known.joined.address, lease=left)

    def _take_claim_up(self, worker_id: WorkerId, now: Nanos) -> list[MembershipCommand]:
        """If a name is free now and an incarnation has a claim to it, make this incarnation a member (rule 7)."""
        claim, known = self._claims.get(worker_id), self._members.get(worker_id)
        if claim is None:
            return []
        if claim.lease_end <= now:
            del self._claims[worker_id]
            return []
        alive = known is not None and known.registered(now) and not claim.registered
        if alive or self._occupied(claim.joined, now) is not None:
            return []
        return self._join(claim.joined, claim.lease_end, registered=claim.registered)

    def _join(self, joined: MemberJoined, lease_end: Nanos, *, registered: bool) -> list[MembershipCommand]:
        """Start or renew the membership of an incarnation, until the instant `lease_end`.

        The caller has checked that the name is free for the incarnation.
        """
        worker_id = joined.worker_id
        known = self._members.get(worker_id)
        if known is not None and known.joined.incarnation != joined.incarnation:
            # The claim is older than this change, or belongs to the incarnation that joins now.
            self._claims.pop(worker_id, None)
        self._drop_claim(worker_id, joined.incarnation)
        changes: list[MembershipCommand] = []
        if known is None or known.joined != joined:
            if known is not None:
                changes.append(MemberLeft(worker_id=worker_id))
                if known.joined.incarnation != joined.incarnation:
                    self._remember(worker_id, known.joined.incarnation)
                del self._members[worker_id]
            known = self._members[worker_id] = Member(joined=joined, lease_end=lease_end)
            changes.append(joined)
        known.lease_end = max(known.lease_end, lease_end)
        if registered:
            known.registered_until = lease_end
        return changes

    def _remember(self, worker_id: WorkerId, replaced: Incarnation) -> None:
        self._replaced.setdefault(worker_id, deque(maxlen=REMEMBERED_INCARNATIONS)).append(replaced)

    def _deregister(self, event: Deregister, now: Nanos) -> list[MembershipCommand]:
        self._drop_claim(event.worker_id, event.incarnation)
        known = self._members.get(event.worker_id)
        if known is not None and known.joined.incarnation != event.incarnation:
            return []
        if known is not None or self._connected.get(event.worker_id) == event.incarnation:
            # The worker has given up its name, although its stream may stay open.
            self._connected.pop(event.worker_id, None)
        return self._take_claim_up(event.worker_id, now) if known is None else self._leave(event.worker_id, now)

    def _withdraw(self, event: RecordWithdrawn, now: Nanos) -> list[MembershipCommand]:
        self._drop_claim(event.worker_id, event.incarnation)
        known = self._members.get(event.worker_id)
        if known is None or known.joined.incarnation != event.incarnation or known.registered(now):
            return []
        return self._leave(event.worker_id, now)

    def _drop_claim(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        claim = self._claims.get(worker_id)
        if claim is not None and claim.joined.incarnation == incarnation:
            del self._claims[worker_id]

    def _connect(self, event: WorkerStreamOpened, now: Nanos) -> list[MembershipCommand]:
        self._connected[event.worker_id] = event.incarnation
        known = self._members.get(event.worker_id)
        # If another process has answered at the member's address, the member itself cannot be reached.
        if known is not None:
            known.unreachable = known.joined.incarnation != event.incarnation
        return self._take_claim_up(event.worker_id, now)

    def _lose(self, event: MemberUnreachable, now: Nanos) -> list[MembershipCommand]:
        known = self._members.get(event.worker_id)
        if known is None or known.joined.incarnation != event.incarnation:
            return []
        known.unreachable = True
        return self._take_claim_up(event.worker_id, now)

    def _expire(self, now: Nanos) -> list[MembershipCommand]:
        for worker_id in [worker_id for worker_id, claim in self._claims.items() if now >= claim.lease_end]:
            del self._claims[worker_id]
        ended = [worker_id for worker_id, member in self._members.items() if now >= member.lease_end]
        return [change for worker_id in ended for change in self._leave(worker_id, now)]

    def _leave(self, worker_id: WorkerId, now: Nanos) -> list[MembershipCommand]:
        """Remove a member and forget its replaced incarnations.

        If another incarnation has a claim to the member's name, let that incarnation join.
        """
        del self._members[worker_id]
        self._replaced.pop(worker_id, None)
        return [MemberLeft(worker_id=worker_id), *self._take_claim_up(worker_id, now)]
