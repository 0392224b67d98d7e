"""Tests of frames over real sockets."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from kvstore.errors import StoreNotStarted
from kvstore.net.frames import (
    HEAD,
    HIGH_WATER_BYTES,
    FrameConnection,
    FrameTooLong,
    FrameTorn,
    SendBufferFull,
    connect,
    open_server,
)
from tests.support.certificates import Authority
from tests.support.waiting import turns, until

pytestmark = pytest.mark.integration

LIMIT = 1 << 20
TCP = "127.0.0.1:0"


class FrameInbox:
    """Receiver that records its events."""

    def __init__(self, connection: FrameConnection):
        self.connection = connection
        self.payloads: list[bytes] = []
        self.resumptions = 0
        self.ends: list[Exception | None] = []
        self.happened = asyncio.Event()

    def received(self, payload: bytes) -> None:
        self.payloads.append(payload)
        self.happened.set()

    def resumed(self) -> None:
        self.resumptions += 1
        self.happened.set()

    def lost(self, cause: Exception | None) -> None:
        self.ends.append(cause)
        self.happened.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.happened.clear()
                await self.happened.wait()

    async def ended(self) -> Exception | None:
        await self.until(lambda: bool(self.ends))
        return self.ends[0]


class AcceptedConnections:
    """Collects the receivers of a server's connections."""

    def __init__(self) -> None:
        self.all: list[FrameInbox] = []
        self.happened = asyncio.Event()

    def __call__(self, connection: FrameConnection) -> FrameInbox:
        self.all.append(FrameInbox(connection))
        self.happened.set()
        return self.all[-1]

    async def first(self) -> FrameInbox:
        async with asyncio.timeout(60):
            await self.happened.wait()
        return self.all[0]


@asynccontextmanager
async def a_pair(address: str = TCP, **settings: int) -> AsyncIterator[tuple[FrameInbox, FrameInbox]]:
    """Yield the client's and the server's end."""
    accepted = AcceptedConnections()
    async with open_server("listen", address, accepted, limit=LIMIT, **settings) as listening:
        client = await connected(listening)
        server = await accepted.first()
        yield client, server
        client.connection.abort()


async def connected(address: str, **settings: object) -> FrameInbox:
    made: list[FrameInbox] = []

    def accept(connection: FrameConnection) -> FrameInbox:
        made.append(FrameInbox(connection))
        return made[0]

    async with asyncio.timeout(60):
        await connect(address, accept, limit=LIMIT, **settings)
    return made[0]


@asynccontextmanager
async def a_raw_client() -> AsyncIterator[tuple[FrameInbox, asyncio.StreamReader, asyncio.StreamWriter]]:
    """Yield a server's end and a raw client connection."""
    accepted = AcceptedConnections()
    async with open_server("listen", TCP, accepted, limit=LIMIT) as listening:
        reader, writer = await asyncio.open_connection(*listening.split(":"))
        yield await accepted.first(), reader, writer
        writer.close()


async def keep_sending(end: FrameInbox, payload: bytes) -> None:
    for _ in range(10_000):
        end.connection.send(payload)
        await turns()


@pytest.mark.parametrize("kind", ["tcp", "tcp6", "unix"])
async def test_frames_arrive_both_ways_whole_and_in_order(kind, tmp_path):
    address = {"tcp": TCP, "tcp6": "[::1]:0", "unix": f"unix:{tmp_path}/s"}[kind]
    said = [b"", b"a", b"b" * 70_000, b"c" * LIMIT, b"d"]

    async with a_pair(address) as (client, server):
        for payload in said:
            client.connection.send(payload)
            server.connection.send(payload[:1], payload[1:])
        await server.until(lambda: len(server.payloads) == len(said))
        await client.until(lambda: len(client.payloads) == len(said))

    assert server.payloads == client.payloads == said


async def test_tls_protects_tcp_and_unknown_client_is_rejected(tmp_path):
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    shown = authority.issue("server")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(shown["certificate"], shown["key"])
    accepted = AcceptedConnections()

    async with open_server("listen", TCP, accepted, limit=LIMIT, tls=tls) as listening:
        client = await connected(listening, tls=ssl.create_default_context(cafile=authority.file))
        client.connection.send(b"x" * LIMIT)
        server = await accepted.first()
        await server.until(lambda: bool(server.payloads))
        with pytest.raises(ssl.SSLError):
            await connected(listening, tls=ssl.create_default_context(cafile=stranger.file))
        client.connection.abort()

    assert server.payloads == [b"x" * LIMIT]


async def test_small_frames_do_not_wait_for_acknowledgements():
    async with a_pair() as (client, server):
        for end in (client, server):
            opened = end.connection.transport.get_extra_info("socket")
            assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_frames_of_one_turn_leave_in_one_write():
    async with a_pair() as (client, _):
        writes: list[bytes] = []

        class Counted:
            def write(self, data: bytes) -> None:
                writes.append(data)

            def get_write_buffer_size(self) -> int:
                return 0

        transport, client.connection.transport = client.connection.transport, Counted()
        for payload in (b"one", b"two", b"three"):
            client.connection.send(payload)
        assert writes == []
        await turns()
        client.connection.send(b"four")
        await turns()
        client.connection.transport = transport

    assert writes == [
        b"".join(HEAD.pack(len(each)) + each for each in (b"one", b"two", b"three")),
        HEAD.pack(4) + b"four",
    ]


async def test_garbage_ends_the_connection():
    async with a_raw_client() as (server, reader, writer):
        writer.write(HEAD.pack(2) + b"ok" + b"GET / HTTP/1.1\r\n\r\n")
        cause = await server.ended()
        assert await reader.read() == b""

    assert server.payloads == [b"ok"]
    assert isinstance(cause, FrameTooLong)


@pytest.mark.parametrize("begun", [b"\x05", HEAD.pack(5) + b"half"])
async def test_end_within_a_frame_is_reported(begun):
    async with a_raw_client() as (server, _, writer):
        writer.write(begun)
        writer.write_eof()

        assert isinstance(await server.ended(), FrameTorn)


async def test_orderly_end_has_no_cause_and_loses_no_frame():
    async with a_pair() as (client, server):
        client.connection.send(b"last words")
        client.connection.close()

        assert await server.ended() is None
        assert await client.ended() is None
    assert server.payloads == [b"last words"]


async def test_lost_peer_is_reported_once_and_sending_is_harmless():
    async with a_pair() as (client, server):
        client.connection.abort()
        await server.ended()
        server.connection.send(b"nobody hears this")
        server.connection.close()
        await turns()

    assert len(server.ends) == 1


async def test_unread_frames_fill_the_connection_until_taken():
    async with a_pair(f"{TCP}") as (client, server):
        client.connection.pause_reading()
        piece = b"x" * 1000
        sent = 0
        async with asyncio.timeout(60):
            while not server.connection.full:
                server.connection.send(piece)
                sent += 1
                if not sent % 100:
                    await turns()
        before = server.resumptions
        client.connection.resume_reading()
        await server.until(lambda: server.resumptions > before)
        await client.until(lambda: len(client.payloads) == sent)

    assert not server.connection.full


async def test_talkative_peer_does_not_monopolise_the_event_loop():
    async with a_pair() as (client, server):
        loop = asyncio.get_running_loop()
        heard_by_turn: list[int] = []

        def turn() -> None:
            heard_by_turn.append(len(server.payloads))
            if len(server.payloads) < 5000:
                loop.call_soon(turn)

        client.connection.transport.set_write_buffer_limits(high=1 << 30)
        for _ in range(5000):
            client.connection.send(b"x" * 1000)
        turn()
        await server.until(lambda: len(server.payloads) == 5000)

    most = max(after - before for before, after in pairwise([*heard_by_turn, 5000]))
    assert most * 1000 <= 256 << 10, "more than one read of the system"


async def test_pause_holds_after_a_large_piece_was_cut():
    async with a_pair() as (client, server):
        server.received = lambda payload: (server.payloads.append(payload), server.connection.pause_reading())
        for _ in range(40):
            client.connection.send(b"x" * 50_000)
        await until(lambda: server.payloads)
        held = len(server.payloads)
        await turns(20)

        assert len(server.payloads) == held
        server.received = server.payloads.append
        server.connection.resume_reading()
        await until(lambda: len(server.payloads) == 40)


async def test_unread_bytes_beyond_the_bound_are_not_kept():
    bound = 2 * HIGH_WATER_BYTES
    async with a_pair(send_limit=bound) as (client, server):
        client.connection.pause_reading()
        with pytest.raises(SendBufferFull):
            await keep_sending(server, b"x" * 100_000)

        assert server.connection.transport.get_write_buffer_size() <= bound
        assert server.ends == []


async def test_frame_beyond_the_peers_limit_is_not_sent():
    async with a_pair() as (client, server):
        with pytest.raises(FrameTooLong):
            client.connection.send(b"x" * LIMIT, b"x")
        client.connection.send(b"fine")
        await server.until(lambda: bool(server.payloads))

    assert server.payloads == [b"fine"]


async def test_no_frame_arrives_after_the_receiver_closed():
    async with a_pair() as (client, server):
        server.received = lambda payload: (server.payloads.append(payload), server.connection.close())
        client.connection.send(b"one")
        client.connection.send(b"two")
        await server.ended()

    assert server.payloads == [b"one"]


async def test_stopping_server_ends_connections_that_do_not_read(monkeypatch):
    monkeypatch.setattr("kvstore.net.frames.STOP_SECONDS", 0.1)
    accepted = AcceptedConnections()
    async with open_server("listen", TCP, accepted, limit=LIMIT) as listening:
        client = await connected(listening)
        client.connection.pause_reading()
        server = await accepted.first()
        async with asyncio.timeout(60):
            while not server.connection.full:
                server.connection.send(b"x" * LIMIT)
                await turns()
    await server.ended()
    client.connection.abort()


async def test_stopped_server_leaves_no_socket(tmp_path):
    async with open_server("listen", f"unix:{tmp_path}/s", AcceptedConnections()):
        assert (tmp_path / "s").is_socket()
    assert not (tmp_path / "s").exists()


async def test_address_in_use_is_rejected_with_the_field(tmp_path: Path):
    for address in (TCP, f"unix:{tmp_path}/s"):
        async with open_server("listen", address, AcceptedConnections()) as taken:
            with pytest.raises(StoreNotStarted, match="listen: "):
                async with open_server("listen", taken, AcceptedConnections()):
                    pass
