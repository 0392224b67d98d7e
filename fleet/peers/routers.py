"""Peer routers: exchanges state, such as reservations, between the routers of one cluster.

Rules:

1. Each router dials every other one and sends its messages on that connection. It receives the messages of others on
   the connections that it has accepted. On a dialled connection it receives only the answers to its own queries.
2. Each message about reservations contains all of them. So if a message is lost, the next one replaces it.
3. Reservations are sent after a reservation has begun or ended, or a prompt was computed. They are also sent every
   `FULL_STATE_SECONDS`, because they grow with the answers. Because many reservations change at once, a message waits
   for `SEND_SECONDS`. It waits for up to `FEW_CHANGES_SECONDS` while there are few changes (at most `FEW_CHANGES` for
   each running request) and no news of rules 8 and 9. The longer a message waits, the more routers send their next
   requests to the same worker: if a quarter of the running requests changes between two messages, the messages are
   of no use.
4. A router that was silent for `SILENCE_SECONDS`, or whose connection broke, counts as gone, and its reservations are
   dropped. It is dialled again after `FIRST_PAUSE_SECONDS` if the connection had lasted longer than `DIAL_SECONDS`.
   Otherwise the pause is up to `DIAL_SECONDS`, but it ends early when any peer router dials this one.
5. A worker registers with one router, and that router forwards each registration to the others. A router that is
   reached later gets all registrations with the rest of their leases, so a lease ends at the same time on all routers.
6. A router forwards two queries of its administrators to the other routers: the explanation of a request, which only
   one router knows, and the metrics of the processes behind one port. A proxy's report about a selection lease, or its
   release of one (`fleet.gateway.selection`), is forwarded in the same way. Routers that do not answer within
   `ANSWER_SECONDS` are left out.
7. Changed thresholds are sent to all routers, also to those reached later; the latest change wins.
8. New and changed session bindings are sent within `SEND_SECONDS`. Those that a request only renewed are sent with the
   reservations. A router that is reached later gets the most recent bindings. So routers whose connection was broken
   know the same bindings as soon as they are connected again.
9. Peer prompts (prompts that a worker is about to compute and has not reported) are sent like session bindings. Prompts
   for workers without KV events are sent too, if their block keys are made with a secret that other routers have. Each
   message holds the fingerprint of the secret, and routers with another secret ignore these prompts. Older
   versions of Fleet ignore all peer prompts. A router that is reached later gets the latest prompts, no matter which
   router has placed them.
10. Over TCP, routers prove that they belong to the cluster before they send anything else (`fleet.net.streams`). Over a
    Unix socket no proof is needed, because only its own user can connect to it.
11. The usage of tenants with limits is sent like reservations, unless the limits are shared through Redis. A router
    that is reached later gets what is left of each limit. Near a limit, a router asks the others to confirm that they
    have received its usage, and waits at most `SETTLE_SECONDS` for their answers. If a router does not answer in time,
    later checks do not wait for this router until it has answered a query again.
12. A router that is reached later gets all this state, and the reservations last. So a process that shares its ports
    with others has the whole state when the reservations arrive. It accepts no client before that.
13. The first message (`ReplicaHello`) states the protocol versions of the router that dials, and the answer states
    those of the other router. Without a common version, the connection ends, and both routers log what to upgrade
    (`kvstore.protocol.versions`).
14. The peers are the routers that the settings list, and all routers behind a name (`fleet.peers.named_routers`).
15. Each router needs a `router_id` of its own, because a worker keeps one stream for each id. If a peer has the id of
    this router, an error is logged.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Never, Protocol

from google.protobuf.message import DecodeError
from msgspec import Struct

from fleet.core.clock import MILLISECOND, Clock
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import Incarnation, RequestId, WorkerId
from fleet.core.system_clock import SystemClock, unix_nanoseconds
from fleet.frontend.control.cluster import explain_request
from fleet.frontend.overflow import OverflowReports
from fleet.membership.compatibility import IncompatiblePeers, Link
from fleet.membership.messages import Deregister, Register, Registration
from fleet.membership.registry import ResolveAddresses, resolve_addresses
from fleet.net.streams.authentication import PROVE_SECONDS, StreamAuthenticator, dial
from fleet.net.streams.identity import StreamIdentity, router_identity, tls_failure_cause, worker_identity
from fleet.net.streams.proof import BETWEEN_ROUTERS, is_opening
from fleet.peers.messages import (
    PeerThresholds,
    decode_binding,
    decode_booked,
    decode_instant,
    decode_left,
    decode_member,
    decode_placed,
    decode_registered,
    decode_taken,
    decode_thresholds,
    encode_bookings,
    encode_left,
    encode_members,
    encode_prompts,
    encode_registered,
    encode_sessions,
    encode_taken,
    encode_thresholds,
)
from fleet.peers.named_routers import NamedRouters
from fleet.router.api import RouterApi
from fleet.router.messages import PeerLeft, PeerPlaced, PeerReserved, ReservationTotals, SessionsBound
from fleet.router.settings.router import RouterSettings, Thresholds
from fleet.router.tenants import BucketLevels, Tenants, TenantUsageDelta
from fleet.v1 import control_pb2, selection_pb2
from fleet.v1 import replica_pb2 as pb
from kvstore.errors import StoreNotStarted
from kvstore.net.frames import FrameConnection, SendBufferFull, open_server
from kvstore.protocol.range_messages import parse_range, range_message
from kvstore.protocol.versions import NoCommonProtocol, agree, own_protocols

log = logging.getLogger(__name__)

SEND_SECONDS = 0.002
FEW_CHANGES_SECONDS = 0.02
# number of changes per running request that count as few (rule 3); a request causes three changes: it begins, its
# prompt is computed, and it ends
FEW_CHANGES = 1 / 8
FULL_STATE_SECONDS = 0.5
SILENCE_SECONDS = 2.0
# if a timer fires this many seconds late, this process itself stood still, and no peer counts as silent
LATE_SECONDS = 0.5
# Time limit for a connection attempt without proofs (with proofs: `PROVE_SECONDS`), and maximum pause between two attempts.
DIAL_SECONDS = 1.0
# pause in seconds after the first failed attempt; short, because processes of one host start at the same time
FIRST_PAUSE_SECONDS = 0.05
# time limit in seconds for the answers of peers about limits (rule 11); processes without load answer in 1 % of it
SETTLE_SECONDS = 0.25
# time limit for the answers of peer routers to a forwarded query: an explanation, metrics, or a report about a selection lease (rule 6)
ANSWER_SECONDS = 1.0
MAX_MESSAGE_BYTES = 16 << 20  # maximum length of a message; the reservations on one worker take about 50 bytes
# limit of the send buffer for one peer router; when it is exceeded, the connection is closed and opened again
MAX_WAITING_BYTES = 2 * MAX_MESSAGE_BYTES


UNSECURED = "that router proves no secret: set replicas_credentials.secret_file there as well"


class PeerLimits(Struct, frozen=True):
    """The tenants whose limits the routers share by messages, and the clock of these limits."""

    tenants: Tenants
    clock: Clock


class RegistryApi(Protocol):
    """The part of `fleet.membership.server.RegistryServer` that this module needs."""

    def register(self, event: Register) -> object: ...

    def deregister(self, event: Deregister) -> None: ...

    def hear_of(self, event: Registration) -> None: ...

    def registrations(self) -> Sequence[Registration]: ...


class SelectionLeasesApi(Protocol):
    """The part of `fleet.gateway.selection.SelectionService` that this module needs."""

    def reported(self, report: selection_pb2.ReportRequest) -> selection_pb2.ReportResponse | None: ...

    def released(self, release: selection_pb2.ReleaseRequest) -> bool: ...


class PeerRouters:
    """Exchanges state with the other routers of the cluster, over connections that `run` keeps open."""

    def __init__(
        self,
        settings: RouterSettings,
        router: RouterApi,
        registry: RegistryApi,
        leases: SelectionLeasesApi,
        metrics: Callable[[], str],
        *,
        private: int = 0,
        limits: "PeerLimits | None" = None,
        overflow: OverflowReports | None = None,
        incompatible: IncompatiblePeers | None = None,
        now_unix_ns: Callable[[], int] = unix_nanoseconds,
        look_up: ResolveAddresses = resolve_addresses,
    ) -> None:
        """Create the object; `run` opens the connections.

        Args:
            settings: Settings of this router, which name the other routers.
            router: This router.
            registry: Registry of this router.
            leases: Selection leases of this router.
            metrics: Returns the metrics of this process in Prometheus' text format.
            private: Fingerprint of the secret for block keys (rule 9); 0: no other router has the secret.
            limits: Tenant limits to share with the other routers; None: limits are not shared by messages.
            overflow: Reports of this process's hosted endpoints; None: there are no hosted endpoints.
            incompatible: Collects routers without a common protocol version; None: they are only logged.
            now_unix_ns: Wall clock in nanoseconds, which dates changes of thresholds and session bindings, so that the
                latest one wins. Nanoseconds are needed, because two requests may be less than a millisecond apart.
            look_up: Function that resolves `replicas_name`.

        Raises:
            ConfigurationRefused: `replicas_credentials` cannot be used, or are missing although other programs could use an
                address of the routers. Or `replicas_name` or `replicas_listen` is no valid address.
        """
        self._settings = settings
        self.router_id = settings.router_id
        self.incompatible = incompatible or IncompatiblePeers(SystemClock())
        self._own, self._calling = _identities(settings)
        self._named = (
            NamedRouters(settings.replicas_name, settings.replicas_listen, look_up) if settings.replicas_name else None
        )
        self._router = router
        self._registry = registry
        self._leases = leases
        self._metrics = metrics
        self._private = private
        self._now_unix_ns = now_unix_ns
        # The thresholds that were set last, at this router or at a peer (rule 7); None: nobody has set any.
        self._tuned: PeerThresholds | None = None
        self.links: dict[str, _PeerConnection] = {}  # the open connections that this router has dialled, by address
        self._prompts, self._sessions = router.prompts, router.sessions
        self._timer: asyncio.TimerHandle | None = None  # sends the changes (rule 3); None: no changes wait to be sent
        self._is_urgent = False  # True if the timer was set to `SEND_SECONDS`, so that no change can bring it forward
        self._few_changes = 0  # the highest number of changes that count as few (`FEW_CHANGES`)
        # Number of times that something was taken from a tenant's limits since the usage was last sent.
        self._usage_changes = 0
        self._sent_bookings: Mapping[WorkerId, ReservationTotals] = {}
        # the router ids of the processes that share the ports of this one, by address
        self._ids_beside: dict[str, str] = {}
        self._caught_up_with: set[str] = set()  # the router ids of the peers that have sent their whole state
        self._caught_up = asyncio.Event()
        self._reached = asyncio.Event()  # is set when the next peer router connects to this one
        self._settling: asyncio.Event | None = None
        self._limits = limits
        self._overflow = overflow
        router.on_change = self._changed
        if limits is not None:
            limits.tenants.on_taken = self._usage_changed
            limits.tenants.settle_with_others = self._settle

    async def run(self) -> Never:
        """Keep connections to the other routers and accept theirs, until cancelled.

        Raises:
            ConfigurationRefused: `replicas_listen` cannot be listened on.
        """
        self._router.hear(SessionsBound(clock=self._now_unix_ns()))
        listen = self._settings.replicas_listen
        guard = None
        if not self._own.is_open:
            guard = StreamAuthenticator(self._own, BETWEEN_ROUTERS, _refusal, limit=MAX_MESSAGE_BYTES)
        try:
            async with (
                open_server("replicas_listen", listen, self._accept, limit=MAX_MESSAGE_BYTES, guard=guard),
                asyncio.TaskGroup() as tasks,
            ):
                for address in self._settings.replicas:
                    tasks.create_task(self._keep_up(address), name=f"replica {address}")
                if self._named is not None:
                    tasks.create_task(self._named.follow(self._keep_up, self.links.keys()))
                while True:
                    await asyncio.sleep(FULL_STATE_SECONDS)
                    self._tell_news()
                    self._tell_taken()
                    self._tell_bookings(self._router.booked())
        except StoreNotStarted as error:
            raise ConfigurationRefused(str(error)) from error
        raise AssertionError("its tasks never end")

    def registered(self, event: Register) -> None:
        """Announce to the other routers that a worker has registered here."""
        self._send(pb.ReplicaMessage(registered=encode_registered(event)))

    def deregistered(self, event: Deregister) -> None:
        """Announce to the other routers that a worker has deregistered here."""
        message = control_pb2.DeregisterRequest(worker_id=event.worker_id, incarnation=event.incarnation)
        self._send(pb.ReplicaMessage(deregistered=message))

    async def explained(self, request_id: RequestId) -> control_pb2.ExplainResponse | None:
        """Return another router's explanation of a request; None if no router that placed it answers in time."""
        question = pb.ReplicaQuestion(explain=control_pb2.ExplainRequest(request_id=request_id))
        answer = await self._first(question)
        return None if answer is None else answer.explained

    async def reported(self, report: selection_pb2.ReportRequest) -> selection_pb2.ReportResponse | None:
        """Forward a report about a selection lease, and return the answer of the router that gave the lease.

        Return None if no answer comes in time.
        """
        answer = await self._first(pb.ReplicaQuestion(report=report))
        return None if answer is None else answer.reported

    async def released(self, release: selection_pb2.ReleaseRequest) -> None:
        """Forward the release of a selection lease, and wait at most `ANSWER_SECONDS` for the router that gave the lease."""
        await self._first(pb.ReplicaQuestion(release=release))

    @property
    def share_a_port(self) -> bool:
        """True if other router processes listen on the same ports as this one."""
        return any(map(_is_beside, self._settings.replicas))

    def note_whole_state(self, router_id: str) -> None:
        """Note that a peer router has sent its whole state, so that `caught_up` need not wait for it."""
        if not self._caught_up.is_set():
            self._caught_up_with.add(router_id)
            self._check_caught_up()

    def _note_answered_hello(self, address: str, router_id: str) -> None:
        """Note the router id of the peer at an address that this router has dialled."""
        if _is_beside(address):
            self._ids_beside[address] = router_id
            self._check_caught_up()

    def _check_caught_up(self) -> None:
        """Note whether each process that shares the ports of this process has sent its whole state."""
        beside = set(filter(_is_beside, self._settings.replicas))
        if self._ids_beside.keys() == beside and self._caught_up_with.issuperset(self._ids_beside.values()):
            self._caught_up.set()

    async def caught_up(self) -> None:
        """Wait until all processes that share the ports of this process have sent their whole state.

        The wait has no time limit.
        """
        if self.share_a_port:
            await self._caught_up.wait()

    async def metrics(self) -> dict[str, str]:
        """Return the metrics of this process and of the processes that share its ports, by router id.

        Processes that do not answer within `ANSWER_SECONDS` are left out.
        """
        beside = [link for address, link in self.links.items() if _is_beside(address)]
        answers = await self._ask(beside, pb.ReplicaQuestion(metrics=pb.MetricsRequest()))
        return {self._settings.router_id: self._metrics()} | {answer.router_id: answer.metrics for answer in answers}

    def tuned(self, thresholds: Thresholds) -> None:
        """Send thresholds that were changed at this router to the other routers."""
        self._tuned = PeerThresholds(thresholds, self._now_unix_ns() // MILLISECOND)
        self._send(encode_thresholds(self._tuned))

    def tuned_elsewhere(self, tuned: PeerThresholds) -> None:
        """Take over thresholds that were changed at another router, if this change is the latest one."""
        if self._tuned is None or tuned.at_unix_ms > self._tuned.at_unix_ms:
            self._tuned = tuned
            self._router.tune(tuned.thresholds)

    def answer(self, question: pb.ReplicaQuestion) -> pb.ReplicaAnswer:
        """Answer a query of another router. The answer has no content if this router cannot answer the query."""
        answer = pb.ReplicaAnswer(number=question.number, router_id=self._settings.router_id)
        match question.WhichOneof("question"):
            case "explain":
                request_id = RequestId(question.explain.request_id)
                if (explained := explain_request(self._router, self._overflow, request_id)) is not None:
                    answer.explained.CopyFrom(explained)
            case "metrics":
                answer.metrics = self._metrics()
            case "report":
                if (reported := self._leases.reported(question.report)) is not None:
                    answer.reported.CopyFrom(reported)
            case "release":
                if self._leases.released(question.release):
                    answer.released.SetInParent()
            case "settled":
                answer.settled.SetInParent()
            case None:
                """Ignore kinds of queries that only later versions know; the answer then has no content."""
        return answer

    async def _ask(self, links: "list[_PeerConnection]", question: pb.ReplicaQuestion) -> list[pb.ReplicaAnswer]:
        """Send a query on several connections; return the answers that arrive within `ANSWER_SECONDS`."""
        asked = [link.ask(question) for link in links]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        for each in late:
            each.cancel()
        return [each.result() for each in asked if each in done and not each.cancelled()]

    async def _first(self, question: pb.ReplicaQuestion) -> pb.ReplicaAnswer | None:
        """Send a query to all routers; return the first answer that has content, or None if none arrives in time."""
        asked = {link.ask(question) for link in self.links.values()}
        waiting = asked
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    while waiting:
                        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                        answers = [each.result() for each in done if not each.cancelled()]
                        for answer in answers:
                            if answer.WhichOneof("answer") is not None:
                                return answer
        finally:
            for each in asked:
                each.cancel()
        return None

    def _changed(self) -> None:
        """Set the timer that sends the changes to the peers (rule 3), if there are any. This is called after each event of the router."""
        if self._is_urgent:
            return
        changes = self._prompts.changes + self._usage_changes
        has_prompts = self._prompts.has_prompts(assumed=bool(self._private))
        if changes > self._few_changes or has_prompts or self._sessions.has_moved:
            self._tell_within(SEND_SECONDS)
            self._is_urgent = self._timer is not None
        elif self._timer is None and changes:
            self._tell_within(FEW_CHANGES_SECONDS)

    def _usage_changed(self) -> None:
        self._usage_changes += 1
        self._changed()

    def _tell_within(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.links:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._tell_changes)

    def _tell_changes(self) -> None:
        self._timer, self._is_urgent = None, False
        # Send prompts before reservations. A peer that knew only the reservation would avoid the worker, and send a
        # request with the same prompt to another one.
        self._tell_news()
        self._tell_taken()
        if (booked := self._router.booked()) != self._sent_bookings:
            self._tell_bookings(booked)

    def _tell_bookings(self, booked: Mapping[WorkerId, ReservationTotals]) -> None:
        self._sent_bookings = booked
        self._few_changes = int(FEW_CHANGES * sum(each.requests for each in booked.values()))
        self._send(encode_bookings(booked))

    def _tell_news(self) -> None:
        placed, over = self._router.prompts.news()
        if not self._private:
            placed = [each for each in placed if each.number]
        for message in (*encode_prompts(placed, over, self._private), *encode_sessions(self._router.sessions.news())):
            self._send(message)

    def _tell_taken(self) -> None:
        self._usage_changes = 0
        if self._limits is not None and (taken := self._limits.tenants.taken()):
            self._send(encode_taken(taken))
            if not self._limits.tenants.others:
                self._limits.tenants.confirm(self._limits.tenants.unconfirmed_totals())

    async def _settle(self) -> bool:
        """Send the usage of tenants, and wait until the other routers have received it.

        Return False if a router did not answer within `SETTLE_SECONDS`. If another call is already waiting for answers, only
        wait until that call has ended, and return True: the caller then checks whether it has to call this method again.
        """
        assert self._limits is not None
        if self._settling is not None:
            await self._settling.wait()
            return True  # usage that came after the other call had sent its message is sent by the next call
        self._settling = settling = asyncio.Event()
        tenants = self._limits.tenants
        try:
            self._tell_taken()
            totals = tenants.unconfirmed_totals()
            question = pb.ReplicaQuestion(settled=pb.SettledRequest())
            asked = {link.ask(question): link for link in self.links.values() if not link.deaf}
            late = (await asyncio.wait(asked, timeout=SETTLE_SECONDS))[1] if asked else set()
            for each in late:
                asked[each].deaf = True
                each.cancel()
            tenants.confirm(totals)
            self._count_others()
            return not late
        finally:
            self._settling = None
            settling.set()

    def _count_others(self) -> None:
        if self._limits is not None:
            self._limits.tenants.others = sum(not link.deaf for link in self.links.values())

    def _send(self, message: pb.ReplicaMessage) -> None:
        payload = message.SerializeToString()
        for link in list(self.links.values()):
            link.send(payload)

    async def _keep_up(self, address: str) -> Never:
        """Keep a connection to another router, and open it again whenever it has ended."""
        pause, cause = FIRST_PAUSE_SECONDS, ""
        refused = False  # True if the last connection ended because there was no common protocol version
        while True:
            link = _PeerConnection(
                address,
                self.router_id,
                self._count_others,
                partial(self._note_answered_hello, address),
                self.incompatible,
                refused_before=refused,
            )
            try:
                async with asyncio.timeout(DIAL_SECONDS if self._calling.is_open else PROVE_SECONDS):
                    link.connection = await dial(
                        address,
                        link.accept,
                        self._calling,
                        BETWEEN_ROUTERS,
                        limit=MAX_MESSAGE_BYTES,
                        send_limit=MAX_WAITING_BYTES,
                    )
            except OSError as error:
                if (why := _cause(error)) != cause:  # log the same cause only once in a row
                    cause = why
                    log.warning("peer router unreachable", extra={"address": address, "cause": cause})
                await self._rest(pause)
                pause = min(2 * pause, DIAL_SECONDS)
                continue
            pause, cause = FIRST_PAUSE_SECONDS, ""
            if not refused:
                log.info("peer router reached", extra={"address": address})
            hello = pb.ReplicaHello(
                router_id=self._settings.router_id,
                unix_ms=self._now_unix_ns() // MILLISECOND,
                protocols=range_message(),
            )
            link.send(pb.ReplicaMessage(hello=hello).SerializeToString())
            router = self._router
            # Send new usage before what is left of the limits. In the other order, peers would count the usage twice.
            self._tell_taken()
            for message in (
                *encode_members(self._registry.registrations()),
                *self._left(),
                *([] if self._tuned is None else [encode_thresholds(self._tuned)]),
                *encode_prompts(router.prompts.latest(), (), self._private),
                *(encode_prompts(router.assumed_prompts(), (), self._private) if self._private else ()),
                *encode_sessions(router.sessions.latest()),
                encode_bookings(router.booked()),
            ):
                link.send(message.SerializeToString())
            self.links[address] = link
            began = asyncio.get_running_loop().time()
            self._count_others()
            try:
                await link.over.wait()
            finally:
                del self.links[address]
                self._count_others()
                link.connection.abort()
            refused = link.refused
            if not refused:
                log.warning(
                    "peer router lost", extra={"address": address, "cause": link.cause or "it closed the connection"}
                )
            # Without the longer pause, a router that accepts connections but closes them at once would be dialled many
            # times a second.
            lasted = asyncio.get_running_loop().time() - began
            await self._rest(FIRST_PAUSE_SECONDS if lasted > DIAL_SECONDS else DIAL_SECONDS)

    async def _rest(self, seconds: float) -> None:
        """Wait `seconds` before the next attempt to connect, or less if a peer router connects, but at least `FIRST_PAUSE_SECONDS`.

        A router that has started, or that goes on after it hung, dials its peers. They then dial this router soon, and send it their state.
        """
        reached = self._reached
        await asyncio.sleep(FIRST_PAUSE_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds - FIRST_PAUSE_SECONDS):
                await reached.wait()

    def note_connected_peer(self, router_id: str) -> None:
        """Note that a peer router has connected to this one, so that it can probably be dialled.

        Log an error if the peer has the id of this router, because workers then cut the streams of both routers (rule 15).
        """
        if router_id == self.router_id:
            cause = "workers cut the streams of routers with the same id: set another router_id in one of them, and leave a router and all its addresses out of its own replicas"
            log.error("peer router has the id of this router", extra={"router": router_id, "cause": cause})
        self._reached.set()
        self._reached = asyncio.Event()

    def _left(self) -> list[pb.ReplicaMessage]:
        left = {} if self._limits is None else self._limits.tenants.left(self._limits.clock.now())
        return [encode_left(left)] if left else []

    def took_elsewhere(self, taken: Mapping[str, TenantUsageDelta]) -> None:
        """Subtract the usage that tenants had at another router from what is left of their limits here."""
        if self._limits is not None:
            now = self._limits.clock.now()
            for name, each in taken.items():
                self._limits.tenants.took_elsewhere(name, each, now)

    def left_elsewhere(self, left: Mapping[str, BucketLevels]) -> None:
        """Lower what is left of the tenants' limits to the values of another router, where these are lower."""
        if self._limits is not None:
            now = self._limits.clock.now()
            for name, each in left.items():
                self._limits.tenants.lower(name, each, now)

    def _accept(self, connection: FrameConnection) -> "_IncomingPeer":
        return _IncomingPeer(connection, self._router, self._registry, self, self._private)


class _PeerConnection:
    """A connection that this router has dialled: it sends messages and queries to the peer, and receives the answers."""

    connection: FrameConnection

    def __init__(
        self,
        address: str,
        router_id: str,
        answers_again: Callable[[], None],
        note_answered_hello: Callable[[str], None],
        incompatible: IncompatiblePeers,
        *,
        refused_before: bool,
    ) -> None:
        self.address = address
        self.refused = False  # True once it is known that the routers have no common protocol version
        # True if the connection before this one was refused. Then "peer router reached" is logged only when both routers
        # have agreed on a protocol version.
        self._refused_before = refused_before
        self._router_id = router_id
        self._incompatible = incompatible
        self.over = asyncio.Event()
        # Text that says why the connection ended; empty if the other router closed it.
        self.cause = ""
        # True if the peer did not answer a query about limits in time, and has answered none since then (rule 11).
        self.deaf = False
        self._answers_again = answers_again
        self._note_answered_hello = note_answered_hello
        self._questions = 0
        # the queries without an answer, by their numbers; callers of `ask` limit the time that they wait
        self._asked: dict[int, asyncio.Future[pb.ReplicaAnswer]] = {}

    def accept(self, connection: FrameConnection) -> "_PeerConnection":  # noqa: ARG002 - the caller requires it
        return self

    def send(self, payload: bytes) -> None:
        try:
            self.connection.send(payload)
        except SendBufferFull as error:
            self.cause = self.cause or str(error)
            self.over.set()

    def ask(self, question: pb.ReplicaQuestion) -> asyncio.Future[pb.ReplicaAnswer]:
        """Send a query and return a future of the answer.

        The future is cancelled if the connection ends. A caller that does not want to wait any longer cancels the future.
        """
        self._questions += 1
        number = self._questions
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        numbered = pb.ReplicaQuestion()
        numbered.CopyFrom(question)
        numbered.number = number
        self.send(pb.ReplicaMessage(question=numbered).SerializeToString())
        return answer

    def received(self, payload: bytes) -> None:
        try:
            answer = pb.ReplicaAnswer.FromString(payload)
        except DecodeError as error:
            raise ConnectionError("a peer router sent an invalid answer") from error
        if answer.HasField("protocols"):
            self._agree_with(answer)
        if answer.refused:
            raise ConnectionError(answer.refused)
        if self.deaf:
            self.deaf = False
            self._answers_again()
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():  # otherwise nobody waits for the answer any more
            asked.set_result(answer)

    def _agree_with(self, answer: pb.ReplicaAnswer) -> None:
        """Check the peer's answer to `ReplicaHello`. Raise ConnectionError if the two routers have no common protocol version."""
        name = answer.router_id[:100] or self.address
        try:
            agree(
                own_protocols(), parse_range(answer), own_name=f"router {self._router_id}", peer_name=f"router {name}"
            )
        except NoCommonProtocol as error:
            self.refused = True
            _remember_refusal(self._incompatible, name, error)
            raise ConnectionError(str(error)) from error
        self._incompatible.accepted(Link.PEER, name)
        self._note_answered_hello(answer.router_id)
        if self._refused_before:
            self._refused_before = False
            log.info("peer router reached", extra={"address": self.address})

    def resumed(self) -> None:
        """Do nothing, because no code waits until the connection can send again."""

    def lost(self, cause: Exception | None) -> None:
        if cause is not None:
            self.cause = self.cause or tls_failure_cause(cause, "replicas_credentials")
        self.over.set()
        for asked in list(self._asked.values()):
            asked.cancel()


class _IncomingPeer:
    """A connection that another router has dialled: it receives the messages of that router and answers its queries."""

    def __init__(
        self, connection: FrameConnection, router: RouterApi, registry: RegistryApi, replicas: PeerRouters, private: int
    ) -> None:
        self._connection = connection
        self._router = router
        self._registry = registry
        self._replicas = replicas
        self._private = private
        self._router_id = ""
        self._replica = ""
        self._refused = False  # True once it is known that the routers have no common protocol version
        self._loop = asyncio.get_running_loop()
        self._last_message_at = self._loop.time()
        self._silence = self._loop.call_later(SILENCE_SECONDS, self._check_silence)

    def received(self, payload: bytes) -> None:
        try:
            message = pb.ReplicaMessage.FromString(payload)
        except DecodeError as error:
            if is_opening(payload):
                self._connection.send(_refusal(UNSECURED))
                self._connection.close(
                    ConnectionError("it wants to prove a secret: set replicas_credentials.secret_file")
                )
                return
            raise ConnectionError("a peer router sent an invalid message") from error
        kind = message.WhichOneof("message")
        if (kind == "hello") == bool(self._replica):
            raise ConnectionError("a peer router sent no hello, or two")
        self._last_message_at = self._loop.time()
        match kind:
            case "hello":
                self._router_id = message.hello.router_id
                if not self._agrees_with(message.hello):
                    return
                self._replicas.note_connected_peer(self._router_id)
                # Name of the connection, under which the peer's reservations are kept. It is unique, because the peer may dial again
                # before the earlier connection has ended.
                self._replica = f"{self._router_id}@{id(self)}"
                self._router.hear(SessionsBound(clock=decode_instant(message.hello.unix_ms * MILLISECOND)))
            case "bookings":
                self._router.hear(PeerReserved(replica=self._replica, booked=decode_booked(message.bookings)))
                self._replicas.note_whole_state(self._router_id)
            case "registered":
                self._registry.register(decode_registered(message.registered))
            case "members":
                for member in message.members.members:
                    self._registry.hear_of(decode_member(member))
            case "deregistered":
                gone = message.deregistered
                self._registry.deregister(
                    Deregister(worker_id=WorkerId(gone.worker_id), incarnation=Incarnation(gone.incarnation))
                )
            case "question":
                self._connection.send(self._replicas.answer(message.question).SerializeToString())
            case "sessions":
                self._router.hear(SessionsBound(bindings=tuple(map(decode_binding, message.sessions.bindings))))
            case "prompts":
                prompts = message.prompts
                ours = prompts.private != 0 and prompts.private == self._private
                placed = tuple(decode_placed(each) for each in prompts.placed if each.number or ours)
                self._router.hear(PeerPlaced(replica=self._replica, placed=placed, over=tuple(prompts.over)))
            case "taken":
                self._replicas.took_elsewhere(decode_taken(message.taken))
            case "left":
                self._replicas.left_elsewhere(decode_left(message.left))
            case "tuned":
                self._replicas.tuned_elsewhere(decode_thresholds(message.tuned))
            case "answers" | None:
                """Ignore tokens of answers, which earlier versions send, and messages of later versions."""

    def _agrees_with(self, hello: pb.ReplicaHello) -> bool:
        """Answer `ReplicaHello` with this router's protocol versions. Return False if the routers have no version in common."""
        name = f"router {hello.router_id[:100]}"
        answer = pb.ReplicaAnswer(router_id=self._replicas.router_id, protocols=range_message())
        try:
            agree(own_protocols(), parse_range(hello), own_name=f"router {self._replicas.router_id}", peer_name=name)
        except NoCommonProtocol as error:
            answer.refused = str(error)
            self._refused = True
            _remember_refusal(self._replicas.incompatible, hello.router_id[:100], error)
            self._connection.send(answer.SerializeToString())
            self._connection.close(ConnectionError(str(error)))
            return False
        self._replicas.incompatible.accepted(Link.PEER, hello.router_id[:100])
        if hello.HasField("protocols"):  # routers of protocol version 1 expect no answer
            self._connection.send(answer.SerializeToString())
        return True

    def resumed(self) -> None:
        """Do nothing, because no code waits until the connection can send again."""

    def lost(self, cause: Exception | None) -> None:
        self._silence.cancel()
        if self._replica:
            log.warning("peer router left", extra={"replica": self._replica, "cause": str(cause or "closed")})
            self._router.hear(PeerLeft(replica=self._replica))
        elif cause is not None and not self._refused:
            log.warning("peer router rejected", extra={"cause": str(cause)})

    def _check_silence(self) -> None:
        now = self._loop.time()
        if now > self._silence.when() + LATE_SECONDS:
            # This process stood still, and what the other router has sent meanwhile waits to be read.
            self._last_message_at = now
        due = self._last_message_at + SILENCE_SECONDS
        if now >= due:
            self._connection.abort(ConnectionError(f"it was silent for {SILENCE_SECONDS:g} s"))
        else:
            self._silence = self._loop.call_at(due, self._check_silence)


def _remember_refusal(incompatible: IncompatiblePeers, name: str, error: NoCommonProtocol) -> None:
    """Remember that two routers have no common protocol version, and log it once in a while.

    Routers dial each other, and try again every second. Whichever of them has dialled, the name of the peer is its
    router id, and the error is the same. So the peer counts once.
    """
    if refusals := incompatible.refused(Link.PEER, name, str(error)):
        log.warning(
            "peer router refused: no common protocol version",
            extra={"peer": name, "cause": str(error), "refusals": refusals},
        )


def _identities(settings: RouterSettings) -> tuple[StreamIdentity, StreamIdentity]:
    """Return the identities of this router for accepted and for dialled connections.

    Raises:
        ConfigurationRefused: A file cannot be used, or an unprotected address is open to other programs.
    """
    own = worker_identity("replicas_credentials", settings.replicas_credentials)
    calling = router_identity("replicas_credentials", settings.replicas_credentials)
    if settings.replicas_listen:
        own.require("replicas_listen", settings.replicas_listen, on_loopback=True)
    for index, address in enumerate(settings.replicas):
        calling.require(f"replicas[{index}]", address, on_loopback=True)
    if settings.replicas_name:
        calling.require("replicas_name", settings.replicas_name, on_loopback=True)
    return own, calling


def _refusal(why: str) -> bytes:
    return pb.ReplicaAnswer(refused=why).SerializeToString()


def _cause(error: OSError) -> str:
    return (
        "it does not answer in time"
        if isinstance(error, TimeoutError)
        else tls_failure_cause(error, "replicas_credentials")
    )


def _is_beside(address: str) -> bool:
    """Return True if a peer's address is a Unix socket. The peer then is a process of this host that shares this router's ports."""
    return address.startswith("unix:")
