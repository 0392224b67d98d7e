"""Router process: production's router machine and membership machine behind virtual connections.

The process follows the rules of `fleet.backends.workers.streams`: it has one stream to each member. When a stream has
ended, the process opens a new one, as long as the worker is a member. Unlike production's router, the process does not
check the descriptions of workers. It ends a stream if the worker has been silent for too long, if a message is
malformed, if KV events are missing, if the worker does not describe itself in time, or if the router's send buffer is full.
"""

from collections.abc import Callable
from random import Random
from typing import Protocol

from msgspec import Struct

from fleet.app.fault_simulation.fault_points import FaultPoint, FaultPoints
from fleet.app.fault_simulation.virtual_network import ConnectionEnd, Listener, VirtualNetwork
from fleet.app.fault_simulation.virtual_process import VirtualProcess
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.core.ids import Incarnation, RequestId, StoreId, WorkerId
from fleet.core.work import (
    Cancel,
    Draining,
    KvEvents,
    LoadReport,
    Rejected,
    RouterHello,
    Start,
    Step,
    WorkerDescription,
)
from fleet.membership.machine import Membership
from fleet.membership.messages import (
    Deregister,
    MemberJoined,
    MemberLeft,
    MembershipEvent,
    MembershipTicked,
    MemberUnreachable,
    NameOccupied,
    Register,
    RegistrationSuperseded,
    WorkerStreamClosed,
    WorkerStreamOpened,
)
from fleet.membership.settings import MembershipSettings
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    AttemptRejected,
    CancelAttempt,
    Command,
    Complete,
    Dispatch,
    Emit,
    KvChanged,
    KvPathsChanged,
    LoadReported,
    Reject,
    RouterEvent,
    RouterTicked,
    StartedOver,
    StoreChanged,
    Undelivered,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerStepped,
)
from fleet.router.settings.router import RouterSettings
from fleet.sim.kernel import Kernel

ROUTER = "router"
LEASE_MS = 4000
MEMBERSHIP_TICK = Nanos(250 * MILLISECOND)
SILENCE_SLICES = 4  # number of slices of the heartbeat timeout; equal to `SLICES` in `fleet.backends.workers.streams`
FIRST_PAUSE = Nanos(50 * MILLISECOND)
CONNECT_TIMEOUT = Nanos(2 * SECOND)

CHECKS_EVERY = 8
"""Number of events between two checks of the machine's invariants. Not every event is followed by a check, because a check
takes as long as several events."""


class Malformed(Struct, frozen=True):
    """Represents a message that its receiver cannot read, because its bytes were damaged on the way."""


class RegistrationAnswer(Struct, frozen=True):
    """Answer to a `Register` or `Deregister`.

    `lease` is the duration of this router's leases, in nanoseconds; None: the registration was refused. `superseded` is
    True if it was refused because another incarnation has replaced this one.
    """

    lease: Nanos | None
    superseded: bool = False


class RouterClients(Protocol):
    """Port by which a router sends answers to its clients."""

    def answered(self, command: Emit | StartedOver | Complete | Reject) -> None: ...


class RouterProcess(VirtualProcess):
    """Runs one incarnation of the router in virtual time."""

    def __init__(
        self,
        kernel: Kernel,
        network: VirtualNetwork,
        points: FaultPoints,
        clients: RouterClients,
        settings: RouterSettings,
        chance: Random,
        store: str,
    ):
        super().__init__(kernel, ROUTER)
        self.network = network
        self.points = points
        self.settings = settings
        self.machine = RouterMachine(settings, chance)
        self.membership = Membership(MembershipSettings(lease_ms=LEASE_MS))
        self.links: dict[WorkerId, WorkerLink] = {}
        self.checks_every = CHECKS_EVERY
        self.events = 0
        self._clients = clients
        self._targets: dict[WorkerId, _Target] = {}
        self._armed: Nanos | None = None
        self._store = store
        self._pending: list[RouterEvent] = []
        self._processing = False
        self.registry_away = False  # a fault: True while the registry answers no registrations
        network.listeners[ROUTER] = Listener(process=self, accept=lambda end: end.close(), handle=self._serve)
        self.after(MEMBERSHIP_TICK, self._tick_membership)
        self._watch_store()

    # Events and commands of the router machine.

    def hear(self, event: RouterEvent) -> None:
        """Give an event to the router machine, and perform the commands that it returns.

        If the commands cause new events, the machine gets them after this event.
        """
        self._pending.append(event)
        if self._processing:
            return
        self._processing = True
        while self._pending:
            self._handle(self._pending.pop(0))
        self._processing = False
        due = self.machine.next_deadline()
        if due is not None and (self._armed is None or due < self._armed):
            self._armed = due
            self.after(max(0, due - self.now), self._ticked)

    def _handle(self, event: RouterEvent) -> None:
        for command in self.machine.handle(event, self.now):
            self._perform(command)
        self.events += 1
        if self.events % self.checks_every == 0:
            self.machine.check()

    def _perform(self, command: Command) -> None:
        match command:
            case Dispatch():
                link = self.links.get(command.worker_id)
                if link is None or not link.say(command.start):
                    self.points.reach(FaultPoint.UNDELIVERED)
                    self._pending.append(Undelivered(request_id=command.start.request_id, worker_id=command.worker_id))
            case CancelAttempt():
                if (link := self.links.get(command.worker_id)) is not None:
                    link.say(Cancel(request_id=command.request_id))
            case Emit() | StartedOver() | Complete() | Reject():
                self._clients.answered(command)
            case _:
                pass  # `CacheDriftChanged`: ignored, because it only reports, and needs no action

    def placements(self, request_id: RequestId) -> int:
        """Return how often a request was placed on workers; 0 if the router does not remember the request."""
        explanation = self.machine.explain(request_id)
        return 0 if explanation is None else len(explanation.placements)

    def _ticked(self) -> None:
        self._armed = None
        self.hear(RouterTicked())

    # Registry of workers.

    def _serve(self, request: object, answer: Callable[[object], None]) -> None:
        assert isinstance(request, Register | Deregister)
        if self.registry_away:
            return
        refused: RegistrationAnswer | None = None
        for command in self.membership.handle(request, self.now):
            match command:
                case NameOccupied():
                    self.points.reach(FaultPoint.NAME_OCCUPIED)
                    refused = RegistrationAnswer(None)
                case RegistrationSuperseded():
                    self.points.reach(FaultPoint.SUPERSEDED)
                    refused = RegistrationAnswer(None, superseded=True)
                case _:
                    self._member_changed(command)
        self.membership.check()
        answer(refused or RegistrationAnswer(self.membership.lease))

    def _tick_membership(self) -> None:
        self._handle_membership(MembershipTicked())
        self.after(MEMBERSHIP_TICK, self._tick_membership)

    def _handle_membership(self, event: MembershipEvent) -> None:
        for command in self.membership.handle(event, self.now):
            assert isinstance(command, MemberJoined | MemberLeft)
            self._member_changed(command)

    def _member_changed(self, change: MemberJoined | MemberLeft) -> None:
        match change:
            case MemberJoined():
                before = self._targets.get(change.worker_id)
                if before is not None and before.is_there(change):
                    before.wanted, before.joined = True, change
                    return
                if before is not None:
                    before.give_up()
                self._targets[change.worker_id] = target = _Target(self, change)
                target.dial()
            case MemberLeft():
                self.points.reach(FaultPoint.LEASE_ENDED)
                if (left := self._targets.get(change.worker_id)) is not None:
                    left.wanted = False
                    if left.link is None or left.link.description is None:
                        left.give_up()
                        self._targets.pop(change.worker_id, None)
                    else:
                        self.points.reach(FaultPoint.LEASE_ENDED_IN_STREAM)

    # Streams to workers.

    def link_ended(self, link: "WorkerLink", *, silent: bool) -> None:
        """Remove a broken stream. If its worker is still a member, dial the worker again after a pause.

        If `silent` is true, report the worker to the membership machine as unreachable.
        """
        target, description = link.target, link.description
        target.link = None
        if description is not None:
            worker_id = description.worker_id
            del self.links[worker_id]
            self._handle_membership(WorkerStreamClosed(worker_id=worker_id))
            self.hear(WorkerLeft(worker_id=worker_id))
        self.failed_to_reach(target, absent=silent)

    def failed_to_reach(self, target: "_Target", *, absent: bool) -> None:
        if absent:
            joined = target.joined
            self._handle_membership(MemberUnreachable(worker_id=joined.worker_id, incarnation=joined.incarnation))
        if target.wanted:
            self.after(target.next_pause(Nanos(round(self.settings.max_reconnect_seconds * SECOND))), target.dial)
        elif self._targets.get(target.joined.worker_id) is target:
            del self._targets[target.joined.worker_id]

    def stream_opened(self, link: "WorkerLink", description: WorkerDescription) -> None:
        worker_id = description.worker_id
        self.links[worker_id] = link
        self._handle_membership(WorkerStreamOpened(worker_id=worker_id, incarnation=description.incarnation))
        self.hear(WorkerJoined(description=description, address=link.target.joined.address))

    # Watch of the store node.

    def _watch_store(self) -> None:
        def opened(end: ConnectionEnd) -> None:
            end.received = self._receive_store_change
            end.ended = ended

        def ended() -> None:
            for name in self._known_namespaces:
                self.hear(StoreChanged(store_id=name[0], fingerprint=name[1], reset=True))
            self._known_namespaces.clear()
            self.after(SECOND, self._watch_store)

        self._known_namespaces: dict[tuple[StoreId, str], None] = {}
        self.network.dial(self, self._store, opened, lambda _: self.after(SECOND, self._watch_store), CONNECT_TIMEOUT)

    def _receive_store_change(self, message: object) -> None:
        assert isinstance(message, StoreChanged)
        self._known_namespaces[message.store_id, message.fingerprint] = None
        self.hear(message)

    def incarnation_of(self, worker_id: WorkerId) -> Incarnation | None:
        """Return the incarnation of a worker to which a stream is open, or None if no stream is open."""
        link = self.links.get(worker_id)
        return None if link is None or link.description is None else link.description.incarnation

    # End of the process.

    def count_points(self) -> None:
        """Count the fault points that follow from the machine's counters. Call this once, at the end of the process."""
        counters = self.machine.snapshot().counters
        self.points.reach(FaultPoint.LATE_MESSAGE, counters.late_messages)
        self.points.reach(FaultPoint.RETRIED, counters.retried)
        self.points.reach(FaultPoint.RESUMED, counters.continued)

    def kill(self) -> None:
        self.count_points()
        super().kill()
        self.network.ended(self)


class _Target:
    """Keeps a stream to one member open: dials the worker, and again after a pause if the dial failed or the stream ended."""

    def __init__(self, router: RouterProcess, joined: MemberJoined):
        self.joined = joined
        self.wanted = True
        self.link: WorkerLink | None = None
        self._router = router
        self._pause = FIRST_PAUSE
        self._given_up = False

    def is_there(self, joined: MemberJoined) -> bool:
        """Return True if the open stream leads to the incarnation and the address that `joined` states."""
        same = self.joined.address == joined.address
        description = None if self.link is None else self.link.description
        return same and description is not None and description.incarnation == joined.incarnation

    def give_up(self) -> None:
        self.wanted = False
        self._given_up = True
        if self.link is not None:
            self.link.close()

    def next_pause(self, longest: Nanos) -> Nanos:
        pause, self._pause = self._pause, Nanos(min(2 * self._pause, longest))
        return pause

    def dial(self) -> None:
        router = self._router
        if not self.wanted or self.link is not None:
            return

        def opened(end: ConnectionEnd) -> None:
            if self._given_up:
                end.close()
            else:
                self.link = WorkerLink(router, self, end)

        def failed(silent: bool) -> None:  # noqa: ARG001 - both kinds of failure are treated alike
            if not self._given_up:
                router.failed_to_reach(self, absent=True)

        router.network.dial(router, self.joined.address, opened, failed, CONNECT_TIMEOUT)


class WorkerLink:
    """The router's side of a stream to one worker."""

    def __init__(self, router: RouterProcess, target: _Target, end: ConnectionEnd):
        self.target = target
        self.end = end
        self.description: WorkerDescription | None = None
        self._router = router
        self._sequence = 0
        self._message_came = True
        self._silent_slices = 0
        self._over = False
        self.is_full = False  # a fault: True while the worker reads nothing, so that the router's send buffer is full
        end.received = self._received
        end.ended = self.close
        end.send(RouterHello(router_id=router.settings.router_id))
        router.after(CONNECT_TIMEOUT, self._describe_by)
        self._slice = Nanos(round(router.settings.heartbeat_timeout_seconds * SECOND) // SILENCE_SLICES)
        router.after(self._slice, self._look)

    def say(self, message: Start | Cancel) -> bool:
        """Send a message and return True. If the send buffer is full, break the stream a moment later and return False."""
        if self.is_full:
            self._router.after(0, self.close)
            return False
        self.end.send(message)
        return True

    def close(self, *, silent: bool = False) -> None:
        if not self._over:
            self._over = True
            self.end.close()
            self._router.link_ended(self, silent=silent)

    def _describe_by(self) -> None:
        if self.description is None:
            self.close(silent=True)

    def _look(self) -> None:
        """Check at the end of a slice of the heartbeat timeout whether a message came in it.

        After `SILENCE_SLICES` slices in a row without a message, close the stream if the worker's description has come. If the router's
        process was frozen, the whole freeze counts as one slice, because the worker may have sent messages meanwhile.
        """
        if self._over:
            return
        self._silent_slices = 0 if self._message_came else self._silent_slices + 1
        self._message_came = False
        if self.description is not None and self._silent_slices >= SILENCE_SLICES:
            self._router.points.reach(FaultPoint.STREAM_SILENT)
            self.close(silent=True)
        else:
            self._router.after(self._slice, self._look)

    def _received(self, message: object) -> None:
        self._message_came = True
        router, described = self._router, self.description
        if described is None:
            self._begin(message)
            return
        worker_id = described.worker_id
        match message:
            case Step():
                router.hear(WorkerStepped(worker_id=worker_id, progress=message.progress))
            case LoadReport():
                router.hear(LoadReported(worker_id=worker_id, load=message))
            case KvEvents():
                if message.sequence != self._sequence:
                    router.points.reach(FaultPoint.STREAM_GAP)
                    self.close()
                    return
                self._sequence += 1
                router.hear(KvChanged(worker_id=worker_id, events=message.events))
            case Rejected():
                router.hear(AttemptRejected(worker_id=worker_id, rejected=message))
            case Draining():
                router.hear(WorkerDraining(worker_id=worker_id))
            case WorkerDescription():
                self.description = message
                changed = KvPathsChanged(worker_id=worker_id, kv_paths=message.kv_paths, store_id=message.store_id)
                router.hear(changed)
            case Malformed():
                router.points.reach(FaultPoint.STREAM_MALFORMED)
                self.close()
            case _:
                raise AssertionError(message)

    def _begin(self, first: object) -> None:
        if not isinstance(first, WorkerDescription) or first.worker_id in self._router.links:
            self.close()
            return
        self.description = first
        self._router.stream_opened(self, first)
