"""Streams to workers, and what happens when they break; the workers are played by the test."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from fleet.adapters import grpc_workers
from fleet.control.messages import MemberJoined
from fleet.ids import RequestId, WorkerId
from fleet.router.messages import KvChanged, LoadReported, WorkerEvent, WorkerJoined, WorkerLeft
from fleet.router.ports import WorkerUnreachable
from fleet.v1 import worker_pb2 as pb
from fleet.work import KvCleared, KvEvents
from tests.builders import a_description, a_load, a_start
from tests.grpc_peers import GrpcPeer, a_grpc_world

pytestmark = pytest.mark.integration

LEFT = WorkerLeft(worker_id=WorkerId("w1"))
SHORT = 0.2  # seconds of silence


async def take(events: AsyncIterator[WorkerEvent]) -> WorkerEvent:
    async with asyncio.timeout(10):
        return await anext(events)


async def joined(events: AsyncIterator[WorkerEvent]) -> WorkerJoined:
    event = await take(events)
    assert isinstance(event, WorkerJoined), event
    return event


async def nothing_but_load(events: AsyncIterator[WorkerEvent], peer: GrpcPeer) -> None:
    """What the peer says now is the next that is heard: nothing has happened in between."""
    await peer.say(a_load(running=77))
    assert await take(events) == LoadReported(worker_id=peer.description.worker_id, load=a_load(running=77))


async def test_the_router_introduces_itself():
    async with a_grpc_world() as world:
        peer = await world.join(a_description())
        await peer.connected()

        assert peer.hellos == ["router-7"]


async def test_a_worker_that_comes_back_at_its_address_joins_again():
    async with a_grpc_world() as world:
        events = world.workers.events()
        peer = await world.join(a_description())
        await joined(events)
        await peer.leave()
        assert await take(events) == LEFT

        await peer.start()

        await joined(events)
        await nothing_but_load(events, peer)


async def test_a_worker_that_listens_only_after_it_was_announced_is_reached():
    async with a_grpc_world() as world:
        peer = await world.peer(a_description())
        await peer.leave()
        world.announce(peer)
        await asyncio.sleep(0)

        await peer.start()

        await joined(world.workers.events())


async def test_silence_is_death():
    async with a_grpc_world(heartbeat_timeout_seconds=SHORT) as world:
        events = world.workers.events()
        loop = asyncio.get_running_loop()
        await world.join(a_description())
        await joined(events)
        began = loop.time()

        assert await take(events) == LEFT

        assert SHORT * 0.9 <= loop.time() - began < SHORT + 2


async def test_a_worker_that_reports_its_load_is_alive():
    async with a_grpc_world(heartbeat_timeout_seconds=SHORT) as world:
        events = world.workers.events()
        peer = await world.join(a_description())
        await joined(events)

        for _ in range(6):
            await asyncio.sleep(SHORT / 3)
            await nothing_but_load(events, peer)


async def test_a_router_that_stood_still_does_not_take_it_for_silence_of_its_workers():
    async with a_grpc_world(heartbeat_timeout_seconds=SHORT) as world:
        events = world.workers.events()
        peer = await world.join(a_description())
        await joined(events)

        time.sleep(SHORT * 2)  # all of it stands still, as a process that was stopped

        await nothing_but_load(events, peer)


@pytest.mark.parametrize("sequence", [1, 5])
async def test_a_gap_in_the_kv_events_voids_what_is_known_and_a_new_stream_repairs_it(sequence):
    async with a_grpc_world() as world:
        events = world.workers.events()
        peer = await world.join(a_description())
        await joined(events)
        cleared = (KvCleared(),)

        await peer.say(KvEvents(sequence=sequence, events=cleared))

        assert await take(events) == LEFT
        await joined(events)
        await peer.say(KvEvents(sequence=0, events=cleared))  # numbering starts again with the stream
        assert await take(events) == KvChanged(worker_id=WorkerId("w1"), events=cleared)


@pytest.mark.parametrize(
    "nonsense",
    [
        pb.WorkerMessage(step=pb.Step(progress=[pb.Progress(request_id="r", finish="exploded")])),
        pb.WorkerMessage(kv_events=pb.KvEvents(events=[pb.KvEvent(stored=pb.KvStored(hashes=b"odd"))])),
        pb.WorkerMessage(description=pb.Description(worker_id="w1")),
    ],
    ids=["step", "hashes", "description"],
)
async def test_what_cannot_be_understood_breaks_the_stream(nonsense):
    async with a_grpc_world() as world:
        events = world.workers.events()
        peer = await world.join(a_description())
        await joined(events)

        await peer.say(nonsense)

        assert await take(events) == LEFT


async def test_a_message_of_a_newer_worker_is_skipped():
    async with a_grpc_world() as world:
        events = world.workers.events()
        peer = await world.join(a_description())
        await joined(events)

        await peer.say(pb.WorkerMessage())

        await nothing_but_load(events, peer)


async def test_a_worker_under_another_name_than_announced_does_not_join():
    async with a_grpc_world() as world:
        impostor = await world.peer(a_description(worker_id="w2"))
        impostor.description = a_description(worker_id="w3")
        honest = await world.peer(a_description(worker_id="w1"))
        world.changes.put_nowait(_announcement(impostor, "w2"))
        await impostor.connected()

        world.announce(honest)

        assert (await joined(world.workers.events())).description.worker_id == "w1"


async def test_two_workers_of_one_name_are_not_mixed_up():
    async with a_grpc_world() as elsewhere:  # only to have a second folder for sockets
        twin = await elsewhere.peer(a_description(incarnation="twin"))
        async with a_grpc_world(addresses=(twin.address,)) as world:
            events = world.workers.events()
            assert (await joined(events)).description.incarnation == "twin"
            peer = await world.join(a_description(incarnation="other"))
            await peer.connected()

            await nothing_but_load(events, twin)


async def test_members_by_address_need_no_registry():
    async with a_grpc_world() as elsewhere:
        peer = await elsewhere.peer(a_description(worker_id="by-address"))

        async with a_grpc_world(addresses=(peer.address,)) as world:
            assert (await joined(world.workers.events())).address == peer.address


# Membership.


async def test_a_worker_that_leaves_the_registry_keeps_its_stream_until_that_ends():
    async with a_grpc_world() as world:
        events = world.workers.events()
        peer = await world.join(a_description())
        await joined(events)

        world.denounce("w1")
        await nothing_but_load(events, peer)
        await peer.leave()
        assert await take(events) == LEFT
        await peer.start()
        other = await world.join(a_description(worker_id="w2"))

        assert (await joined(events)).description.worker_id == "w2"
        await asyncio.sleep(0.3)  # several pauses between attempts
        assert len(peer.hellos) == 1
        await nothing_but_load(events, other)


async def test_a_worker_that_leaves_before_it_was_reached_is_given_up():
    async with a_grpc_world() as world:
        peer = await world.peer(a_description())
        await peer.leave()
        world.announce(peer)
        await asyncio.sleep(0.1)
        world.denounce("w1")
        await asyncio.sleep(0.1)
        await peer.start()
        await asyncio.sleep(0.3)

        assert peer.hellos == []


async def test_a_renewed_membership_of_the_same_process_leaves_its_stream_alone():
    async with a_grpc_world() as world:
        events = world.workers.events()
        peer = await world.join(a_description())
        await joined(events)

        world.denounce("w1")  # the lease ended while the worker was busy, say
        world.announce(peer)
        await nothing_but_load(events, peer)
        await peer.leave()
        assert await take(events) == LEFT
        await peer.start()

        await joined(events)  # it is a member again, so it is dialled again


async def test_a_new_incarnation_elsewhere_replaces_the_old_one():
    async with a_grpc_world() as world:
        events = world.workers.events()
        old = await world.join(a_description(incarnation="old"))
        await joined(events)

        await world.join(a_description(incarnation="new"))

        assert await take(events) == LEFT
        assert (await joined(events)).description.incarnation == "new"
        assert len(old.hellos) == 1


# Limits.


async def test_events_that_nobody_takes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(grpc_workers, "EVENTS_WAITING", 10)
    async with a_grpc_world(heartbeat_timeout_seconds=SHORT) as world:
        peer = await world.join(a_description())
        for running in range(200):
            await peer.say(a_load(running=running))
        await asyncio.sleep(2 * SHORT)  # longer than a silence may last: not listening is not silence

        assert world.workers._events.qsize() <= 11
        events = world.workers.events()
        await joined(events)
        loads = [(await take(events)).load.running for _ in range(200)]
        assert loads == list(range(200))


async def test_a_worker_too_far_behind_counts_as_unreachable_and_is_given_up(monkeypatch):
    monkeypatch.setattr(grpc_workers, "SENDS_WAITING", 3)
    async with a_grpc_world(heartbeat_timeout_seconds=60.0) as world:  # its silence is not what ends it
        events = world.workers.events()
        await world.join(a_description())
        await joined(events)

        for number in range(3):  # without an await in between nothing is sent
            world.workers.start(WorkerId("w1"), a_start(request_id=f"r{number}"))
        with pytest.raises(WorkerUnreachable):
            world.workers.start(WorkerId("w1"), a_start(request_id="one too many"))

        assert await take(events) == LEFT
        await joined(events)  # on a new stream


async def test_a_cancellation_that_cannot_be_sent_ends_the_stream_and_with_it_the_work(monkeypatch):
    monkeypatch.setattr(grpc_workers, "SENDS_WAITING", 3)
    async with a_grpc_world(heartbeat_timeout_seconds=60.0) as world:  # its silence is not what ends it
        events = world.workers.events()
        await world.join(a_description())
        await joined(events)
        for number in range(3):
            world.workers.start(WorkerId("w1"), a_start(request_id=f"r{number}"))

        world.workers.cancel(WorkerId("w1"), RequestId("r0"))

        assert await take(events) == LEFT


def _announcement(peer: GrpcPeer, worker_id: str):
    return MemberJoined(worker_id=WorkerId(worker_id), incarnation=peer.description.incarnation, address=peer.address)
