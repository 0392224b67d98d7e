"""Router server: the async shell of a router. It passes events to the machine and performs the machine's commands.

Flow: frontend -> `submit` -> machine -> `Workers.start`; workers -> `hear` -> machine -> `RequestStream` -> frontend. Between an event and
its last command there is no `await`, so no other code runs in between. If a command causes an event, that event is processed after all
commands of the present event.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Never, Protocol, Self, assert_never

from msgspec import Struct, structs

from fleet.core.clock import SECOND, Clock, Nanos
from fleet.core.demand_reports import ModelDemand, SampledRequest, WorkerLoad
from fleet.core.errors import Reason, RequestRejected
from fleet.core.ids import ModelName, RequestId, WorkerId
from fleet.core.requests import KvPhase, ModelCard
from fleet.core.work import Progress
from fleet.router.kv_index.peer_prompts import PlacedPrompt, PromptAnnouncements
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
from fleet.router.state.live_requests import request_of
from fleet.router.state.snapshot import Explanation, RemotePrefillSnapshot, RouterSnapshot

log = logging.getLogger(__name__)


class RequestListener(Protocol):
    """Port: receives the commands of the router's machine for one request.

    It is called while the router processes an event, so it must not block.
    """

    def put(self, item: Emit | StartedOver | Complete | RequestRejected) -> None:
        """Receive a command of the machine, or the rejection of the request. Nothing follows a `Complete` or a `RequestRejected`."""
        ...


class AnswerKeyChanged(Struct, frozen=True):
    """Item of a `RequestStream`: an attempt has failed, and workers keep the tokens of the next attempt under another key."""

    answer_key: int


class RequestStream:
    """One request: entering the context submits it, iterating yields tokens and at last `Complete`, and leaving early cancels it.

    Nothing starts before the context is entered, and nothing runs after it is left. The request's `max_tokens` limits the number of items
    that wait to be read. `kv` and `cached_tokens` may be read at any time, also after the context was left. They cover at least the
    attempts whose tokens were read.
    """

    def __init__(self, arrived: Arrived, server: "RouterServer"):
        self._arrived = arrived
        self._server = server
        self.kv: tuple[KvPhase, ...] = ()  # the latest KV report of each attempt of the request so far
        self.cached_tokens = 0  # number of prompt tokens that no attempt so far has computed
        self._answer_key = arrived.answer_key
        self._waiting: deque[Progress | StartedOver | AnswerKeyChanged | Complete | RequestRejected] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._over = False

    async def __aenter__(self) -> Self:
        """Submit the request.

        Raises:
            RequestRejected: The request was not accepted. The context then counts as not entered.
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

    async def __anext__(self) -> Progress | StartedOver | AnswerKeyChanged | Complete:
        """Return the next tokens, or `StartedOver` if all tokens so far are void, or `Complete` as the last item.

        If `Arrived.answer_key` is set, `AnswerKeyChanged` comes before the first tokens that workers keep under another key.

        Raises:
            RequestRejected: The rest of the answer will not come.
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
        """Receive a command of the machine for this request, or its rejection. `StartedOver` removes the tokens that wait to be read."""
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

    def dispatched(self, answer_key: int) -> None:
        """Record the key under which the worker of a new attempt keeps the tokens of the answer. The worker has sent no tokens yet.

        If this is another key than before, the reader of the stream gets `AnswerKeyChanged`.
        """
        if answer_key != self._answer_key:
            self._answer_key = answer_key
            self._waiting.append(AnswerKeyChanged(answer_key))


class RouterServer:
    """The server of one router. `run` must be called once. Any number of frontends in the same event loop may `submit` requests."""

    def __init__(self, machine: RouterMachine, workers: Workers, clock: Clock):
        self._machine = machine
        self._workers = workers
        self._clock = clock
        self._streams: dict[RequestId, RequestListener] = {}
        self._events: deque[RouterEvent] = deque()
        self._processing = False
        # The exception that interrupted the processing of an event, and that `run` raises; None: there was none.
        self._bug: Exception | None = None
        self._bug_met = asyncio.Event()
        # Called after each event. `fleet.peers.routers` uses it to send changes to the peer routers. None: there are no peers.
        self.on_change: Callable[[], None] | None = None
        self._closed = False  # True if no more requests are accepted: the router drains, or `run` has ended
        self._idle = asyncio.Event()
        self._idle.set()
        self._armed: Nanos | None = None  # the deadline for which `_keep_time` waits; None: there is none
        self._sooner = asyncio.Event()

    def submit(self, arrived: Arrived) -> RequestStream:
        """Return a request as a context: ``async with server.submit(arrived) as progress: async for ...``."""
        return RequestStream(arrived, self)

    def hear(self, event: WorkerEvent | PeerEvent) -> None:
        """Process an event of a worker or of a peer router at once, or after the event that is being processed."""
        self._process(event)

    def models(self) -> tuple[ModelCard, ...]:
        return self._machine.models()

    def status(self) -> RouterSnapshot:
        return self._machine.snapshot()

    def cache_seconds(self) -> dict[WorkerId, float]:
        return self._machine.cache_seconds()

    def thresholds(self) -> Thresholds:
        return self._machine.thresholds()

    def remote_prefill(self) -> RemotePrefillSnapshot:
        return self._machine.remote_prefill()

    def tune(self, thresholds: Thresholds) -> None:
        """Set the thresholds for all later decisions, and try to place the queued requests again."""
        log.info("thresholds set", extra=structs.asdict(thresholds))
        self._process(ThresholdsChanged(thresholds=thresholds))

    def booked(self) -> dict[WorkerId, ReservationTotals]:
        return self._machine.booked()

    @property
    def sessions(self) -> SessionTable:
        return self._machine.sessions

    @property
    def prompts(self) -> PromptAnnouncements:
        return self._machine.prompts

    def assumed_prompts(self) -> list[PlacedPrompt]:
        """Return the latest prompts that workers without KV events are assumed to have cached. The latest one is last."""
        return self._machine.assumed_prompts(self._clock.now())

    def decision(self, request_id: RequestId) -> Decision | None:
        return self._machine.decision(request_id)

    def decisions(self, request_id: RequestId) -> tuple[Decision, ...]:
        return self._machine.decisions(request_id)

    def queue_seconds(self, request_id: RequestId) -> float | None:
        return self._machine.queue_seconds(request_id)

    def fingerprint(self, request_id: RequestId) -> str:
        return self._machine.fingerprint(request_id)

    def address(self, worker_id: WorkerId) -> str:
        return self._machine.address(worker_id)

    def places(self, model: ModelName) -> int:
        return self._machine.places(model)

    def addresses(self) -> dict[WorkerId, str]:
        return self._machine.addresses()

    def explain(self, request_id: RequestId) -> Explanation | None:
        return self._machine.explain(request_id)

    def demand(self) -> tuple[Nanos, tuple[ModelDemand, ...], tuple[WorkerLoad, ...]]:
        """Return the present instant, the demand of all models and the load of all workers."""
        now = self._clock.now()
        return now, self._machine.demand_by_model(now), self._machine.worker_loads()

    def recent_requests(self, after: int) -> tuple[int, tuple[SampledRequest, ...]]:
        """Return the number of the latest sampled request, and the sampled ones with numbers above `after` (`RouterDemand.recent`)."""
        return self._machine.demand.recent(after)

    def turned_away(self, model: ModelName) -> None:
        """Count a request that was refused before its prompt was read, because its model has no worker."""
        self._machine.demand.turned_away(model)

    async def run(self) -> Never:
        """Serve until the task is cancelled, or a bug interrupts the processing of an event, whose exception is then raised.

        At the end, reject all requests that have not ended.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_time(), name="deadlines")
                await self._bug_met.wait()
                assert self._bug is not None
                raise self._bug
        finally:
            self._closed = True
            self._reject_all()
        raise AssertionError("time ended")

    async def drain(self, within: Nanos) -> int:
        """Accept no new requests, wait for the running ones, and reject those that do not end in the time `within`.

        Return the number of rejected requests.
        """
        self._closed = True
        try:
            async with asyncio.timeout(within / SECOND):
                await self._idle.wait()
        except TimeoutError:
            log.warning("requests not finished before the drain timeout", extra={"requests": len(self._streams)})
        late = len(self._streams)
        # The requests are rejected before the streams of the workers end, because clients would otherwise get WORKER_LOST as the reason.
        self._reject_all()
        return late

    def _reject_all(self) -> None:
        for request_id, stream in list(self._streams.items()):
            stream.put(_going_away())
            self.close(request_id, stream)

    def open(self, arrived: Arrived, stream: RequestListener) -> None:
        """Submit a request. Its listener gets the commands for the request until the request is over, or until `close` is called.

        Raises:
            RequestRejected: This router takes no requests, or already has a request with this id.
        """
        if self._closed:
            raise _going_away()
        if arrived.request_id in self._streams:
            raise RequestRejected(
                Reason.INVALID_ARGUMENT,
                "request_id: a running request has the same id; use another one",
                field="request_id",
            )
        self._streams[arrived.request_id] = stream
        self._idle.clear()
        self._process(arrived)

    def close(self, request_id: RequestId, stream: RequestListener) -> None:
        """Remove the listener of a request. If the request is not over, cancel it in the router and on its workers."""
        if self._streams.get(request_id) is stream:
            self._forget(request_id)
            self._process(RequestCancelled(request_id=request_id))

    async def _keep_time(self) -> Never:
        """Send `RouterTicked` to the machine when a deadline has come."""
        while True:
            self._sooner.clear()
            self._armed = due = self._machine.next_deadline()
            try:
                async with asyncio.timeout(None if due is None else max(0, due - self._clock.now()) / SECOND):
                    await self._sooner.wait()
            except TimeoutError:
                self._process(RouterTicked())

    def _process(self, event: RouterEvent) -> None:
        """Let the machine process an event, and perform its commands. If a command cannot be performed, this causes another event.

        An exception from a bug is raised here and also ends `run`: the decisions of the machine can no longer be trusted, and the caller
        (the reader of a socket, or a client's call) cannot repair that. All later events are ignored.
        """
        if self._bug is not None:
            return
        events = self._events
        events.append(event)
        if self._processing:  # a command has caused this event, so it waits until all other commands are performed
            return
        self._processing = True
        try:
            while events:
                for command in self._machine.handle(events.popleft(), self._clock.now()):
                    if (failure := self._perform(command)) is not None:
                        events.append(failure)
        except Exception as bug:
            self._bug, self._closed = bug, True
            self._bug_met.set()
            raise
        finally:
            self._processing = False
        if self.on_change is not None:
            self.on_change()
        due = self._machine.next_deadline()
        if due is not None and (self._armed is None or due < self._armed):
            self._sooner.set()

    def _perform(self, command: Command) -> Undelivered | None:
        # The most frequent commands come first and are compared by type, because each class pattern takes 70 ns, whether it matches or not.
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
        start = command.start
        if start.answer_key and isinstance(stream := self._streams.get(request_of(start.request_id)), RequestStream):
            stream.dispatched(start.answer_key)
        try:
            self._workers.start(command.worker_id, start)
        except WorkerUnreachable as error:
            log.warning("worker unreachable", extra={"worker": error.worker_id, "request": command.start.request_id})
            return Undelivered(request_id=command.start.request_id, worker_id=command.worker_id)
        return None

    def _forget(self, request_id: RequestId) -> None:
        del self._streams[request_id]
        if not self._streams:
            self._idle.set()


def _warn_of_drift(command: CacheDriftChanged) -> None:
    context = {
        "worker": command.worker_id,
        "knowledge": command.knowledge,
        "precision": round(command.precision, 3),
        "recall": round(command.recall, 3),
    }
    if command.drifting:
        log.warning("worker cache drifts from the prefix index", extra=context)
    else:
        log.info("worker cache agrees with the prefix index again", extra=context)


def _going_away() -> RequestRejected:
    return RequestRejected(
        Reason.DRAINING, "this router is shutting down; another router will serve the request", retry_after_ms=1
    )


def _rejection(command: Reject) -> RequestRejected:
    return RequestRejected(
        command.reason,
        command.message,
        field=command.field,
        retry_after_ms=command.retry_after_ms,
        cause=command.cause,
    )
