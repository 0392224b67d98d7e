"""Worker streams: keep one stream of frames to each member, and open it again after it has ended.

Rules:

1. The router dials each member and sends a greeting (`RouterHello`). The worker has joined when it has answered with
   its description; it sends a second description if it finds its store later. Once a worker has joined, the stream alone
   decides when it has left: when the stream breaks, when a message is invalid, or when KV events are missing.
   It has also left when nothing arrives for the heartbeat timeout, because workers report their load every second.
   `WorkerLeft` comes after all other events of the stream. Time in which the router process itself did not run is not
   counted as silence of a worker. If an engine hangs, its worker notices it (`workers.watchdog`) and ends the stream.
2. When a worker has left, the router dials it again, with growing pauses, as long as the worker is a member. Each
   stream begins with a cache dump, which replaces what was known before.
3. If a worker's lease ends, its stream stays open, because attempts may still run on the worker. The open stream also
   shows that the worker is alive; perhaps only the registry is unreachable. When this stream has ended, the worker is
   not dialled again.
4. Sending never waits. Unsent bytes are kept up to a limit. A message that starts an attempt, or asks for spans or
   kept answers, is not sent if it does not fit. The stream then stays open, because other attempts run on it. If another
   message does not fit, such as a cancellation, the stream counts as broken.
5. The streams report to the membership whether workers can be reached (`ReachabilityEvent`), so that no other process
   can register under the name of a worker that is alive.
6. The greeting and the description state the protocol versions of both peers. A worker without a common version does
   not join. It is shown as incompatible, and dialled again with pauses, because the worker or the router may be
   upgraded.
7. Each message is handled before the next one is read. So messages do not pile up in a slow router; it reads more
   slowly, and its workers have to wait until they can send.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Never, assert_never

from google.protobuf.message import DecodeError
from msgspec import structs

from fleet.backends.workers.answer_search import AnswerSearch
from fleet.backends.workers.store_watch import GrpcStoreWatch
from fleet.core.ids import RequestId, WorkerId
from fleet.core.system_clock import SystemClock
from fleet.core.work import (
    AnswersWanted,
    Cancel,
    Draining,
    Goodbye,
    KeepTrace,
    KeptAnswers,
    KvEvents,
    LoadReport,
    Rejected,
    RouterHello,
    RouterMessage,
    Start,
    Step,
    WorkerDescription,
    WorkerMessage,
)
from fleet.membership.compatibility import IncompatiblePeers, Link
from fleet.membership.messages import (
    MemberJoined,
    MemberLeft,
    MembershipChange,
    MemberUnreachable,
    ReachabilityEvent,
    WorkerStreamClosed,
    WorkerStreamOpened,
)
from fleet.net.grpc.options import MAX_MESSAGE_BYTES
from fleet.net.streams.authentication import dial
from fleet.net.streams.identity import router_identity, tls_failure_cause
from fleet.net.streams.proof import TO_WORKERS
from fleet.router.messages import (
    AttemptRejected,
    KvChanged,
    KvPathsChanged,
    LoadReported,
    StoreChanged,
    WorkerDraining,
    WorkerEvent,
    WorkerJoined,
    WorkerLeft,
    WorkerStepped,
)
from fleet.router.ports import WorkerUnreachable
from fleet.router.settings.router import RouterSettings
from fleet.v1 import worker_pb2 as pb
from fleet.wire.worker import MalformedMessage, decode_worker_message, encode_router_message
from kvstore.net.frames import FrameConnection, FrameTooLong, SendBufferFull
from kvstore.protocol.versions import UNSTATED, NoCommonProtocol, ProtocolRange, agree, own_protocols

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
SLICES = 4  # number of timers in a row that make up the heartbeat timeout (`_SilenceTimer`)
UNREAD_BYTES = MAX_MESSAGE_BYTES  # maximum number of unsent bytes per worker (rule 4)

Hear = Callable[[WorkerEvent], None]
"""Function that handles an event of a worker, and returns when the event is handled."""


class StreamBroken(Exception):
    """A stream to a worker cannot be used any more; the message states the reason.

    Attributes:
        absent: True if the worker counts as unreachable, because it could not be dialled or sent nothing for too long.
    """

    def __init__(self, why: str, *, absent: bool = False) -> None:
        super().__init__(why)
        self.absent = absent


class IncompatibleWorker(StreamBroken):
    """Error: the worker and the router have no protocol version in common."""


class _StreamTarget:
    """State of the stream that is kept open to one worker: the worker's registration, the connection, and the task."""

    def __init__(self, address: str, joined: MemberJoined | None):
        self.address = address
        # None: the worker has no registration; it is configured by its address, and may have any worker id.
        self.joined = joined
        self.wanted = True
        self.tried = False
        self.link: _WorkerConnection | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The worker's id, or its address if the worker is configured by its address."""
        return self.address if self.joined is None else self.joined.worker_id

    @property
    def description(self) -> WorkerDescription | None:
        """The worker's description; None before the worker has joined and after its stream has ended."""
        return None if self.link is None else self.link.description


class WorkerStreams:
    """Opens a stream to each worker, and opens it again when it ends. Implements `fleet.router.ports.Workers`."""

    def __init__(
        self,
        settings: RouterSettings,
        membership: AsyncIterator[MembershipChange] | None = None,
        addresses: Sequence[str] = (),
        *,
        reachability: Callable[[ReachabilityEvent], None] = lambda _: None,
        incompatible: IncompatiblePeers | None = None,
        accepts: Callable[[WorkerDescription], bool] = lambda _: True,
    ):
        """Store the arguments; `run` opens the connections.

        Args:
            settings: Timeouts, and the store node to watch.
            membership: Yields the arrivals and departures of members; None: there is no registry.
            addresses: Addresses of workers that are always members.
            reachability: Function that is called when a stream was opened or has ended, or a worker could not be reached.
            incompatible: Collects workers and store nodes without a common protocol version; None: they are only logged.
            accepts: Function that returns whether a worker may join. If a worker may not, its `WorkerJoined` is left out, and
                so the router ignores the worker's other events.

        Raises:
            ConfigurationRefused: A file of `worker_credentials` cannot be used.
        """
        self._identity = router_identity("worker_credentials", settings.worker_credentials)
        self._settings = settings
        self._membership = membership
        self._addresses = addresses
        self._reachability = reachability
        self._incompatible = incompatible or IncompatiblePeers(SystemClock())
        self._accepts = accepts
        self._members: dict[WorkerId, _StreamTarget] = {}
        self._links: dict[WorkerId, _WorkerConnection] = {}
        self.answers = AnswerSearch(self._ask)
        """Finds the tokens of answers that workers keep."""

    def start(self, worker_id: WorkerId, start: Start) -> None:
        if not self._send(worker_id, start):
            raise WorkerUnreachable(worker_id)

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        self._send(worker_id, Cancel(request_id=request_id))

    def keep_trace(self, worker_id: WorkerId, request: KeepTrace) -> None:
        """Ask a worker to export its spans of a request that head sampling left out.

        If the worker has left or reads too slowly, the spans are lost.
        """
        self._send(worker_id, request)

    def tried(self, worker_ids: Iterable[WorkerId]) -> bool:
        """Return True if the first try to connect to each of these workers has ended, with or without success."""
        members = self._members
        return all(worker_id in members and members[worker_id].tried for worker_id in worker_ids)

    async def run(self, hear: Hear) -> None:
        """Keep the streams open until cancelled.

        Args:
            hear: Function that gets the events of the workers, in order for each worker. It is never called from within
                `start` or `cancel`.
        """
        async with asyncio.TaskGroup() as tasks:
            if self._settings.store:

                async def tell(change: StoreChanged) -> None:
                    hear(change)

                watch = GrpcStoreWatch(self._settings.store, self._settings, self._incompatible)
                tasks.create_task(watch.run(tell), name="store watch")
            for address in self._addresses:
                self._follow(_StreamTarget(address, None), hear, tasks)
            if self._membership is not None:
                async for change in self._membership:
                    self._membership_changed(change, hear, tasks)

    def _membership_changed(self, change: MembershipChange, hear: Hear, tasks: asyncio.TaskGroup) -> None:
        match change:
            case MemberJoined():
                before = self._members.get(change.worker_id)
                if before is not None and _is(before, change):
                    # The stream to the process that the registry announces is open or being opened, so nothing has to be done.
                    before.wanted, before.joined = True, change
                    return
                member = _StreamTarget(change.address, change)
                self._members[change.worker_id] = member
                self._follow(member, hear, tasks, before)
            case MemberLeft():
                if (member_left := self._members.get(change.worker_id)) is not None:
                    member_left.wanted = False
                    if member_left.description is None:
                        self._give_up(member_left)
            case _:
                assert_never(change)

    def _follow(
        self, member: _StreamTarget, hear: Hear, tasks: asyncio.TaskGroup, before: _StreamTarget | None = None
    ) -> None:
        if before is not None:
            self._give_up(before)
        previous = None if before is None else before.task
        name = f"worker {member.address}"
        member.task = tasks.create_task(self._keep_up(member, previous, hear), name=name)

    def _give_up(self, member: _StreamTarget) -> None:
        member.wanted = False
        if member.task is not None:
            member.task.cancel()
        self._forget(member)

    def _forget(self, member: _StreamTarget) -> None:
        if member.joined is not None and self._members.get(member.joined.worker_id) is member:
            del self._members[member.joined.worker_id]

    async def _keep_up(self, member: _StreamTarget, previous: asyncio.Task[None] | None, hear: Hear) -> None:
        """Open a stream to a worker again whenever it has ended, as long as the worker is a member."""
        if previous is not None:
            # The event `WorkerLeft` of the previous stream must come before the first event of the new one.
            await asyncio.wait([previous])
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        cause = ""
        while member.wanted:
            began = loop.time()
            try:
                await self._converse(member, hear)
            except StreamBroken as broken:
                member.tried = True
                if isinstance(broken, IncompatibleWorker):
                    self._incompatible.refused(Link.WORKER, member.name, str(broken))
                if broken.absent and member.joined is not None:
                    joined = member.joined
                    self._reachability(MemberUnreachable(worker_id=joined.worker_id, incarnation=joined.incarnation))
                was_up = loop.time() - began > self._settings.max_reconnect_seconds
                if was_up or str(broken) != cause:  # log the same cause only once in a row
                    cause = str(broken)
                    log.warning("worker stream ended", extra={"address": member.address, "cause": cause})
                if was_up:
                    # The stream had been stable, so the pauses start again at the shortest one.
                    pause = FIRST_PAUSE_SECONDS
            if member.wanted:
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._settings.max_reconnect_seconds)
        self._forget(member)

    async def _converse(self, member: _StreamTarget, hear: Hear) -> Never:
        """Open one stream to a worker, and wait until it has ended.

        Raises:
            StreamBroken: The stream has ended.
        """

        def accept(connection: FrameConnection) -> _WorkerConnection:
            member.link = _WorkerConnection(
                connection,
                member,
                self._links,
                self._settings,
                hear,
                self._reachability,
                self._incompatible,
                self.answers,
                self._accepts,
            )
            return member.link

        try:
            async with asyncio.timeout(self._settings.connect_timeout_seconds):
                await dial(
                    member.address,
                    accept,
                    self._identity,
                    TO_WORKERS,
                    limit=MAX_MESSAGE_BYTES,
                    send_limit=UNREAD_BYTES,
                )
                assert member.link is not None
                await member.link.begun.wait()
                member.tried = True
            await member.link.ended.wait()
            if member.link.incompatible:
                raise IncompatibleWorker(member.link.why)
            raise StreamBroken(member.link.why, absent=member.link.silent)
        except TimeoutError:
            raise StreamBroken("no answer in time", absent=True) from None
        except (OSError, ValueError) as error:
            raise StreamBroken(str(error), absent=True) from error
        finally:
            if member.link is not None:
                member.link.end("the worker is not a member any more")
                member.link = None

    def _send(self, worker_id: WorkerId, message: RouterMessage) -> bool:
        link = self._links.get(worker_id)
        return link is not None and link.say(message)

    def _ask(self, wanted: AnswersWanted) -> list[WorkerId]:
        """Ask all workers that keep answers; return the workers to which the message was sent."""
        keepers = [
            worker_id
            for worker_id, link in self._links.items()
            if link.description is not None and link.description.keeps_answers
        ]
        return [worker_id for worker_id in keepers if self._send(worker_id, wanted)]


class _WorkerConnection:
    """Sends the router's messages over the connection to one worker, and reports the worker's events."""

    def __init__(
        self,
        connection: FrameConnection,
        member: _StreamTarget,
        links: "dict[WorkerId, _WorkerConnection]",
        settings: RouterSettings,
        hear: Hear,
        reachability: Callable[[ReachabilityEvent], None],
        incompatible: IncompatiblePeers,
        answers: AnswerSearch,
        accepts: Callable[[WorkerDescription], bool],
    ):
        self.description: WorkerDescription | None = None  # None until the worker has joined
        self.begun = asyncio.Event()  # set when the worker has joined, or the stream has ended
        self.ended = asyncio.Event()
        self.why = ""  # text that says why the stream ended; empty while the stream is open
        self.incompatible = False  # True if the stream ended because worker and router have no common protocol version
        self.silent = False  # True if the stream ended because nothing arrived for too long
        self._connection = connection
        self._member = member
        self._links = links
        self._hear = hear
        self._reachability = reachability
        self._incompatible = incompatible
        self._answers = answers
        self._accepts = accepts
        self._sequence = 0  # sequence number that the next message with KV events must have
        self._patience_seconds = settings.heartbeat_timeout_seconds
        self._silence: _SilenceTimer | None = None  # None until the worker has joined
        self._router_id = settings.router_id
        self.say(RouterHello(router_id=settings.router_id, protocols=own_protocols()))

    def say(self, message: RouterMessage) -> bool:
        """Send a message; return False if it is too long or the send buffer is full.

        If a message that must not be lost is not sent, the stream ends soon (rule 4). If the connection has just ended, the
        message is lost, and the result is True.
        """
        try:
            self._connection.send(encode_router_message(message).SerializeToString())
        except (SendBufferFull, FrameTooLong) as error:
            # If a `Start` was not sent, the caller starts the attempt on another worker. If a `KeepTrace` was not sent,
            # only spans are lost, and without `AnswersWanted`, an answer may not be found. But if a cancellation was not
            # sent, its attempt would go on, so the stream ends.
            if not isinstance(message, Start | KeepTrace | AnswersWanted):
                # End the stream later, because the router machine is in the middle of handling an event.
                asyncio.get_running_loop().call_soon(self.end, str(error))
            return False
        return True

    def end(self, why: str) -> None:
        """Close the stream and report its end; do nothing if it has ended already."""
        if self.ended.is_set():
            return
        self.why = why
        self.ended.set()
        self.begun.set()
        if self._silence is not None:
            self._silence.close()
        self._connection.abort()
        if self.description is not None:
            del self._links[self.description.worker_id]
            self._reachability(WorkerStreamClosed(worker_id=self.description.worker_id))
            self._answers.left(self.description.worker_id)
            self._hear(WorkerLeft(worker_id=self.description.worker_id))

    def _fell_silent(self, why: str) -> None:
        self.silent = True
        self.end(why)

    # The following functions are callbacks of the connection

    def received(self, payload: bytes) -> None:
        if self._silence is not None:
            self._silence.received()
        try:
            message = decode_worker_message(pb.WorkerMessage.FromString(payload))
            if self.description is None:
                self._begin(message)
            elif isinstance(message, KeptAnswers):
                self._answers.received(self.description.worker_id, message)
            elif message is not None:
                self._hear(self._event(message, self.description.worker_id))
        except (StreamBroken, MalformedMessage) as error:
            self.incompatible = isinstance(error, IncompatibleWorker)
            self.end(str(error))
        except DecodeError:
            self.end("it sent something that is not a message of fleet.v1")

    def resumed(self) -> None:
        """Do nothing, because sending never waits (rule 4)."""

    def lost(self, cause: Exception | None) -> None:
        self.end("it ended the stream" if cause is None else tls_failure_cause(cause, "worker_credentials"))

    def _begin(self, first: WorkerMessage | None) -> None:
        if isinstance(first, Goodbye):
            if first.protocols is not None:
                self._agree_with(self._member.name, first.protocols)
            raise StreamBroken(first.reason)
        if not isinstance(first, WorkerDescription):
            raise StreamBroken("its first message was not its description")
        joined = self._member.joined
        if joined is not None and first.worker_id != joined.worker_id:
            raise StreamBroken(f"it says that it is {first.worker_id}, not {joined.worker_id}")
        self._agree_with(first.worker_id, first.protocols or UNSTATED)
        if first.worker_id in self._links:
            raise StreamBroken(f"another worker is called {first.worker_id}; every worker needs an id of its own")
        if (task := _other_task(first, self._links.values())) is not None:
            raise StreamBroken(f"its model {first.model} has the task {_task(first)}, and other workers have {task}")
        self.description = first
        self._links[first.worker_id] = self
        self._silence = _SilenceTimer(self._patience_seconds, self._fell_silent)
        self._incompatible.accepted(Link.WORKER, self._member.name)
        self._reachability(WorkerStreamOpened(worker_id=first.worker_id, incarnation=first.incarnation))
        self.begun.set()
        log.info("worker connected", extra={"worker": first.worker_id, "address": self._member.address})
        if self._accepts(first):
            self._hear(WorkerJoined(description=first, address=self._member.address))

    def _agree_with(self, name: str, protocols: ProtocolRange) -> None:
        """Raise IncompatibleWorker if the worker speaks no version of the protocol that this router speaks."""
        try:
            agree(own_protocols(), protocols, own_name=f"router {self._router_id}", peer_name=f"worker {name[:100]}")
        except NoCommonProtocol as error:
            raise IncompatibleWorker(str(error)) from error

    def _event(self, message: WorkerMessage, worker_id: WorkerId) -> WorkerEvent:
        assert not isinstance(message, KeptAnswers)
        match message:
            case Step():
                return WorkerStepped(worker_id=worker_id, progress=message.progress)
            case LoadReport():
                return LoadReported(worker_id=worker_id, load=message)
            case KvEvents():
                if message.sequence != self._sequence:
                    raise StreamBroken(f"KV events {self._sequence} to {message.sequence - 1} are missing")
                self._sequence += 1
                return KvChanged(worker_id=worker_id, events=message.events)
            case Rejected():
                return AttemptRejected(worker_id=worker_id, rejected=message)
            case Draining():
                return WorkerDraining(worker_id=worker_id)
            case Goodbye():
                raise StreamBroken(message.reason)
            case WorkerDescription():
                return self._described_anew(message)
            case _:
                assert_never(message)

    def _described_anew(self, description: WorkerDescription) -> KvPathsChanged:
        """Handle a second description of the worker.

        Raises:
            StreamBroken: A field differs from the first description that does not depend on the worker's store.
        """
        before = self.description
        assert before is not None
        if structs.replace(description, kv_paths=before.kv_paths, store_id=before.store_id) != before:
            raise StreamBroken("its second description is that of another worker")
        self.description = description
        log.info(
            "worker description changed",
            extra={"worker": description.worker_id, "store": description.store_id, "kv_paths": description.kv_paths},
        )
        return KvPathsChanged(
            worker_id=description.worker_id, kv_paths=description.kv_paths, store_id=description.store_id
        )


class _SilenceTimer:
    """Calls `tell` when no message of a worker has arrived for `seconds`, at most one slice later.

    The time is divided into `SLICES` short timers in a row. If this process was stopped or got no CPU time, its timer
    fires before it reads the messages that arrived in the meantime. With short timers, such a pause counts as only one
    slice, however long it was.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._tell = tell
        self._quiet = 0  # number of slices in a row in which no message came
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(seconds / SLICES, self._tick)

    def received(self) -> None:
        self._quiet = 0

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._quiet += 1
        if self._quiet > SLICES:  # one more than `SLICES`, because the first slice began before the latest message
            self._tell(f"it said nothing for {self._seconds:g} s")
        else:
            self._timer = self._loop.call_later(self._seconds / SLICES, self._tick)


def _other_task(first: WorkerDescription, links: "Iterable[_WorkerConnection]") -> str | None:
    """Return the task of the connected workers with the same model as `first`, if it is not the task of `first`; else None."""
    for each in links:
        if (other := each.description) is not None and other.model == first.model and other.pooling != first.pooling:
            return _task(other)
    return None


def _task(description: WorkerDescription) -> str:
    model = description.pooling
    return "generate" if model is None else f"{model.task} (pairs: {model.pairs})"


def _is(member: _StreamTarget, joined: MemberJoined) -> bool:
    """Return True if the worker of this stream is the same process as the one that the registry announces."""
    if member.address != joined.address:
        return False
    if member.description is not None:
        return member.description.incarnation == joined.incarnation
    return member.joined == joined and member.wanted
