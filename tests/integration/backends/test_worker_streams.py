"""Tests of streams to workers and their failures, with workers played by the test."""

import asyncio

import pytest
from msgspec import structs

from fleet.backends.workers import streams as worker_streams
from fleet.backends.workers.streams import SLICES
from fleet.core.ids import RequestId, StoreId, WorkerId
from fleet.core.roles import KvPath
from fleet.core.work import (
    AnswersWanted,
    Goodbye,
    KeepTrace,
    KeptAnswer,
    KeptAnswers,
    KvCleared,
    KvEvents,
    WantedAnswer,
)
from fleet.membership.messages import MemberJoined
from fleet.membership.settings import MembershipSettings
from fleet.router.messages import KvChanged, KvPathsChanged, LoadReported, WorkerJoined, WorkerLeft
from fleet.router.ports import WorkerUnreachable
from fleet.router.settings.router import RouterSettings
from fleet.v1 import worker_pb2 as pb
from kvstore.net.frames import HEAD
from tests.support.backends.stream_workers import StreamSetup, StreamWorker, a_stream_setup
from tests.support.builders import a_description, a_load, a_start, token_bytes
from tests.support.stopwatch import at_most
from tests.support.waiting import pace, pace_thread, stays, turns, until

pytestmark = pytest.mark.integration

LEFT = WorkerLeft(worker_id=WorkerId("w1"))
SHORT = 0.2  # seconds of silence


async def joined(world: StreamSetup) -> WorkerJoined:
    event = await world.take()
    assert isinstance(event, WorkerJoined), event
    return event


async def nothing_but_load(world: StreamSetup, peer: StreamWorker) -> None:
    """Check that the peer's next message is the router's next event, so that nothing happened in between."""
    await peer.say(a_load(running=77))
    assert await world.take() == LoadReported(worker_id=peer.description.worker_id, load=a_load(running=77))


async def test_the_router_introduces_itself():
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await peer.connected()

        assert peer.hellos == ["router-7"]


async def test_second_description_updates_the_kv_paths():
    async with a_stream_setup() as world:
        alone = a_description(kv_paths=(), store_id=None)
        peer = await world.join(alone)
        await joined(world)

        await peer.say(structs.replace(alone, kv_paths=(KvPath.STORE,), store_id=StoreId("s")))

        assert await world.take() == KvPathsChanged(
            worker_id=alone.worker_id, kv_paths=(KvPath.STORE,), store_id=StoreId("s")
        )
        await nothing_but_load(world, peer)


async def test_second_description_of_another_worker_breaks_the_stream():
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        await peer.say(structs.replace(a_description(), max_running=999))

        assert await world.take() == LEFT


async def test_worker_that_may_not_join_never_joins():
    refused = a_description()

    async with a_stream_setup(accepts=lambda description: description.max_running != refused.max_running) as world:
        peer = await world.join(refused)
        await nothing_but_load(world, peer)

        await peer.leave()
        assert await world.take() == LEFT
        peer.description = structs.replace(refused, max_running=refused.max_running + 1)
        await peer.start()

        assert (await joined(world)).description.max_running == peer.description.max_running


async def test_restarted_worker_at_its_address_rejoins():
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)
        await peer.leave()
        assert await world.take() == LEFT

        await peer.start()

        await joined(world)
        await nothing_but_load(world, peer)


async def test_worker_that_listens_late_is_reached():
    async with a_stream_setup() as world:
        peer = await world.peer(a_description())
        await peer.leave()
        world.announce(peer)
        await turns()

        await peer.start()

        await joined(world)


async def test_silent_worker_counts_as_lost():
    async with a_stream_setup(heartbeat_timeout_seconds=SHORT) as world:
        loop = asyncio.get_running_loop()
        await world.join(a_description())
        await joined(world)
        began = loop.time()

        with at_most(2):
            assert await world.take() == LEFT

        assert loop.time() - began >= SHORT * 0.9


def test_silent_worker_is_gone_before_its_lease_ends():
    """Check that its cache is forgotten too (`test_cold_router_learns_caches_and_forgets_dead_workers`)."""
    longest_silence = RouterSettings().heartbeat_timeout_seconds * (1 + 1 / SLICES)

    assert longest_silence < MembershipSettings().lease_ms / 1000


async def test_a_worker_that_reports_its_load_is_alive():
    silence = 5 * SHORT  # on a busy machine a third of it may take the whole time
    async with a_stream_setup(heartbeat_timeout_seconds=silence) as world:
        peer = await world.join(a_description())
        await joined(world)

        for _ in range(6):
            await pace(silence / 3, "the worker says nothing for a third of the timeout")
            await nothing_but_load(world, peer)


async def test_paused_router_does_not_blame_its_workers():
    async with a_stream_setup(heartbeat_timeout_seconds=SHORT) as world:
        peer = await world.join(a_description())
        await joined(world)

        pace_thread(SHORT * 2, "everything stands still, like a stopped process")

        await nothing_but_load(world, peer)


@pytest.mark.parametrize("sequence", [1, 5])
async def test_kv_event_gap_is_repaired_by_a_new_stream(sequence):
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)
        cleared = (KvCleared(),)

        await peer.say(KvEvents(sequence=sequence, events=cleared))

        assert await world.take() == LEFT
        await joined(world)
        await peer.say(KvEvents(sequence=0, events=cleared))  # a new stream starts numbering again
        assert await world.take() == KvChanged(worker_id=WorkerId("w1"), events=cleared)


@pytest.mark.parametrize(
    "nonsense",
    [
        pb.WorkerMessage(step=pb.Step(progress=[pb.Progress(token_ids=[1])])),
        pb.WorkerMessage(kv_events=pb.KvEvents(events=[pb.KvEvent(stored=pb.KvStored(hashes=b"odd"))])),
        pb.WorkerMessage(description=pb.Description(worker_id="w1")),
    ],
    ids=["step", "hashes", "description"],
)
async def test_malformed_message_breaks_the_stream(nonsense):
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        await peer.say(nonsense)

        assert await world.take() == LEFT


async def test_a_message_of_a_newer_worker_is_skipped():
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        await peer.say(pb.WorkerMessage())

        await nothing_but_load(world, peer)


async def test_worker_with_another_name_than_announced_does_not_join():
    async with a_stream_setup() as world:
        impostor = await world.peer(a_description(worker_id="w2"))
        impostor.description = a_description(worker_id="w3")
        honest = await world.peer(a_description(worker_id="w1"))
        world.changes.put_nowait(_announcement(impostor, "w2"))
        await impostor.connected()

        world.announce(honest)

        assert (await joined(world)).description.worker_id == "w1"


async def test_two_workers_of_one_name_stay_apart():
    async with a_stream_setup() as elsewhere:  # only for a second folder of sockets
        twin = await elsewhere.peer(a_description(incarnation="twin"))
        async with a_stream_setup(addresses=(twin.address,)) as world:
            assert (await joined(world)).description.incarnation == "twin"
            peer = await world.join(a_description(incarnation="other"))
            await peer.connected()

            await nothing_but_load(world, twin)


async def test_members_by_address_need_no_registry():
    async with a_stream_setup() as elsewhere:
        peer = await elsewhere.peer(a_description(worker_id="by-address"))

        async with a_stream_setup(addresses=(peer.address,)) as world:
            assert (await joined(world)).address == peer.address


# Membership


async def test_deregistered_worker_keeps_its_stream_until_it_ends():
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        world.withdraw("w1")
        await nothing_but_load(world, peer)
        await peer.leave()
        assert await world.take() == LEFT
        await peer.start()
        other = await world.join(a_description(worker_id="w2"))

        assert (await joined(world)).description.worker_id == "w2"
        await stays(lambda: len(peer.hellos) == 1, 0.3, "several pauses between attempts pass")
        await nothing_but_load(world, other)


async def test_worker_that_leaves_before_contact_is_dropped():
    async with a_stream_setup() as world:
        peer = await world.peer(a_description())
        await peer.leave()
        world.announce(peer)
        await world.join(a_description(worker_id="w2"))
        assert (await joined(world)).description.worker_id == "w2"
        world.withdraw("w1")
        await world.join(a_description(worker_id="w3"))
        assert (await joined(world)).description.worker_id == "w3"
        await peer.start()

        await stays(lambda: peer.hellos == [], 0.3, "several pauses between attempts pass")


async def test_renewed_registration_leaves_the_stream_alone():
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        world.withdraw("w1")  # for example because the lease ended while the worker was busy
        world.announce(peer)
        await nothing_but_load(world, peer)
        await peer.leave()
        assert await world.take() == LEFT
        await peer.start()

        await joined(world)  # it is a member again, so it is dialled again


async def test_a_new_incarnation_elsewhere_replaces_the_old_one():
    async with a_stream_setup() as world:
        old = await world.join(a_description(incarnation="old"))
        await joined(world)

        await world.join(a_description(incarnation="new"))

        assert await world.take() == LEFT
        assert (await joined(world)).description.incarnation == "new"
        assert len(old.hellos) == 1


# Limits


async def test_attempt_that_does_not_fit_leaves_the_stream_alone(monkeypatch):
    monkeypatch.setattr(worker_streams, "UNREAD_BYTES", 1000)
    async with a_stream_setup(heartbeat_timeout_seconds=60.0) as world:
        peer = await world.join(a_description())
        await joined(world)

        with pytest.raises(WorkerUnreachable):  # without an await nothing is sent
            fill(world)

        await peer.heard()
        await nothing_but_load(world, peer)
        world.workers.start(WorkerId("w1"), a_start(request_id="later"))  # there is room again


async def test_attempt_longer_than_a_frame_leaves_the_stream_alone(monkeypatch):
    monkeypatch.setattr(worker_streams, "MAX_MESSAGE_BYTES", 10_000)
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        with pytest.raises(WorkerUnreachable):
            world.workers.start(WorkerId("w1"), a_start(images=(bytes(10_000),)))

        await nothing_but_load(world, peer)


async def test_unsendable_trace_request_leaves_the_stream_alone(monkeypatch):
    monkeypatch.setattr(worker_streams, "UNREAD_BYTES", 1000)
    async with a_stream_setup(heartbeat_timeout_seconds=60.0) as world:
        peer = await world.join(a_description())
        await joined(world)

        for _ in range(1000):
            world.workers.keep_trace(WorkerId("w1"), KeepTrace(trace_id=bytes(16)))

        await peer.heard()
        await nothing_but_load(world, peer)


async def test_worker_that_keeps_answers_is_asked_for_tokens():
    async with a_stream_setup() as world:
        keeper = await world.join(a_description(keeps_answers=True))
        await joined(world)
        earlier = await world.join(a_description(worker_id="w2"))  # a version that keeps none
        await joined(world)
        search = asyncio.create_task(world.workers.answers.tokens(7, 2))

        assert await keeper.heard() == AnswersWanted(answers=(WantedAnswer(7, 2),))
        await keeper.say(KeptAnswers(answers=(KeptAnswer(7, token_bytes([1, 2])),)))
        assert await search == (1, 2)

        search = asyncio.create_task(world.workers.answers.tokens(7, 2))
        await keeper.heard()
        await keeper.leave()
        assert await search == ()
        assert await world.take() == LEFT
        await nothing_but_load(world, earlier)


async def test_unsendable_cancellation_ends_the_stream(monkeypatch):
    monkeypatch.setattr(worker_streams, "UNREAD_BYTES", 1000)
    async with a_stream_setup(heartbeat_timeout_seconds=60.0) as world:  # so that its silence is not the cause
        await world.join(a_description())
        await joined(world)

        for _ in range(1000):
            world.workers.cancel(WorkerId("w1"), RequestId("r0"))

        assert await world.take() == LEFT


def fill(world: StreamSetup) -> None:
    for number in range(1000):
        world.workers.start(WorkerId("w1"), a_start(request_id=f"r{number}"))


# Invalid workers


async def test_peer_without_a_description_is_dialled_again():
    async with a_stream_setup(connect_timeout_seconds=SHORT) as world:
        peer = await world.peer(a_description())
        peer.silent = True
        world.announce(peer)
        await until(lambda: len(peer.hellos) == 2)

        peer.silent = False

        await joined(world)


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        HEAD.pack(4) + b"\xff\xff\xff\xff",
        HEAD.pack(1 << 31),
        HEAD.pack(9) + b"half",
    ],
    ids=["http", "no protobuf", "oversize", "half a frame"],
)
async def test_garbage_ends_the_stream_and_a_new_one_opens(said):
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        peer.connection.transport.write(said)
        peer.connection.close()

        assert await world.take() == LEFT
        await joined(world)


async def test_reason_of_a_worker_for_the_end_is_logged(caplog):
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        await peer.say(Goodbye(reason="the router does not read fast enough"))

        assert await world.take() == LEFT
    assert "the router does not read fast enough" in [getattr(record, "cause", "") for record in caplog.records]


async def test_nothing_is_received_after_a_stream_was_given_up():
    async with a_stream_setup() as world:
        peer = await world.join(a_description())
        await joined(world)

        await peer.say(KvEvents(sequence=5, events=(KvCleared(),)))  # a gap, in the same packet
        await peer.say(a_load(running=1))

        assert await world.take() == LEFT
        await joined(world)


def _announcement(peer: StreamWorker, worker_id: str):
    return MemberJoined(worker_id=WorkerId(worker_id), incarnation=peer.description.incarnation, address=peer.address)
