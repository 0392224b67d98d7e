"""Tests of messages of a peer router over real sockets: an invalid message ends the connection and changes nothing."""

import asyncio
from contextlib import suppress

import pytest

from fleet.core.clock import Nanos
from fleet.core.ids import WorkerId
from fleet.peers.messages import LATEST, encode_sessions
from fleet.peers.routers import PeerRouters
from fleet.router.kv_index.peer_prompts import MAX_ANNOUNCED_KEYS
from fleet.router.sessions import SessionBinding, SessionTable
from fleet.router.settings.router import RouterSettings
from fleet.v1 import replica_pb2 as pb
from kvstore.net.frames import connect
from tests.support.router.recording_router import RecordingRouter
from tests.support.waiting import pace, until

pytestmark = pytest.mark.integration

HELLO = pb.ReplicaMessage(hello=pb.ReplicaHello(router_id="other"))


class SendingPeer:
    """A peer router's end of a connection."""

    def __init__(self):
        self.over = asyncio.Event()

    def received(self, payload):
        raise AssertionError(payload)

    def resumed(self):
        pass

    def lost(self, cause):
        self.over.set()


def received_events(tmp_path, *said, **fields):
    """Return what a router receives from a peer that sends these messages and waits for the end or a moment."""
    return received_by_router(tmp_path, *said, **fields)[0]


def received_by_router(tmp_path, *said, **fields):
    """Return the same with the peer prompts."""

    async def play():
        router = RecordingRouter()
        address = f"unix:{tmp_path}/r.sock"
        replicas = PeerRouters(RouterSettings(replicas_listen=address), router, router, router, lambda: "", **fields)
        running = asyncio.create_task(replicas.run())
        speaker = SendingPeer()
        async with asyncio.timeout(60):
            await until((tmp_path / "r.sock").exists)
            connection = await connect(address, lambda _: speaker)
            for message in (HELLO, *said, pb.ReplicaMessage(bookings=pb.ReplicaBookings())):
                connection.send(message.SerializeToString())
            await until(lambda: speaker.over.is_set() or "PeerReserved" in router.events)
        heard = list(router.events), router.placed
        connection.abort()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        return heard

    return asyncio.run(play())


async def test_peer_is_given_up_once_it_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr("fleet.peers.routers.SILENCE_SECONDS", 1.0)
    router, speaker, address = RecordingRouter(), SendingPeer(), f"unix:{tmp_path}/r.sock"
    replicas = PeerRouters(RouterSettings(replicas_listen=address), router, router, router, lambda: "")
    running = asyncio.create_task(replicas.run())
    await until((tmp_path / "r.sock").exists)
    connection = await connect(address, lambda _: speaker)
    connection.send(HELLO.SerializeToString())
    for _ in range(8):
        await pace(0.2, "the peer sends something in each fifth of the time for which it may be silent")
        assert not speaker.over.is_set()
        connection.send(pb.ReplicaMessage(bookings=pb.ReplicaBookings()).SerializeToString())
    assert "PeerLeft" not in router.events

    await until(lambda: "PeerLeft" in router.events)
    await until(speaker.over.is_set)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


async def test_peer_that_connects_is_dialled_at_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fleet.peers.routers.DIAL_SECONDS", 3600.0)  # the pause after a connection that did not last
    accepted = []

    async def accept(_, writer):
        accepted.append(writer)
        if len(accepted) == 1:
            writer.close()

    router, address = RecordingRouter(), f"unix:{tmp_path}/r.sock"
    settings = RouterSettings(replicas_listen=address, replicas=(f"unix:{tmp_path}/other.sock",))
    async with await asyncio.start_unix_server(accept, f"{tmp_path}/other.sock"):
        replicas = PeerRouters(settings, router, router, router, lambda: "")
        running = asyncio.create_task(replicas.run())
        await until((tmp_path / "r.sock").exists)
        await until(lambda: "peer router lost" in caplog.text)  # the pause has begun
        connection = await connect(address, lambda _: SendingPeer())
        connection.send(HELLO.SerializeToString())

        await until(lambda: len(accepted) == 2)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        for writer in accepted:
            writer.close()


async def test_full_send_buffer_is_logged_as_cause(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fleet.peers.routers.MAX_WAITING_BYTES", 8)
    router, accepted = RecordingRouter(), []
    settings = RouterSettings(replicas_listen=f"unix:{tmp_path}/r.sock", replicas=(f"unix:{tmp_path}/other.sock",))
    async with await asyncio.start_unix_server(lambda _, writer: accepted.append(writer), f"{tmp_path}/other.sock"):
        replicas = PeerRouters(settings, router, router, router, lambda: "")
        running = asyncio.create_task(replicas.run())
        await until(lambda: "peer router lost" in caplog.text)
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        for writer in accepted:
            writer.close()

    causes = [each.cause for each in caplog.records if each.getMessage() == "peer router lost"]
    assert causes[0] == "the peer has not taken the last 8 bytes"


@pytest.mark.parametrize("blocks", [float("nan"), float("inf"), 1e300, -1.0])
def test_invalid_reservation_numbers_end_the_connection(tmp_path, blocks):
    workers = [pb.WorkerBookings(worker_id="w", requests=1, prefill_tokens=1, blocks=blocks)]
    assert "PeerReserved" not in received_events(
        tmp_path, pb.ReplicaMessage(bookings=pb.ReplicaBookings(workers=workers))
    )


def test_latest_possible_clock_does_not_silence_a_peer(tmp_path):
    sessions = SessionTable(ttl_seconds=1, capacity=10, telling=True)
    sessions.apply(SessionBinding(key=("", "s"), worker_id=WorkerId("w"), stamp=LATEST), Nanos(0))
    sessions.bind(("", "t"), WorkerId("w"), Nanos(0))
    (told,) = encode_sessions(sessions.news())

    assert "PeerReserved" in received_events(tmp_path, told)


def test_impossible_clock_ends_the_connection(tmp_path):
    """Guard the clocks of all routers, which would be put forward for ever."""
    binding = pb.SessionBinding(session="s", worker_id="w", stamp=(1 << 64) - 1)
    assert "PeerReserved" not in received_events(
        tmp_path, pb.ReplicaMessage(sessions=pb.ReplicaSessions(bindings=[binding]))
    )


@pytest.mark.parametrize("keys", [0, 7, 12, 8 * (MAX_ANNOUNCED_KEYS + 1)])
def test_invalid_prompt_keys_end_the_connection(tmp_path, keys):
    placed = [pb.PlacedPrompt(worker_id="w", number=1, keys=bytes(keys))]
    said = received_events(tmp_path, pb.ReplicaMessage(prompts=pb.ReplicaPrompts(placed=placed)))
    assert not {"PeerPlaced", "PeerReserved"} & set(said)


@pytest.mark.parametrize(("private", "ours"), [(5, True), (6, False), (0, False)])
def test_prompts_with_a_foreign_secret_are_ignored(tmp_path, private, ours):
    """Include prompts without any secret, from an older version or from a router whose block names are its own."""
    placed = [pb.PlacedPrompt(worker_id="w", number=number, keys=bytes(8)) for number in (0, 1)]
    said = pb.ReplicaMessage(prompts=pb.ReplicaPrompts(placed=placed, private=private))

    _, prompts = received_by_router(tmp_path, said, private=5 if private else 0)

    assert [each.number for each in prompts] == ([0, 1] if ours else [1])


def test_message_of_a_later_version_is_skipped(tmp_path):
    assert received_events(tmp_path, pb.ReplicaMessage())[-1] == "PeerReserved"
