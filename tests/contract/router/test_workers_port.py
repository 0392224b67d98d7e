"""Contract tests of the `Workers` port, for real streams and for the fake one."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

import pytest

from fleet.core.errors import Reason
from fleet.core.ids import RequestId, WorkerId
from fleet.core.requests import Finish, Sampling
from fleet.core.roles import KvPath, Phase
from fleet.core.work import (
    Cancel,
    Draining,
    KvCleared,
    KvEvents,
    KvRemoved,
    KvStored,
    Rejected,
    RouterMessage,
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
from fleet.router.ports import Workers, WorkerUnreachable
from kvstore.protocol.versions import ProtocolRange
from tests.support.backends.stream_workers import EventInbox, a_stream_setup
from tests.support.builders import a_description, a_handoff, a_kv_report, a_load, a_start, some_progress
from tests.support.router.fake_workers import FakeWorkers


class PlayedWorker(Protocol):
    """A worker played by the test."""

    description: WorkerDescription

    async def heard(self) -> RouterMessage: ...
    async def say(self, message: WorkerMessage) -> None: ...
    async def leave(self) -> None: ...


class WorkersSetup(Protocol):
    workers: Workers
    join: Callable[[WorkerDescription], Awaitable[PlayedWorker]]
    take: Callable[[], Awaitable[WorkerEvent]]


class FakeWorkersSetup:
    def __init__(self) -> None:
        self.workers = FakeWorkers()
        self.workers.hear = self._heard = EventInbox()

    async def take(self) -> WorkerEvent:
        return await self._heard.take()

    async def join(self, description: WorkerDescription) -> PlayedWorker:
        return self.workers.join(description)


@asynccontextmanager
async def a_fake_workers_setup() -> AsyncIterator[FakeWorkersSetup]:
    yield FakeWorkersSetup()


every_setup = pytest.mark.parametrize("a_world", [a_fake_workers_setup, a_stream_setup], ids=["fake", "streams"])


@every_setup
async def test_a_worker_joins_with_its_description(a_world):
    async with a_world() as world:
        description = a_description(
            worker_id="w7",
            incarnation="abc",
            kv_paths=tuple(KvPath),
            max_running=3,
            protocols=ProtocolRange(lowest=1, highest=1),
        )

        await world.join(description)

        joined = await world.take()
        assert isinstance(joined, WorkerJoined)
        assert joined.description == description
        assert joined.address


@every_setup
async def test_attempt_reaches_the_worker_unchanged(a_world):
    async with a_world() as world:
        peer = await world.join(a_description())
        await world.take()
        start = a_start(
            phase=Phase.DECODE,
            tokens=70,
            sampling=Sampling(max_tokens=7, temperature=0.5, seed=3, logprobs=2, stop_token_ids=(9, 8)),
            salt=b"s" * 32,
            handoff=a_handoff(num_tokens=70, params=b'{"a": 1}'),
            priority=-5,
            timeout_ms=1234,
        )

        world.workers.start(WorkerId("w1"), start)
        world.workers.cancel(WorkerId("w1"), start.request_id)

        assert await peer.heard() == start
        assert await peer.heard() == Cancel(request_id=start.request_id)


@every_setup
async def test_worker_messages_arrive_in_order(a_world):
    async with a_world() as world:
        peer = await world.join(a_description())
        await world.take()
        worker_id = WorkerId("w1")
        progress = (
            some_progress(1, 2, request_id="a"),
            some_progress(3, request_id="b", finish=Finish.LENGTH, kv=a_kv_report(64), handoff=a_handoff()),
        )
        rejected = Rejected(request_id=RequestId("c"), reason=Reason.TOO_LARGE, message="no", field="tokens")
        changes = (KvStored((b"1" * 16, b"2" * 16)), KvRemoved((b"1" * 16,)), KvCleared())
        load = a_load(running=2, waiting=1, kv_blocks_used=30)

        await peer.say(KvEvents(sequence=0, events=changes))
        await peer.say(Step(progress=progress))
        await peer.say(load)
        await peer.say(rejected)
        await peer.say(Draining())
        await peer.say(KvEvents(sequence=1, events=changes[:1]))

        assert [await world.take() for _ in range(6)] == [
            KvChanged(worker_id=worker_id, events=changes),
            WorkerStepped(worker_id=worker_id, progress=progress),
            LoadReported(worker_id=worker_id, load=load),
            AttemptRejected(worker_id=worker_id, rejected=rejected),
            WorkerDraining(worker_id=worker_id),
            KvChanged(worker_id=worker_id, events=changes[:1]),
        ]


@every_setup
async def test_worker_leaves_after_all_its_messages(a_world):
    async with a_world() as world:
        peer = await world.join(a_description())
        await world.take()

        await peer.say(Step(progress=(some_progress(1),)))
        assert isinstance(await world.take(), WorkerStepped)
        await peer.leave()

        assert await world.take() == WorkerLeft(worker_id=WorkerId("w1"))


@every_setup
async def test_sending_to_an_absent_worker_is_unreachable(a_world):
    async with a_world() as world:
        with pytest.raises(WorkerUnreachable):
            world.workers.start(WorkerId("w1"), a_start())
        peer = await world.join(a_description())
        await world.take()
        await peer.leave()
        await world.take()

        with pytest.raises(WorkerUnreachable) as error:
            world.workers.start(WorkerId("w1"), a_start())
        assert error.value.worker_id == "w1"
        world.workers.cancel(WorkerId("w1"), RequestId("r1#1"))  # no error: the attempt was lost with the worker


@every_setup
async def test_workers_get_only_their_own_messages(a_world):
    async with a_world() as world:
        peers = [await world.join(a_description(worker_id=name)) for name in ("w1", "w2")]
        await world.take()
        await world.take()

        world.workers.start(WorkerId("w2"), a_start(request_id="for-w2"))
        world.workers.start(WorkerId("w1"), a_start(request_id="for-w1"))

        assert [(await peer.heard()).request_id for peer in peers] == ["for-w1", "for-w2"]
