"""Fake workers in memory, which a test controls; they pass tests/contract/router/test_workers_port.py."""

import asyncio
from collections.abc import Callable

from fleet.core.ids import RequestId, WorkerId
from fleet.core.work import (
    Cancel,
    Draining,
    KvEvents,
    LoadReport,
    Rejected,
    RouterMessage,
    Start,
    Step,
    WorkerDescription,
    WorkerMessage,
)
from fleet.router.messages import (
    AttemptRejected,
    KvChanged,
    LoadReported,
    WorkerDraining,
    WorkerEvent,
    WorkerJoined,
    WorkerLeft,
    WorkerStepped,
)
from fleet.router.ports import WorkerUnreachable
from tests.support.waiting import turns, until


class FakeWorker:
    """Plays one worker: records the messages of the router, and sends the messages that the test gives."""

    def __init__(self, description: WorkerDescription, workers: "FakeWorkers"):
        self.description = description
        self._workers = workers
        self.inbox: asyncio.Queue[RouterMessage] = asyncio.Queue()

    async def heard(self) -> RouterMessage:
        async with asyncio.timeout(60):
            return await self.inbox.get()

    async def say(self, message: WorkerMessage) -> None:
        worker_id = self.description.worker_id
        match message:
            case Step():
                event: WorkerEvent = WorkerStepped(worker_id=worker_id, progress=message.progress)
            case LoadReport():
                event = LoadReported(worker_id=worker_id, load=message)
            case KvEvents():
                event = KvChanged(worker_id=worker_id, events=message.events)
            case Rejected():
                event = AttemptRejected(worker_id=worker_id, rejected=message)
            case Draining():
                event = WorkerDraining(worker_id=worker_id)
            case _:
                raise AssertionError(message)
        self._workers.tell(event)

    async def leave(self) -> None:
        self._workers.drop(self.description.worker_id)


class FakeWorkers:
    """Implements `fleet.router.ports.Workers` without connections."""

    def __init__(self) -> None:
        self.hear: Callable[[WorkerEvent], None] | None = None  # the router's callback; events wait until it is set
        self._untold: list[WorkerEvent] = []
        self._up: dict[WorkerId, FakeWorker] = {}

    def join(self, description: WorkerDescription) -> FakeWorker:
        worker = FakeWorker(description, self)
        self._up[description.worker_id] = worker
        self.tell(WorkerJoined(description=description, address=f"fake:{description.worker_id}"))
        return worker

    def drop(self, worker_id: WorkerId) -> None:
        del self._up[worker_id]
        self.tell(WorkerLeft(worker_id=worker_id))

    def cut(self, worker_id: WorkerId) -> None:
        """Make the worker unreachable without an event, as if its connection had broken and nobody had noticed."""
        del self._up[worker_id]

    def tell(self, event: WorkerEvent) -> None:
        """Deliver the event in the next turn of the event loop, because the router may be calling this object now."""
        self._untold.append(event)
        asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        for event in untold:
            assert self.hear is not None
            self.hear(event)

    async def settle(self) -> None:
        """Wait until the router has received every event."""
        await until(lambda: not self._untold, between_seconds=0)
        await turns()

    def start(self, worker_id: WorkerId, start: Start) -> None:
        if (worker := self._up.get(worker_id)) is None:
            raise WorkerUnreachable(worker_id)
        worker.inbox.put_nowait(start)

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        if (worker := self._up.get(worker_id)) is not None:
            worker.inbox.put_nowait(Cancel(request_id=request_id))


class UnusedWorkers:
    """Implements `fleet.router.ports.Workers` for tests in which nothing may be sent to a worker."""

    def start(self, worker_id: WorkerId, start: Start) -> None:
        raise AssertionError("work was sent")

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        raise AssertionError("work was cancelled that was never sent")
