"""Routers of one cluster that tell each other what they have booked, and which workers have registered.

Rules:

1. Each router dials every other one and speaks on that connection; what it hears comes on those that it accepted. All that
   comes back on a connection are answers to questions that were asked there.
2. What is told is a whole: all bookings as they are. Whatever was missed, the next message repairs it.
3. Bookings are told `SEND_INTERVAL_SECONDS` after they began to change, since many change at once, and anyway every `FULL_STATE_SECONDS`.
   The longer they wait, the more routers send their next requests to one and the same worker: told only after a quarter of
   the running requests has changed, it helps as little as not being told at all. What is as it was told is not told before
   that: to hear of another router is an event too, and two idle ones would go on answering each other.
4. A router that was not heard for `SILENCE_SECONDS`, or whose connection broke, has left, and its bookings with it.
5. A worker registers with one router, as often as its lease demands; that one passes it on, and so all know it. To who is
   reached later it tells whose leases have not ended, and what is left of them: they end when they would have anyway.
6. What an operator asks of one router is asked of all: why a request went where it went, which only the one knows that placed
   it, and, of the processes behind one port, their metrics. So is what a proxy says of a lease (`fleet.gateway.selection`).
   Who does not answer within `ANSWER_SECONDS` is left out.
7. Thresholds that were set are told to all, and to who is reached later: of what was set by several the latest counts.
8. Where sessions go is told with the bookings (`fleet.router.sessions`), and to who is reached later; so routers that could not
   reach each other agree on it as soon as they can.
9. So are prompts that workers are about to compute, and have not told of yet (`fleet.router.kv_index.peer_prompts`, rule 1): what is new since the
   last time, and to who is reached later what is under way. Likewise prompts for workers that tell nothing (there, rule 3), if their
   keys are made with something that other routers have as well (`fleet.frontend.openai.prompt_keys`): each message has its fingerprint, and
   who has another passes these over. A router of an older version passes all that over.
10. Over TCP routers prove that they are of the cluster before anything is said or heard (`fleet.net.streams.handshake`); Unix sockets are
    for their own user.
11. What tenants with limits took is told like bookings, unless Redis shares the limits; to who is reached later what is left is told
    (`fleet.router.tenants`, rule 4). Near a limit a router asks the others whether they have heard of all that, and waits for their answers for
    `SETTLE_SECONDS` at most. Who has not answered by then is neither waited for nor counted until it answers anything.
12. To who is reached later, bookings are told after all the rest. So a process that shares its ports knows when it has caught up with
    those beside it, and takes no connections before (`fleet.app.router`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Never, Protocol

from google.protobuf.message import DecodeError
from msgspec import Struct

from fleet.core.clock import MILLISECOND, Clock
from fleet.core.errors import ConfigurationRefused
from fleet.core.ids import Incarnation, RequestId, WorkerId
from fleet.core.system_clock import unix_milliseconds
from fleet.frontend.control.cluster import encode_explanation
from fleet.membership.messages import Deregister, Register, Registration
from fleet.net.streams.handshake import PROVE_SECONDS, StreamAuthenticator, dial
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
from fleet.router.kv_index.peer_prompts import PromptAnnouncements
from fleet.router.messages import PeerEvent, PeerLeft, PeerPlaced, PeerReserved, ReservationTotals, SessionsBound
from fleet.router.sessions import SessionTable
from fleet.router.settings.router import RouterSettings, Thresholds
from fleet.router.state.snapshot import Explanation
from fleet.router.tenants import BucketLevels, Tenants, TenantUsageDelta
from fleet.v1 import control_pb2, selection_pb2
from fleet.v1 import replica_pb2 as pb
from kvstore.errors import StoreNotStarted
from kvstore.net.frames import FrameConnection, SendBufferFull, open_server

log = logging.getLogger(__name__)

SEND_INTERVAL_SECONDS = 0.002
FULL_STATE_SECONDS = 0.5
SILENCE_SECONDS = 2.0
DIAL_SECONDS = 1.0  # for an answer, and between two attempts when there have been some
FIRST_PAUSE_SECONDS = 0.05  # after the first: processes of one host are started together
SETTLE_SECONDS = 0.25  # about a hundred times what an answer takes between idle processes
ANSWER_SECONDS = 1.0  # of a router to what an operator asks
MAX_MESSAGE_BYTES = 16 << 20  # a worker has about 50 bytes
MAX_WAITING_BYTES = 2 * MAX_MESSAGE_BYTES  # to be taken by a router that does not listen; then it is dialled anew


UNSECURED = "that router proves no secret: set replicas_credentials.secret_file there as well"


class PeerLimits(Struct, frozen=True):
    """Limits of tenants that routers keep together."""

    tenants: Tenants
    clock: Clock


class RouterApi(Protocol):
    """What is needed of `fleet.router.server.RouterServer`."""

    on_change: Callable[[], None] | None

    @property
    def sessions(self) -> SessionTable: ...

    @property
    def prompts(self) -> PromptAnnouncements: ...

    def booked(self) -> Mapping[WorkerId, ReservationTotals]: ...

    def hear(self, event: PeerEvent) -> None: ...

    def explain(self, request_id: RequestId) -> Explanation | None: ...

    def tune(self, thresholds: Thresholds) -> None: ...


class RegistryApi(Protocol):
    """What is needed of `fleet.membership.server.RegistryServer`."""

    def register(self, event: Register) -> object: ...

    def deregister(self, event: Deregister) -> None: ...

    def hear_of(self, event: Registration) -> None: ...

    def registrations(self) -> Sequence[Registration]: ...


class SelectionLeasesApi(Protocol):
    """What is needed of `fleet.gateway.selection.SelectionService`."""

    def reported(self, report: selection_pb2.ReportRequest) -> selection_pb2.ReportResponse | None: ...

    def released(self, release: selection_pb2.ReleaseRequest) -> bool: ...


class PeerRouters:
    """The other routers, as one of them knows them. `run` it."""

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
        now_unix_ms: Callable[[], int] = unix_milliseconds,
    ) -> None:
        """Nothing is dialled before `run`.

        Args:
            settings: Of this router; they name the others.
            router: This one.
            registry: Of workers.
            leases: That this router has given.
            metrics: All of this router, as Prometheus reads them.
            private: Fingerprint of the names of blocks that no worker knows; 0: no other router has these.
            limits: Of tenants, to be shared with the other routers; None: they are not, or in another way.
            now_unix_ms: Tells which of two thresholds was set last.

        Raises:
            ConfigurationRefused: `replicas_credentials` cannot be used, or leave `replicas_listen` open to strangers.
        """
        self._settings = settings
        self._own, self._calling = _identities(settings)
        self._router = router
        self._registry = registry
        self._leases = leases
        self._metrics = metrics
        self._private = private
        self._now_unix_ms = now_unix_ms
        self._tuned: PeerThresholds | None = None  # the latest
        self._links: dict[str, _PeerConnection] = {}  # by address
        self._timer: asyncio.TimerHandle | None = None
        self._told: Mapping[WorkerId, ReservationTotals] = {}
        self._heard_of: set[str] = set()
        self._caught_up = asyncio.Event()
        self._settling: asyncio.Event | None = None
        self._limits = limits
        router.on_change = self._changed
        if limits is not None:
            limits.tenants.on_taken = self._changed
            limits.tenants.settle_with_others = self._settle

    async def run(self) -> Never:
        """Speak and listen until cancelled.

        Raises:
            ConfigurationRefused: `replicas_listen` cannot be listened on.
        """
        self._router.hear(SessionsBound(clock=self._now_unix_ms() * MILLISECOND))
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
                while True:
                    await asyncio.sleep(FULL_STATE_SECONDS)
                    self._tell_news()
                    self._tell_taken()
                    self._tell_bookings()
        except StoreNotStarted as error:
            raise ConfigurationRefused(str(error)) from error
        raise AssertionError("its tasks never end")

    def registered(self, event: Register) -> None:
        """A worker has registered here."""
        self._send(pb.ReplicaMessage(registered=encode_registered(event)))

    def deregistered(self, event: Deregister) -> None:
        """A worker has given its membership up here."""
        message = control_pb2.DeregisterRequest(worker_id=event.worker_id, incarnation=event.incarnation)
        self._send(pb.ReplicaMessage(deregistered=message))

    async def explained(self, request_id: RequestId) -> control_pb2.ExplainResponse | None:
        """Why a request went where it went, which another router has placed; None if none knows it."""
        question = pb.ReplicaQuestion(explain=control_pb2.ExplainRequest(request_id=request_id))
        answer = await self._first(question)
        return None if answer is None else answer.explained

    async def reported(self, report: selection_pb2.ReportRequest) -> selection_pb2.ReportResponse | None:
        """What the router answers that has this lease; None if none has it."""
        answer = await self._first(pb.ReplicaQuestion(report=report))
        return None if answer is None else answer.reported

    async def released(self, release: selection_pb2.ReleaseRequest) -> None:
        """End a lease that another router has given."""
        await self._first(pb.ReplicaQuestion(release=release))

    @property
    def share_a_port(self) -> bool:
        """Whether some of them are processes beside this one."""
        return any(map(_is_beside, self._settings.replicas))

    def heard_of(self, router_id: str) -> None:
        """A router has told all that it tells at first."""
        if not self._caught_up.is_set():
            self._heard_of.add(router_id)
            if len(self._heard_of) >= sum(map(_is_beside, self._settings.replicas)):
                self._caught_up.set()

    async def caught_up(self) -> None:
        """When all processes beside this one have told what they tell at first; whoever waits sets a deadline: some may not be there."""
        if self.share_a_port:
            await self._caught_up.wait()

    async def metrics(self) -> dict[str, str]:
        """All of this process and of those beside it, by router."""
        beside = [link for address, link in self._links.items() if _is_beside(address)]
        answers = await self._ask(beside, pb.ReplicaQuestion(metrics=pb.MetricsRequest()))
        return {self._settings.router_id: self._metrics()} | {answer.router_id: answer.metrics for answer in answers}

    def tuned(self, thresholds: Thresholds) -> None:
        """An operator has set the thresholds of this router."""
        self._tuned = PeerThresholds(thresholds, self._now_unix_ms())
        self._send(encode_thresholds(self._tuned))

    def tuned_elsewhere(self, tuned: PeerThresholds) -> None:
        """An operator has set those of another one."""
        if self._tuned is None or tuned.at_unix_ms > self._tuned.at_unix_ms:
            self._tuned = tuned
            self._router.tune(tuned.thresholds)

    def answer(self, question: pb.ReplicaQuestion) -> pb.ReplicaAnswer:
        """What this router says to another one."""
        answer = pb.ReplicaAnswer(number=question.number, router_id=self._settings.router_id)
        match question.WhichOneof("question"):
            case "explain":
                explanation = self._router.explain(RequestId(question.explain.request_id))
                if explanation is not None:
                    answer.explained.CopyFrom(encode_explanation(explanation))
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
                """Of a later version."""
        return answer

    async def _ask(self, links: "list[_PeerConnection]", question: pb.ReplicaQuestion) -> list[pb.ReplicaAnswer]:
        """The answers of those who are asked and give one in time."""
        asked = [link.ask(question) for link in links]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=ANSWER_SECONDS)
        for each in late:
            each.cancel()
        return [each.result() for each in asked if each in done and not each.cancelled()]

    async def _first(self, question: pb.ReplicaQuestion) -> pb.ReplicaAnswer | None:
        """The answer of the first of all who knows something; None if nobody does in time."""
        asked = {link.ask(question) for link in self._links.values()}
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
        if self._timer is None and self._links:
            self._timer = asyncio.get_running_loop().call_later(SEND_INTERVAL_SECONDS, self._tell_changes)

    def _tell_changes(self) -> None:
        self._timer = None
        self._tell_news()  # first: what is booked for a prompt holds up nobody who has the same
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
        """Wait until the other routers have heard what tenants took here; whoever comes meanwhile waits with the first.

        Returns:
            Whether all that are counted have answered.
        """
        assert self._limits is not None
        if self._settling is not None:
            await self._settling.wait()
            return True  # not all that was taken is heard of by now, but the next round tells
        self._settling = settling = asyncio.Event()
        tenants = self._limits.tenants
        try:
            self._tell_taken()
            told = tenants.told()
            question = pb.ReplicaQuestion(settled=pb.SettledRequest())
            asked = {link.ask(question): link for link in self._links.values() if not link.deaf}
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
            self._limits.tenants.others = sum(not link.deaf for link in self._links.values())

    def _send(self, message: pb.ReplicaMessage) -> None:
        payload = message.SerializeToString()
        for link in list(self._links.values()):
            link.send(payload)

    async def _keep_up(self, address: str) -> Never:
        """Reach another router again and again."""
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
                if (why := _cause(error)) != cause:  # not at every attempt
                    cause = why
                    log.warning("another router cannot be reached", extra={"address": address, "cause": cause})
                await asyncio.sleep(pause)
                pause = min(2 * pause, DIAL_SECONDS)
                continue
            pause, cause = FIRST_PAUSE_SECONDS, ""
            log.info("reached another router", extra={"address": address})
            hello = pb.ReplicaHello(router_id=self._settings.router_id, unix_ms=self._now_unix_ms())
            link.send(pb.ReplicaMessage(hello=hello).SerializeToString())
            router = self._router
            self._tell_taken()  # so that it is not told to this one after what is left
            for message in (
                *encode_members(self._registry.registrations()),
                *self._left(),
                *([] if self._tuned is None else [encode_thresholds(self._tuned)]),
                *encode_prompts(router.prompts.latest(), (), self._private),
                *encode_sessions(router.sessions.latest()),
                encode_bookings(router.booked()),
            ):
                link.send(message.SerializeToString())
            self._links[address] = link
            self._count_others()
            try:
                await link.over.wait()
            finally:
                del self._links[address]
                self._count_others()
                link.connection.abort()
            log.warning("lost another router", extra={"address": address, "cause": link.cause or "it has closed"})
            await asyncio.sleep(DIAL_SECONDS)  # who takes connections and ends them is not dialled without a pause

    def _left(self) -> list[pb.ReplicaMessage]:
        left = {} if self._limits is None else self._limits.tenants.left(self._limits.clock.now())
        return [encode_left(left)] if left else []

    def took_elsewhere(self, taken: Mapping[str, TenantUsageDelta]) -> None:
        """Count what tenants took at another router."""
        if self._limits is not None:
            now = self._limits.clock.now()
            for name, each in taken.items():
                self._limits.tenants.took_elsewhere(name, each, now)

    def left_elsewhere(self, left: Mapping[str, BucketLevels]) -> None:
        """Hear what is left of limits by another router's count."""
        if self._limits is not None:
            now = self._limits.clock.now()
            for name, each in left.items():
                self._limits.tenants.lower(name, each, now)

    def _accept(self, connection: FrameConnection) -> "_IncomingPeer":
        return _IncomingPeer(connection, self._router, self._registry, self, self._private)


class _PeerConnection:
    """A connection on which this router speaks."""

    connection: FrameConnection

    def __init__(self, address: str, answers_again: Callable[[], None]) -> None:
        self.address = address
        self.over = asyncio.Event()
        self.cause = ""  # it is over
        self.deaf = False  # it left a question about limits unanswered
        self._answers_again = answers_again
        self._questions = 0
        self._asked: dict[int, asyncio.Future[pb.ReplicaAnswer]] = {}  # by number; each has a deadline

    def accept(self, connection: FrameConnection) -> "_PeerConnection":  # noqa: ARG002 - a frame receiver's signature
        return self

    def send(self, payload: bytes) -> None:
        try:
            self.connection.send(payload)
        except SendBufferFull:
            self.over.set()

    def ask(self, question: pb.ReplicaQuestion) -> asyncio.Future[pb.ReplicaAnswer]:
        """Done when the answer has come, cancelled when it will not come; who gives it up cancels it."""
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
            raise ConnectionError("what another router answers is no answer of ours") from error
        if answer.refused:
            raise ConnectionError(answer.refused)
        if self.deaf:
            self.deaf = False
            self._answers_again()
        asked = self._asked.get(answer.number)
        if asked is not None and not asked.done():  # else it comes too late
            asked.set_result(answer)

    def resumed(self) -> None:
        """Nothing waits for that."""

    def lost(self, cause: Exception | None) -> None:
        self.cause = "" if cause is None else tls_failure_cause(cause, "replicas_credentials")
        self.over.set()
        for asked in list(self._asked.values()):
            asked.cancel()


class _IncomingPeer:
    """A connection on which another router speaks."""

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
            raise ConnectionError("what another router says is no message of ours") from error
        kind = message.WhichOneof("message")
        if (kind == "hello") == bool(self._replica):
            raise ConnectionError("another router said hello never, or twice")
        self._silence.cancel()
        self._silence = asyncio.get_running_loop().call_later(SILENCE_SECONDS, self._silent)
        match kind:
            case "hello":
                self._router_id = message.hello.router_id
                self._replica = f"{self._router_id}@{id(self)}"  # a new connection is not the old one
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
            case "tuned":
                self._replicas.tuned_elsewhere(decode_thresholds(message.tuned))
            case None:
                """Of a later version."""

    def resumed(self) -> None:
        """Nothing waits for that."""

    def lost(self, cause: Exception | None) -> None:
        self._silence.cancel()
        if self._replica:
            log.warning("another router has left", extra={"replica": self._replica, "cause": str(cause or "closed")})
            self._router.hear(PeerLeft(replica=self._replica))
        elif cause is not None:
            log.warning("another router was refused", extra={"cause": str(cause)})

    def _silent(self) -> None:
        self._connection.abort(ConnectionError(f"it said nothing for {SILENCE_SECONDS:g} s"))


def _identities(settings: RouterSettings) -> tuple[StreamIdentity, StreamIdentity]:
    """Return what this router proves where it listens and where it calls.

    Raises:
        ConfigurationRefused: A file cannot be used, or an address is open to strangers.
    """
    own = worker_identity("replicas_credentials", settings.replicas_credentials)
    calling = router_identity("replicas_credentials", settings.replicas_credentials)
    if settings.replicas_listen:
        own.require("replicas_listen", settings.replicas_listen, on_loopback=True)
    for index, address in enumerate(settings.replicas):
        calling.require(f"replicas[{index}]", address, on_loopback=True)
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
    """Whether a router is another process of this host, and so behind the same ports."""
    return address.startswith("unix:")
