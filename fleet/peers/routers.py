"""Peer routers: what the routers of one cluster tell each other.

Rules:

1. Each router dials every other one and sends its messages on that connection; it receives on the connections that it
   accepted. A dialled connection only brings answers to questions that were asked there.
2. Reservations are sent as a whole, so the next message repairs whatever was missed.
3. Reservations are sent `SEND_INTERVAL_SECONDS` after a change, because many change at once, and at least every
   `FULL_STATE_SECONDS`. The longer they wait, the more routers send their next requests to the same worker: if a
   quarter of the running requests changes between two messages, they help no more than none. Unchanged reservations are
   not sent earlier, because each message is an event for its receiver, and two idle routers would answer each other
   forever.
4. A router that was silent for `SILENCE_SECONDS`, or whose connection broke, has left, and its reservations with it.
5. A worker registers with one router, as often as its lease demands, and that router tells the others. A router that is
   reached later gets all registrations with the rest of their leases, so leases end at the same time everywhere.
6. A question of an operator to one router goes to all: why a request was placed as it was, which only one router knows,
   and the metrics of the processes behind one port. A proxy's report about a lease (`fleet.gateway.selection`) is
   passed on in the same way. Routers that do not answer within `ANSWER_SECONDS` are left out.
7. Changed thresholds are sent to all routers, also to those reached later; the latest change wins.
8. Session bindings are sent with the reservations, and to routers reached later. So routers that could not reach each
   other agree as soon as they can.
9. Peer prompts (prompts that a worker is about to compute and has not reported) are sent in the same way. Prompts for
   workers without KV events are sent too, if their block keys are made with a secret that other routers have; each
   message holds the fingerprint of the secret, and routers with another secret ignore these prompts. Older versions
   ignore all of them. A router that is reached later gets the latest ones, whichever router has sent them to the workers.
10. Over TCP, routers prove that they belong to the cluster before they say anything (`fleet.net.streams`). Unix sockets
    are
    open to their own user only.
11. The usage of tenants with limits is sent like reservations, unless Redis shares the limits; a router that is reached
    later
    gets what is left. Near a limit, a router asks the others whether they have received its usage, and waits at most
    `SETTLE_SECONDS` for their answers. A router that does not answer in time is not waited for again until it answers
    something.
12. A router that is reached later gets the reservations last. So a process that shares its ports knows that it has
    caught
    up, and accepts no connection before.
13. The tokens of answers in the journal (`fleet.frontend.answer_journal`) are sent at once and not in batches: the
    client gets them only then, and this router may be killed in between. A router that is reached later gets all that
    is known. A peer that takes nothing more does not get them.
14. Besides the routers that the settings list, those behind one name are peers (`fleet.peers.named_routers`).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Never, Protocol

from google.protobuf.message import DecodeError
from msgspec import Struct

from fleet.core.clock import MILLISECOND, Clock
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import Incarnation, RequestId, WorkerId
from fleet.core.system_clock import unix_nanoseconds
from fleet.frontend.answer_journal import AnswerJournal, JournalEntry
from fleet.frontend.control.cluster import explain_request
from fleet.frontend.overflow import OverflowReports
from fleet.membership.messages import Deregister, Register, Registration
from fleet.membership.registry import ResolveAddresses, resolve_addresses
from fleet.net.streams.handshake import PROVE_SECONDS, StreamAuthenticator, dial
from fleet.net.streams.identity import StreamIdentity, router_identity, tls_failure_cause, worker_identity
from fleet.net.streams.proof import BETWEEN_ROUTERS, is_opening
from fleet.peers.messages import (
    PeerThresholds,
    decode_answer,
    decode_binding,
    decode_booked,
    decode_instant,
    decode_left,
    decode_member,
    decode_placed,
    decode_registered,
    decode_taken,
    decode_thresholds,
    encode_answers,
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

log = logging.getLogger(__name__)

SEND_INTERVAL_SECONDS = 0.002
FULL_STATE_SECONDS = 0.5
SILENCE_SECONDS = 2.0
DIAL_SECONDS = 1.0  # seconds to wait for a connection, and between two later attempts to connect
# seconds after the first failed attempt; short, because processes of one host start at the same time
FIRST_PAUSE_SECONDS = 0.05
# seconds to wait for the answers of peers about limits; idle processes answer a hundred times as fast
SETTLE_SECONDS = 0.25
ANSWER_SECONDS = 1.0  # seconds to wait for a peer's answer to an operator's question
MAX_MESSAGE_BYTES = 16 << 20  # longest message; the reservations on a worker need about 50 bytes of it
# most unsent bytes for one router; with more, the connection ends and the router is dialled again
MAX_WAITING_BYTES = 2 * MAX_MESSAGE_BYTES


UNSECURED = "that router proves no secret: set replicas_credentials.secret_file there as well"


class PeerLimits(Struct, frozen=True):
    """Tenant limits that the routers share."""

    tenants: Tenants
    clock: Clock


class RegistryApi(Protocol):
    """The part of `fleet.membership.server.RegistryServer` that peers need."""

    def register(self, event: Register) -> object: ...

    def deregister(self, event: Deregister) -> None: ...

    def hear_of(self, event: Registration) -> None: ...

    def registrations(self) -> Sequence[Registration]: ...


class SelectionLeasesApi(Protocol):
    """The part of `fleet.gateway.selection.SelectionService` that peers need."""

    def reported(self, report: selection_pb2.ReportRequest) -> selection_pb2.ReportResponse | None: ...

    def released(self, release: selection_pb2.ReleaseRequest) -> bool: ...


class PeerRouters:
    """Connections to the other routers of the cluster; `run` keeps them."""

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
        journal: AnswerJournal | None = None,
        now_unix_ns: Callable[[], int] = unix_nanoseconds,
        look_up: ResolveAddresses = resolve_addresses,
    ) -> None:
        """Prepare the connections; `run` dials.

        Args:
            settings: Settings of this router, which name the others.
            router: This router.
            registry: Registry of this router.
            leases: Selection leases of this router.
            metrics: Returns the metrics of this process in Prometheus' text format.
            private: Fingerprint of the secret for block keys (rule 9); 0: no other router has it.
            limits: Tenant limits to share with the other routers; None: not shared here.
            overflow: Hosted endpoints of this process, if there are any.
            journal: Answers of this process that others may have to go on with; None: there are none.
            now_unix_ns: Clock that decides which threshold change is the latest, and which session binding of routers that
                have not met. In nanoseconds, because two requests may be less than a millisecond apart.
            look_up: Resolves `replicas_name`.

        Raises:
            ConfigurationRefused: `replicas_credentials` cannot be used, or leave `replicas_listen` open to other programs; or
                `replicas_name` or `replicas_listen` is no address.
        """
        self._settings = settings
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
        self._tuned: PeerThresholds | None = None  # thresholds of the latest change
        self.links: dict[str, _PeerConnection] = {}  # connections by address
        self._timer: asyncio.TimerHandle | None = None
        self._told: Mapping[WorkerId, ReservationTotals] = {}
        self._heard_of: set[str] = set()
        self._caught_up = asyncio.Event()
        self._settling: asyncio.Event | None = None
        self._limits = limits
        self._overflow = overflow
        self._journal = journal
        if journal is not None:
            journal.tell = self._tell_answer
        router.on_change = self._changed
        if limits is not None:
            limits.tenants.on_taken = self._changed
            limits.tenants.settle_with_others = self._settle

    async def run(self) -> Never:
        """Connect and listen until cancelled.

        Raises:
            ConfigurationRefused: `replicas_listen` cannot be listened on.
        """
        self._router.hear(SessionsBound(clock=self._now_unix_ns()))
        listen = self._settings.replicas_listen
        door = None
        if not self._own.is_open:
            door = StreamAuthenticator(self._own, BETWEEN_ROUTERS, _refusal, limit=MAX_MESSAGE_BYTES)
        try:
            async with (
                open_server("replicas_listen", listen, self._accept, limit=MAX_MESSAGE_BYTES, door=door),
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
                    self._tell_bookings()
        except StoreNotStarted as error:
            raise ConfigurationRefused(str(error)) from error
        raise AssertionError("its tasks never end")

    def registered(self, event: Register) -> None:
        """Tell the other routers that a worker has registered here."""
        self._send(pb.ReplicaMessage(registered=encode_registered(event)))

    def deregistered(self, event: Deregister) -> None:
        """Tell the other routers that a worker has deregistered here."""
        message = control_pb2.DeregisterRequest(worker_id=event.worker_id, incarnation=event.incarnation)
        self._send(pb.ReplicaMessage(deregistered=message))

    async def explained(self, request_id: RequestId) -> control_pb2.ExplainResponse | None:
        """Return another router's explanation of a request; None if no router has placed it."""
        question = pb.ReplicaQuestion(explain=control_pb2.ExplainRequest(request_id=request_id))
        answer = await self._first(question)
        return None if answer is None else answer.explained

    async def reported(self, report: selection_pb2.ReportRequest) -> selection_pb2.ReportResponse | None:
        """Return the answer of the router that holds this lease; None if none does."""
        answer = await self._first(pb.ReplicaQuestion(report=report))
        return None if answer is None else answer.reported

    async def released(self, release: selection_pb2.ReleaseRequest) -> None:
        """End a lease that another router has given."""
        await self._first(pb.ReplicaQuestion(release=release))

    @property
    def share_a_port(self) -> bool:
        """True if other processes share the ports of this one."""
        return any(map(_is_beside, self._settings.replicas))

    def heard_of(self, router_id: str) -> None:
        """Note that a router has sent its whole state."""
        if not self._caught_up.is_set():
            self._heard_of.add(router_id)
            if len(self._heard_of) >= sum(map(_is_beside, self._settings.replicas)):
                self._caught_up.set()

    async def caught_up(self) -> None:
        """Wait until all processes beside this one have sent their state; the caller sets a deadline."""
        if self.share_a_port:
            await self._caught_up.wait()

    async def metrics(self) -> dict[str, str]:
        """Return the metrics of this process and of those beside it, by router."""
        beside = [link for address, link in self.links.items() if _is_beside(address)]
        answers = await self._ask(beside, pb.ReplicaQuestion(metrics=pb.MetricsRequest()))
        return {self._settings.router_id: self._metrics()} | {answer.router_id: answer.metrics for answer in answers}

    def tuned(self, thresholds: Thresholds) -> None:
        """Tell the other routers that an operator has set the thresholds here."""
        self._tuned = PeerThresholds(thresholds, self._now_unix_ns() // MILLISECOND)
        self._send(encode_thresholds(self._tuned))

    def tuned_elsewhere(self, tuned: PeerThresholds) -> None:
        """Take over thresholds that an operator has set at another router."""
        if self._tuned is None or tuned.at_unix_ms > self._tuned.at_unix_ms:
            self._tuned = tuned
            self._router.tune(tuned.thresholds)

    def answer(self, question: pb.ReplicaQuestion) -> pb.ReplicaAnswer:
        """Answer a question of another router."""
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
                """Ignore questions of later versions."""
        return answer

    async def _ask(self, links: "list[_PeerConnection]", question: pb.ReplicaQuestion) -> list[pb.ReplicaAnswer]:
        """Return the answers that come in time."""
        asked = [link.ask(question) for link in links]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        for each in late:
            each.cancel()
        return [each.result() for each in asked if each in done and not each.cancelled()]

    async def _first(self, question: pb.ReplicaQuestion) -> pb.ReplicaAnswer | None:
        """Return the first answer with content; None if none comes in time."""
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
        if self._timer is None and self.links:
            self._timer = asyncio.get_running_loop().call_later(SEND_INTERVAL_SECONDS, self._tell_changes)

    def _tell_changes(self) -> None:
        self._timer = None
        # prompts come before reservations, because a reservation does not delay requests that share the known prompt
        self._tell_news()
        self._tell_taken()
        if self._router.booked() != self._told:
            self._tell_bookings()

    def _tell_bookings(self) -> None:
        self._told = self._router.booked()
        self._send(encode_bookings(self._told))

    def _tell_news(self) -> None:
        placed, over = self._router.prompts.news()
        if not self._private:
            placed = [each for each in placed if each.number]
        for message in (*encode_prompts(placed, over, self._private), *encode_sessions(self._router.sessions.news())):
            self._send(message)

    def _tell_taken(self) -> None:
        if self._limits is not None and (taken := self._limits.tenants.taken()):
            self._send(encode_taken(taken))
            if not self._limits.tenants.others:
                self._limits.tenants.confirm(self._limits.tenants.told())

    async def _settle(self) -> bool:
        """Wait until the other routers have received the usage of tenants; concurrent callers share one round."""
        assert self._limits is not None
        if self._settling is not None:
            await self._settling.wait()
            return True  # a part may still be on its way; the next round covers it
        self._settling = settling = asyncio.Event()
        tenants = self._limits.tenants
        try:
            self._tell_taken()
            told = tenants.told()
            question = pb.ReplicaQuestion(settled=pb.SettledRequest())
            asked = {link.ask(question): link for link in self.links.values() if not link.deaf}
            late = (await asyncio.wait(asked, timeout=SETTLE_SECONDS))[1] if asked else set()
            for each in late:
                asked[each].deaf = True
                each.cancel()
            tenants.confirm(told)
            self._count_others()
            return not late
        finally:
            self._settling = None
            settling.set()

    def _count_others(self) -> None:
        if self._limits is not None:
            self._limits.tenants.others = sum(not link.deaf for link in self.links.values())

    def _tell_answer(self, entry: JournalEntry) -> None:
        for message in encode_answers([entry]):
            payload = message.SerializeToString()
            for link in list(self.links.values()):
                link.send(payload)
                link.connection.flush()

    def answered_elsewhere(self, entries: Iterable[JournalEntry]) -> None:
        """Note tokens that clients got from another router."""
        if self._journal is not None:
            for entry in entries:
                self._journal.heard(entry)

    def _send(self, message: pb.ReplicaMessage) -> None:
        payload = message.SerializeToString()
        for link in list(self.links.values()):
            link.send(payload)

    async def _keep_up(self, address: str) -> Never:
        """Connect to another router again and again."""
        pause, cause = FIRST_PAUSE_SECONDS, ""
        while True:
            link = _PeerConnection(address, self._count_others)
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
                if (why := _cause(error)) != cause:  # a cause that repeats is logged once
                    cause = why
                    log.warning("peer router unreachable", extra={"address": address, "cause": cause})
                await asyncio.sleep(pause)
                pause = min(2 * pause, DIAL_SECONDS)
                continue
            pause, cause = FIRST_PAUSE_SECONDS, ""
            log.info("peer router reached", extra={"address": address})
            hello = pb.ReplicaHello(router_id=self._settings.router_id, unix_ms=self._now_unix_ns() // MILLISECOND)
            link.send(pb.ReplicaMessage(hello=hello).SerializeToString())
            router = self._router
            self._tell_taken()  # the usage is sent before the levels, so that peers do not count it twice
            for message in (
                *encode_members(self._registry.registrations()),
                *self._left(),
                *([] if self._tuned is None else [encode_thresholds(self._tuned)]),
                *encode_prompts(router.prompts.latest(), (), self._private),
                *(encode_prompts(router.assumed_prompts(), (), self._private) if self._private else ()),
                *encode_sessions(router.sessions.latest()),
                *encode_answers(() if self._journal is None else self._journal.entries()),
                encode_bookings(router.booked()),
            ):
                link.send(message.SerializeToString())
            self.links[address] = link
            self._count_others()
            try:
                await link.over.wait()
            finally:
                del self.links[address]
                self._count_others()
                link.connection.abort()
            log.warning(
                "peer router lost", extra={"address": address, "cause": link.cause or "it closed the connection"}
            )
            # a router that accepts and closes at once must not be dialled without a pause
            await asyncio.sleep(DIAL_SECONDS)

    def _left(self) -> list[pb.ReplicaMessage]:
        left = {} if self._limits is None else self._limits.tenants.left(self._limits.clock.now())
        return [encode_left(left)] if left else []

    def took_elsewhere(self, taken: Mapping[str, TenantUsageDelta]) -> None:
        """Count the usage of tenants at another router."""
        if self._limits is not None:
            now = self._limits.clock.now()
            for name, each in taken.items():
                self._limits.tenants.took_elsewhere(name, each, now)

    def left_elsewhere(self, left: Mapping[str, BucketLevels]) -> None:
        """Lower the limits to what is left by another router's count."""
        if self._limits is not None:
            now = self._limits.clock.now()
            for name, each in left.items():
                self._limits.tenants.lower(name, each, now)

    def _accept(self, connection: FrameConnection) -> "_IncomingPeer":
        return _IncomingPeer(connection, self._router, self._registry, self, self._private)


class _PeerConnection:
    """Connection on which this router sends."""

    connection: FrameConnection

    def __init__(self, address: str, answers_again: Callable[[], None]) -> None:
        self.address = address
        self.over = asyncio.Event()
        self.cause = ""  # cause for which the connection ended
        self.deaf = False  # True if the peer left a question about limits unanswered
        self._answers_again = answers_again
        self._questions = 0
        # open questions by their number; each has a deadline
        self._asked: dict[int, asyncio.Future[pb.ReplicaAnswer]] = {}

    def accept(self, connection: FrameConnection) -> "_PeerConnection":  # noqa: ARG002 - a frame receiver's signature
        return self

    def send(self, payload: bytes) -> None:
        try:
            self.connection.send(payload)
        except SendBufferFull:
            self.over.set()

    def ask(self, question: pb.ReplicaQuestion) -> asyncio.Future[pb.ReplicaAnswer]:
        """Ask a question; the future is cancelled if no answer will come. A caller that gives up cancels it."""
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
        if answer.refused:
            raise ConnectionError(answer.refused)
        if self.deaf:
            self.deaf = False
            self._answers_again()
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():  # without an open question, the answer came too late
            asked.set_result(answer)

    def resumed(self) -> None:
        """Ignore it: nothing waits for the connection."""

    def lost(self, cause: Exception | None) -> None:
        self.cause = "" if cause is None else tls_failure_cause(cause, "replicas_credentials")
        self.over.set()
        for asked in list(self._asked.values()):
            asked.cancel()


class _IncomingPeer:
    """Connection on which another router sends."""

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
        self._silence = asyncio.get_running_loop().call_later(SILENCE_SECONDS, self._silent)

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
        self._silence.cancel()
        self._silence = asyncio.get_running_loop().call_later(SILENCE_SECONDS, self._silent)
        match kind:
            case "hello":
                self._router_id = message.hello.router_id
                # name under which the reservations of this connection are kept; it is unique for each connection
                self._replica = f"{self._router_id}@{id(self)}"
                self._router.hear(SessionsBound(clock=decode_instant(message.hello.unix_ms * MILLISECOND)))
            case "bookings":
                self._router.hear(PeerReserved(replica=self._replica, booked=decode_booked(message.bookings)))
                self._replicas.heard_of(self._router_id)
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
                told = message.prompts
                ours = told.private != 0 and told.private == self._private
                placed = tuple(decode_placed(each) for each in told.placed if each.number or ours)
                self._router.hear(PeerPlaced(replica=self._replica, placed=placed, over=tuple(told.over)))
            case "taken":
                self._replicas.took_elsewhere(decode_taken(message.taken))
            case "left":
                self._replicas.left_elsewhere(decode_left(message.left))
            case "answers":
                self._replicas.answered_elsewhere(map(decode_answer, message.answers.answers))
            case "tuned":
                self._replicas.tuned_elsewhere(decode_thresholds(message.tuned))
            case None:
                """Ignore messages of later versions."""

    def resumed(self) -> None:
        """Ignore it: nothing waits for the connection."""

    def lost(self, cause: Exception | None) -> None:
        self._silence.cancel()
        if self._replica:
            log.warning("peer router left", extra={"replica": self._replica, "cause": str(cause or "closed")})
            self._router.hear(PeerLeft(replica=self._replica))
        elif cause is not None:
            log.warning("peer router rejected", extra={"cause": str(cause)})

    def _silent(self) -> None:
        self._connection.abort(ConnectionError(f"it was silent for {SILENCE_SECONDS:g} s"))


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
    """Return True if the address is that of a process on this host, which shares the ports."""
    return address.startswith("unix:")
