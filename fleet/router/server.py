"""The async shell of a router: hears workers and clients, lets the machine decide, does what it says.

Flow: front -> `submit` -> machine -> `Workers.start`; workers -> `hear` -> machine -> `RequestStream` -> front. Between
hearing an event and having performed its commands there is no `await`: nothing can come in between. What performing a
command brings about is heard after all commands that were given with it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Never, Protocol, Self, assert_never

from msgspec import structs

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import KvPhase, ModelCard
from fleet.core.work import Progress
from fleet.router.kv_index.peer_prompts import PromptAnnouncements
from fleet.router.machine import RouterMachine
from fleet.router.messages import (
    Arrived,
    CacheDriftChanged,
    CancelAttempt,
    Command,
    Complete,
    Dispatch,
    Emit,
    PeerEvent,
    Reject,
    RequestCancelled,
    ReservationTotals,
    RouterEvent,
    RouterTicked,
    StartedOver,
    ThresholdsChanged,
    Undelivered,
    WorkerEvent,
)
from fleet.router.placement.decision import Decision
from fleet.router.ports import Workers, WorkerUnreachable
from fleet.router.sessions import SessionTable
from fleet.router.settings.router import Thresholds
from fleet.router.state.snapshot import Explanation, RemotePrefillSnapshot, RouterSnapshot

log = logging.getLogger(__name__)


class RequestListener(Protocol):
    """Who hears how one request goes on; called between two turns of the event loop, and must not wait."""

    def put(self, item: Emit | StartedOver | Complete | RequestRejected) -> None:
        """Yield the events that the machine has for this client; nothing follows a `Complete` or a `RequestRejected`."""
        ...


class RequestStream:
    """One request: entering submits it, iterating yields its tokens and at last `Complete`, leaving early cancels it.

    Nothing is started before the context is entered, and nothing runs on after it is left. What waits here unread is
    bounded by the request's `max_tokens`. `kv` and `cached_tokens` may be read at any time, also after leaving: with the
    tokens they cover at least the work that these came from.
    """

    def __init__(self, arrived: Arrived, server: "RouterServer"):
        self._arrived = arrived
        self._server = server
        self.kv: tuple[KvPhase, ...] = ()  # where the blocks came from, as far as is known
        self.cached_tokens = 0  # of the prompt, likewise
        self._waiting: deque[Progress | StartedOver | Complete | RequestRejected] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._over = False

    async def __aenter__(self) -> Self:
        """Submit the request.

        Raises:
            Refused: It was not taken; leaving is not needed.
        """
        self._server.open(self._arrived, self)
        if self._waiting and isinstance(refused := self._waiting[0], RequestRejected):
            raise refused
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close(self._arrived.request_id, self)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Progress | StartedOver | Complete:
        """The next tokens, `StartedOver` if those before are void, or `Complete`, after which the iteration ends.

        Raises:
            Refused: The rest will not come.
        """
        while not self._waiting:
            if self._over:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        item = self._waiting.popleft()
        if isinstance(item, RequestRejected):
            raise item
        return item

    def put(self, item: Emit | StartedOver | Complete | RequestRejected) -> None:
        """For the server: what the machine has for this client."""
        if type(item) is Emit:
            self.kv, self.cached_tokens = item.kv, item.cached_tokens
            self._waiting.append(item.progress)
        elif isinstance(item, StartedOver):
            self._waiting.clear()
            self._waiting.append(item)
        else:
            if isinstance(item, Complete):
                self.kv, self.cached_tokens = item.kv, item.cached_tokens
            self._over = True
            self._waiting.append(item)
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class RouterServer:
    """One router. `run` it; `submit` requests from any number of fronts in the same event loop."""

    def __init__(self, machine: RouterMachine, workers: Workers, clock: Clock):
        self._machine = machine
        self._workers = workers
        self._clock = clock
        self._streams: dict[RequestId, RequestListener] = {}
        self._unheard: deque[RouterEvent] = deque()
        self._absorbing = False
        self._broken: Exception | None = None  # a bug, met in the middle of a decision
        self._broke = asyncio.Event()
        self.on_change: Callable[[], None] | None = None  # after each event, for who looks at `booked`
        self._closed = False  # nothing is taken any more
        self._idle = asyncio.Event()
        self._idle.set()
        self._armed: Nanos | None = None  # the instant that `_keep_time` waits for
        self._sooner = asyncio.Event()

    def submit(self, arrived: Arrived) -> RequestStream:
        """A request to be entered: ``async with server.submit(arrived) as progress: async for ...``."""
        return RequestStream(arrived, self)

    def hear(self, event: WorkerEvent | PeerEvent) -> None:
        """Take in at once what a worker or another router did."""
        self._absorb(event)

    def models(self) -> tuple[ModelCard, ...]:
        return self._machine.models()

    def status(self) -> RouterSnapshot:
        return self._machine.snapshot()

    def thresholds(self) -> Thresholds:
        return self._machine.thresholds()

    def remote_prefill(self) -> RemotePrefillSnapshot:
        return self._machine.remote_prefill()

    def tune(self, thresholds: Thresholds) -> None:
        """Set them from the next request on; those that wait are looked at again."""
        log.info("thresholds set", extra=structs.asdict(thresholds))
        self._absorb(ThresholdsChanged(thresholds=thresholds))

    def booked(self) -> dict[WorkerId, ReservationTotals]:
        return self._machine.booked()

    @property
    def sessions(self) -> SessionTable:
        return self._machine.sessions

    @property
    def prompts(self) -> PromptAnnouncements:
        return self._machine.prompts

    def decision(self, request_id: RequestId) -> Decision | None:
        return self._machine.decision(request_id)

    def address(self, worker_id: WorkerId) -> str:
        return self._machine.address(worker_id)

    def places(self, model: ModelName) -> int:
        return self._machine.places(model)

    def addresses(self) -> dict[WorkerId, str]:
        return self._machine.addresses()

    def explain(self, request_id: RequestId) -> Explanation | None:
        return self._machine.explain(request_id)

    async def run(self) -> Never:
        """Serve until cancelled; then every open stream is refused."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_time(), name="deadlines")
                await self._broke.wait()
                assert self._broken is not None
                raise self._broken
        finally:
            self._closed = True
            for request_id, stream in list(self._streams.items()):
                stream.put(_going_away())
                self.close(request_id, stream)
        raise AssertionError("time ended")

    async def drain(self, within: Nanos) -> int:
        """Take no new requests and wait for the running ones; returns how many were not over in time."""
        self._closed = True
        try:
            async with asyncio.timeout(within / SECOND):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests were not over in time", extra={"requests": len(self._streams)})
        return len(self._streams)

    def open(self, arrived: Arrived, stream: RequestListener) -> None:
        """Take a request whose listener hears of it until it is over, or until `close`.

        Raises:
            Refused: This router takes no requests, or already has one of this name.
        """
        if self._closed:
            raise _going_away()
        if arrived.request_id in self._streams:
            raise RequestRejected(
                Reason.INVALID_ARGUMENT, "request_id: a running request has the same", field="request_id"
            )
        self._streams[arrived.request_id] = stream
        self._idle.clear()
        self._absorb(arrived)

    def close(self, request_id: RequestId, stream: RequestListener) -> None:
        """Nobody listens any more; a request that is not over is cancelled everywhere."""
        if self._streams.get(request_id) is stream:
            self._forget(request_id)
            self._absorb(RequestCancelled(request_id=request_id))

    async def _keep_time(self) -> Never:
        """Tell the machine when a deadline has come."""
        while True:
            self._sooner.clear()
            self._armed = due = self._machine.next_deadline()
            try:
                async with asyncio.timeout(None if due is None else max(0, due - self._clock.now()) / SECOND):
                    await self._sooner.wait()
            except TimeoutError:
                self._absorb(RouterTicked())

    def _absorb(self, event: RouterEvent) -> None:
        """Let the machine decide and do what it says; what cannot be delivered is another event.

        A bug met on the way is raised, and ends `run`: nothing that the machine says can be trusted any more, and whoever
        calls this (a socket's reader, a client's call) can do nothing about it.
        """
        if self._broken is not None:
            return
        events = self._unheard
        events.append(event)
        if self._absorbing:  # performing a command has brought this about; the commands beside it go first
            return
        self._absorbing = True
        try:
            while events:
                for command in self._machine.handle(events.popleft(), self._clock.now()):
                    if (failure := self._perform(command)) is not None:
                        events.append(failure)
        except Exception as bug:
            self._broken, self._closed = bug, True
            self._broke.set()
            raise
        finally:
            self._absorbing = False
        if self.on_change is not None:
            self.on_change()
        due = self._machine.next_deadline()
        if due is not None and (self._armed is None or due < self._armed):
            self._sooner.set()

    def _perform(self, command: Command) -> Undelivered | None:
        # What every request has comes first, compared by type: a pattern of a class takes 70 ns, whether it fits or not.
        if type(command) is Emit:
            if (stream := self._streams.get(command.request_id)) is not None:
                stream.put(command)
            return None
        if type(command) is Dispatch:
            return self._dispatch(command)
        if type(command) is Complete:
            if (stream := self._streams.get(command.request_id)) is not None:
                self._forget(command.request_id)
                stream.put(command)
            return None
        match command:
            case CancelAttempt():
                self._workers.cancel(command.worker_id, command.request_id)
            case StartedOver():
                if (stream := self._streams.get(command.request_id)) is not None:
                    stream.put(command)
            case Reject():
                if (stream := self._streams.get(command.request_id)) is not None:
                    self._forget(command.request_id)
                    stream.put(_rejection(command))
            case CacheDriftChanged():
                _warn_of_drift(command)
            case _:
                assert_never(command)
        return None

    def _dispatch(self, command: Dispatch) -> Undelivered | None:
        try:
            self._workers.start(command.worker_id, command.start)
        except WorkerUnreachable as error:
            log.warning("worker unreachable", extra={"worker": error.worker_id, "request": command.start.request_id})
            return Undelivered(request_id=command.start.request_id, worker_id=command.worker_id)
        return None

    def _forget(self, request_id: RequestId) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()


def _warn_of_drift(command: CacheDriftChanged) -> None:
    told = {
        "worker": command.worker_id,
        "knowledge": command.knowledge,
        "precision": round(command.precision, 3),
        "recall": round(command.recall, 3),
    }
    if command.drifting:
        log.warning("what a worker has cached is not what is known of it", extra=told)
    else:
        log.info("what a worker has cached is what is known of it again", extra=told)


def _going_away() -> RequestRejected:
    return RequestRejected(
        Reason.DRAINING, "this router is going away; another will serve the request", retry_after_ms=1
    )


def _rejection(command: Reject) -> RequestRejected:
    return RequestRejected(
        command.reason,
        command.message,
        field=command.field,
        retry_after_ms=command.retry_after_ms,
        cause=command.cause,
    )
