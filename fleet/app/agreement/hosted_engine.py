"""Hosted engine: a simulated worker behind the engine port, so that production's worker server can host it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

from msgspec import structs

from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish
from fleet.core.work import KvEvent, KvRemoved, KvStored, LoadReport, Progress, Start, WorkerDescription
from fleet.router.messages import CacheAssumed, CancelAttempt, Dispatch, WorkerStepped
from fleet.sim.cluster.block_names import hashes_of
from workers.ports import EngineFacts, EngineOutput, Pulse

Item = TypeVar("Item")


class HostedEngine:
    """Connects a simulated worker to production's worker server. Implements the engine port (`workers.ports.Engine`)."""

    def __init__(
        self,
        description: WorkerDescription,
        execute: Callable[[Dispatch | CancelAttempt], None],
        load: Callable[[], LoadReport],
    ):
        """Create an engine that is ready. It passes the worker server's commands to `execute`; `load` returns the load report."""
        self.facts = EngineFacts(
            name=description.engine,
            model=description.model,
            block_tokens=description.block_tokens,
            max_model_len=description.max_model_len,
            kv_blocks=description.kv_blocks,
            max_running=description.max_running,
            fingerprint=description.fingerprint,
            kv_paths=description.kv_paths,
            store_id=description.store_id,
            kv=description.kv,
        )
        self.load = load
        self._id = description.worker_id
        self._execute = execute
        self._held: set[RequestId] = set()
        self._outputs = _ItemQueue[EngineOutput]()
        self._changes = _ItemQueue[Sequence[KvEvent]]()

    # Methods of the engine port.

    def submit(self, start: Start) -> None:
        self._held.add(start.request_id)
        self._execute(Dispatch(worker_id=self._id, start=start))

    def cancel(self, request_id: RequestId) -> None:
        if request_id in self._held:
            self._held.remove(request_id)
            self._execute(CancelAttempt(worker_id=self._id, request_id=request_id))
            self._outputs.put([Progress(request_id=request_id, finish=Finish.CANCELLED)])

    def outputs(self) -> AsyncIterator[EngineOutput]:
        return self._outputs.items()

    def kv_events(self) -> AsyncIterator[Sequence[KvEvent]]:
        return self._changes.items()

    def pulses(self) -> Sequence[Pulse]:
        """Return no pulses: simulated engines never hang."""
        return ()

    def traced(self) -> bool:
        return False

    def kill(self) -> None:
        raise AssertionError("an engine without pulses is never killed as hanging")

    @property
    def lent(self) -> int:
        """Number of handoff leases that a drain of the worker has to wait for. It is always 0 for this engine."""
        return 0

    # Methods that the simulated world calls.

    def stepped(self, event: WorkerStepped) -> None:
        self._held.difference_update([each.request_id for each in event.progress if each.finish is not None])
        self._outputs.put([_without_worker(each) for each in event.progress])

    def cache_changed(self, event: CacheAssumed) -> None:
        changes: list[KvEvent] = []
        if event.removed:  # removed blocks first, because they make room for the stored ones
            changes.append(KvRemoved(hashes_of(event.removed)))
        if event.stored:
            changes.append(KvStored(hashes_of(event.stored)))
        self._changes.put(changes)


class _ItemQueue(Generic[Item]):
    """Queue between the simulated world and one consumer task.

    The queue stays short, because virtual time stands still until the consumer has taken all items.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._available = asyncio.Event()

    def put(self, item: Item) -> None:
        self._items.append(item)
        self._available.set()

    async def items(self) -> AsyncIterator[Item]:
        while True:
            while self._items:
                yield self._items.popleft()
            self._available.clear()
            await self._available.wait()


def _without_worker(progress: Progress) -> Progress:
    """Return the progress without the worker's name in its handoff, because a real engine does not know that name."""
    if progress.handoff is None:
        return progress
    return structs.replace(progress, handoff=structs.replace(progress.handoff, prefill_worker=WorkerId("")))
