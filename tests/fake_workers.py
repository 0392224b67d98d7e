"""Workers in memory, played by a test; keeps the promises of tests/contract/test_workers_port.py."""

import asyncio
from collections.abc import AsyncIterator

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
from fleet.work import (
    Cancel,
    Description,
    Draining,
    KvEvents,
    Load,
    Rejected,
    RouterMessage,
    Start,
    Step,
    WorkerMessage,
)


class FakeWorker:
    """One worker: hears what the router says to it, and says what the test makes it say."""

    def __init__(self, description: Description, workers: "FakeWorkers"):
        self.description = description
        self._workers = workers
        self.inbox: asyncio.Queue[RouterMessage] = asyncio.Queue()

    async def heard(self) -> RouterMessage:
        async with asyncio.timeout(10):
            return await self.inbox.get()

    async def say(self, message: WorkerMessage) -> None:
        worker_id = self.description.worker_id
        match message:
            case Step():
                event: WorkerEvent = Stepped(worker_id=worker_id, progress=message.progress)
            case Load():
                event = LoadReported(worker_id=worker_id, load=message)
            case KvEvents():
                event = KvChanged(worker_id=worker_id, events=message.events)
            case Rejected():
                event = WorkRejected(worker_id=worker_id, rejected=message)
            case Draining():
                event = WorkerDraining(worker_id=worker_id)
            case _:
                raise AssertionError(message)
        self._workers.tell(event)

    async def leave(self) -> None:
        self._workers.drop(self.description.worker_id)


class FakeWorkers:
    """Implements `fleet.router.ports.Workers`."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[WorkerEvent] = asyncio.Queue()
        self._up: dict[WorkerId, FakeWorker] = {}

    def join(self, description: Description) -> FakeWorker:
        worker = FakeWorker(description, self)
        self._up[description.worker_id] = worker
        self.tell(WorkerJoined(description=description, address=f"fake:{description.worker_id}"))
        return worker

    def drop(self, worker_id: WorkerId) -> None:
        del self._up[worker_id]
        self.tell(WorkerLeft(worker_id=worker_id))

    def cut(self, worker_id: WorkerId) -> None:
        """As when a connection has just broken and nobody has noticed: unreachable, and no event yet."""
        del self._up[worker_id]

    def tell(self, event: WorkerEvent) -> None:
        self._events.put_nowait(event)

    async def settle(self) -> None:
        """Wait until the router has heard everything."""
        async with asyncio.timeout(10):
            while not self._events.empty():
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def events(self) -> AsyncIterator[WorkerEvent]:
        while True:
            yield await self._events.get()

    def start(self, worker_id: WorkerId, start: Start) -> None:
        if (worker := self._up.get(worker_id)) is None:
            raise WorkerUnreachable(worker_id)
        worker.inbox.put_nowait(start)

    def cancel(self, worker_id: WorkerId, request_id: RequestId) -> None:
        if (worker := self._up.get(worker_id)) is not None:
            worker.inbox.put_nowait(Cancel(request_id=request_id))
