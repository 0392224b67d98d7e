"""All workers of a cluster over gRPC: one stream to each member, kept up while it is one.

Rules:

1. A member is dialled, greeted, and has joined when it has described itself. From then on its stream is the truth: it
   has left when the stream breaks, when nothing came for the heartbeat timeout (workers report their load each second),
   or when what came cannot be understood or has a gap in its KV events. `WorkerLeft` follows everything that it said.
   While this process stands still it hears nothing, and that is no worker's silence.
2. Then it is dialled again, with growing pauses, as long as it is a member. The dump with which a stream begins repairs
   what was missed.
3. A member that leaves the registry keeps its stream: work may still run there, and a stream that is alive says more
   than a registry that cannot be reached. It is not dialled again once the stream has ended.
4. Sending never waits: each stream has a bounded queue, and one that is full counts as broken. Hearing waits: when the
   router does not keep up, streams are not read, and gRPC's flow control slows the workers down.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Never, assert_never

import grpc

from fleet.adapters.grpc_options import SEPARATE_CHANNEL_OPTIONS
from fleet.adapters.grpc_store_watch import GrpcStoreWatch
from fleet.control.messages import MemberJoined, MemberLeft, MembershipChange
from fleet.ids import RequestId, WorkerId
from fleet.router.messages import (
    KvChanged,
    LoadReported,
    Stepped,
    WorkerDraining,
    WorkerEvent,
    WorkerJoined,
    WorkerLeft,
    WorkRejected,
)
from fleet.router.ports import WorkerUnreachable
from fleet.router.settings import RouterSettings
from fleet.v1 import worker_pb2 as pb
from fleet.v1 import worker_pb2_grpc as pb_grpc
from fleet.wire.work import Malformed, decode_worker_message, encode_router_message
from fleet.work import (
    Cancel,
    Description,
    Draining,
    Hello,
    KvEvents,
    Load,
    Rejected,
    RouterMessage,
    Start,
    Step,
    WorkerMessage,
)

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.05
SLICES = 4  # that the heartbeat timeout is counted in
EVENTS_WAITING = 4096  # for the router to take, all workers together; then streams are not read
SENDS_WAITING = 4096  # for one stream; a worker that far behind is lost anyway

_Call = grpc.aio.StreamStreamCall[pb.RouterMessage, pb.WorkerMessage]


class StreamBroken(Exception):
    """A stream to a worker is of no use any more; the message says why."""


class _Member:
    """A worker that is to be reached."""

    def __init__(self, address: str, joined: MemberJoined | None):
        self.address = address
        self.joined = joined  # None: configured by address, called what it calls itself
        self.wanted = True
        self.link: _Link | None = None
        self.task: asyncio.Task[None] | None = None


class _Link:
    """An open stream to a worker that has described itself."""

    def __init__(self, description: Description):
        self.description = description
        self.sends: asyncio.Queue[RouterMessage] = asyncio.Queue(SENDS_WAITING)
        self.sequence = 0  # of the next KV events
        self.overflowed = False
        self.hearing: _Hearing | None = None  # while it is read


class GrpcWorkers:
    """Implements `fleet.router.ports.Workers`. `run` it, beside the router that consumes `events`."""

    def __init__(
        self,
        settings: RouterSettings,
        membership: AsyncIterator[MembershipChange] | None = None,
        addresses: Sequence[str] = (),
    ):
        """Nothing is dialled before `run`.

        Args:
            settings: Deadlines, and the store node to watch.
            membership: Members as the registry knows them.
            addresses: Workers that are members for ever.
        """
        self._settings = settings
        self._membership = membership
        self._addresses = addresses
        self._members: dict[WorkerId, _Member] = {}
        self._links: dict[WorkerId, _Link] = {}
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()  # bounded by `_room`
        self._room = asyncio.Event()
        self._room.set()

    async def events(self) -> AsyncIterator[WorkerEvent]:
        while True:
            event = await self._events.get()
            if self._events.qsize() < EVENTS_WAITING:
                self._room.set()
            yield event

    def start(self, worker_id: WorkerId, start: Start) -> None:
        if not self._send(worker_id, start):
            raise WorkerUnreachable(worker_id)

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        self._send(worker_id, Cancel(request_id=request_id))

    async def run(self) -> None:
        """Keep streams up until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._settings.store:
                watch = GrpcStoreWatch(self._settings.store, self._settings)
                tasks.create_task(watch.run(self._put), name="store watch")
            for address in self._addresses:
                self._follow(_Member(address, None), tasks)
            if self._membership is not None:
                async for change in self._membership:
                    self._membership_changed(change, tasks)

    def _membership_changed(self, change: MembershipChange, tasks: asyncio.TaskGroup) -> None:
        match change:
            case MemberJoined():
                before = self._members.get(change.worker_id)
                if before is not None and _is(before, change):
                    before.wanted, before.joined = True, change  # the registry knows what the stream never doubted
                    return
                member = _Member(change.address, change)
                self._members[change.worker_id] = member
                self._follow(member, tasks, before)
            case MemberLeft():
                if (member_left := self._members.get(change.worker_id)) is not None:
                    member_left.wanted = False
                    if member_left.link is None:
                        self._give_up(member_left)
            case _:
                assert_never(change)

    def _follow(self, member: _Member, tasks: asyncio.TaskGroup, before: _Member | None = None) -> None:
        if before is not None:
            self._give_up(before)
        previous = None if before is None else before.task
        name = f"worker {member.address}"
        member.task = tasks.create_task(self._keep_up(member, previous, tasks), name=name)

    def _give_up(self, member: _Member) -> None:
        member.wanted = False
        if member.task is not None:
            member.task.cancel()
        self._forget(member)

    def _forget(self, member: _Member) -> None:
        if member.joined is not None and self._members.get(member.joined.worker_id) is member:
            del self._members[member.joined.worker_id]

    async def _keep_up(self, member: _Member, previous: asyncio.Task[None] | None, tasks: asyncio.TaskGroup) -> None:
        """Reach a member again and again, until it is wanted no more."""
        if previous is not None:
            await asyncio.wait([previous])  # its last word is `WorkerLeft`; ours must not come before it
        loop = asyncio.get_running_loop()
        pause = FIRST_PAUSE_SECONDS
        cause = ""
        while member.wanted:
            began = loop.time()
            try:
                await self._converse(member, tasks)
            except StreamBroken as broken:
                was_up = loop.time() - began > self._settings.max_reconnect_seconds
                if was_up or str(broken) != cause:  # not at every attempt
                    cause = str(broken)
                    log.warning("worker stream ended", extra={"address": member.address, "cause": cause})
                if was_up:
                    pause = FIRST_PAUSE_SECONDS  # no reason to be wary
            if member.wanted:
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._settings.max_reconnect_seconds)
        self._forget(member)

    async def _converse(self, member: _Member, tasks: asyncio.TaskGroup) -> Never:
        """One stream, from dialling to its end, which raises `StreamBroken`."""
        async with grpc.aio.insecure_channel(member.address, options=SEPARATE_CHANNEL_OPTIONS) as channel:
            call: _Call = pb_grpc.WorkerStub(channel).Serve()
            description = await self._greet(call, member)
            await self._relay(call, member, description, tasks)

    async def _greet(self, call: _Call, member: _Member) -> Description:
        try:
            async with asyncio.timeout(self._settings.connect_timeout_seconds):
                await call.write(encode_router_message(Hello(router_id=self._settings.router_id)))
                first = _understood(await call.read())
        except TimeoutError:
            raise StreamBroken("it did not answer in time") from None
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StreamBroken(_cause(error)) from error
        if not isinstance(first, Description):
            raise StreamBroken("its first message was not its description")
        if member.joined is not None and first.worker_id != member.joined.worker_id:
            raise StreamBroken(f"it says that it is {first.worker_id}, not {member.joined.worker_id}")
        if first.worker_id in self._links:
            raise StreamBroken(f"another worker is called {first.worker_id}; every worker needs an id of its own")
        return first

    async def _relay(self, call: _Call, member: _Member, description: Description, tasks: asyncio.TaskGroup) -> Never:
        """Both directions, until the stream breaks, which raises `StreamBroken`."""
        worker_id = description.worker_id
        link = _Link(description)
        self._links[worker_id] = member.link = link  # no await since `_greet` has looked
        self._events.put_nowait(WorkerJoined(description=description, address=member.address))
        log.info("worker connected", extra={"worker": worker_id, "address": member.address})
        writer = tasks.create_task(_write(call, link), name=f"write {worker_id}")
        try:
            await self._read(call, link)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise StreamBroken(_cause(error)) from error
        finally:
            writer.cancel()
            del self._links[worker_id]
            member.link = None
            self._events.put_nowait(WorkerLeft(worker_id=worker_id))  # at most one a stream: needs no room

    async def _read(self, call: _Call, link: _Link) -> Never:
        seconds = self._settings.heartbeat_timeout_seconds
        try:
            async with asyncio.timeout(None) as silence:
                hearing = link.hearing = _Hearing(silence, seconds)
                try:
                    while True:
                        if not self._room.is_set():
                            hearing.listening = False  # then silence means nothing
                            await self._room.wait()
                            hearing.listening = True
                        message = _understood(await call.read())
                        hearing.heard()
                        if message is not None:
                            self._put_now(_event(message, link))
                finally:
                    link.hearing = None
                    hearing.close()
        except TimeoutError:
            if link.overflowed:
                raise StreamBroken(f"it has not taken the last {SENDS_WAITING} messages") from None
            raise StreamBroken(f"it said nothing for {seconds:g} s") from None

    def _put_now(self, event: WorkerEvent) -> None:
        self._events.put_nowait(event)
        if self._events.qsize() >= EVENTS_WAITING:
            self._room.clear()

    async def _put(self, event: WorkerEvent) -> None:
        await self._room.wait()
        self._put_now(event)

    def _send(self, worker_id: WorkerId, message: RouterMessage) -> bool:
        link = self._links.get(worker_id)
        if link is None:
            return False
        try:
            link.sends.put_nowait(message)
        except asyncio.QueueFull:  # a lost cancellation would leave work running that nobody waits for
            link.overflowed = True
            if link.hearing is not None:
                link.hearing.end()
            return False
        return True


class _Hearing:
    """Ends a wait when nothing was heard for so long.

    The time is counted in slices, since a process that stood still (was stopped or starved) finds its timer due before it
    reads what came meanwhile. However long it stood still, that is one slice.
    """

    def __init__(self, silence: asyncio.Timeout, seconds: float) -> None:
        self.listening = True
        self._silence = silence
        self._slice_seconds = seconds / SLICES
        self._quiet = 0  # slices
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._slice_seconds, self._tick)

    def heard(self) -> None:
        self._quiet = 0

    def end(self) -> None:
        """End the wait now."""
        self._timer.cancel()
        if not self._silence.expired():
            self._silence.reschedule(self._loop.time())

    def close(self) -> None:
        self._timer.cancel()

    def _tick(self) -> None:
        self._quiet = self._quiet + 1 if self.listening else 0
        if self._quiet > SLICES:  # the first one had begun before the latest message
            self.end()
        else:
            self._timer = self._loop.call_later(self._slice_seconds, self._tick)


async def _write(call: _Call, link: _Link) -> None:
    """Send what is queued; a stream that breaks ends this, and whoever reads hears why."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            message = await link.sends.get()
            await call.write(encode_router_message(message))


def _is(member: _Member, joined: MemberJoined) -> bool:
    """Whether a member that we have a stream to, or are dialling, is the very one that the registry announces."""
    if member.address != joined.address:
        return False
    if member.link is not None:
        return member.link.description.incarnation == joined.incarnation
    return member.joined == joined and member.wanted


def _understood(message: object) -> WorkerMessage | None:
    if message is grpc.aio.EOF:
        raise StreamBroken("it ended the stream")
    assert isinstance(message, pb.WorkerMessage)
    try:
        return decode_worker_message(message)
    except Malformed as error:
        raise StreamBroken(str(error)) from error


def _event(message: WorkerMessage, link: _Link) -> WorkerEvent:
    worker_id = link.description.worker_id
    match message:
        case Step():
            return Stepped(worker_id=worker_id, progress=message.progress)
        case Load():
            return LoadReported(worker_id=worker_id, load=message)
        case KvEvents():
            if message.sequence != link.sequence:
                raise StreamBroken(f"KV events {link.sequence} to {message.sequence - 1} are missing")
            link.sequence += 1
            return KvChanged(worker_id=worker_id, events=message.events)
        case Rejected():
            return WorkRejected(worker_id=worker_id, rejected=message)
        case Draining():
            return WorkerDraining(worker_id=worker_id)
        case Description():
            raise StreamBroken("it described itself twice")
        case _:
            assert_never(message)


def _cause(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error)
