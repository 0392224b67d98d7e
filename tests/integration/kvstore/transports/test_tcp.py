"""Tests of the TCP data plane with clients that break its rules."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress

import numpy as np
import psutil
import pytest

from kvstore.buffers import crc32c, pieces
from kvstore.clock import Clock, Nanos
from kvstore.eviction.lru import LruEviction
from kvstore.messages import BlockOutcome, Claim, Slot
from kvstore.pool.machine import BlockMachine
from kvstore.security.authentication import NONCE_BYTES, AuthenticationKey, Purpose
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.shared_memory import SharedMemoryTier
from kvstore.transports import tcp_server
from kvstore.transports.tcp import TcpTransport
from kvstore.transports.tcp_frames import (
    CHALLENGE,
    ENTRY,
    MAGIC,
    OPENING,
    REPLY,
    REQUEST,
    WINDOW,
    DataPlaneOperation,
    DataPlaneStatus,
)
from kvstore.transports.tcp_server import STALLED, DataPlaneServer
from tests.support.kvstore.builders import BLOCK_BYTES, LEASE, ManualClock, a_block, a_chain, a_namespace, deadline_in
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.integration

CLOCK = MonotonicClock()


class TcpDataPlane:
    """A data plane with one namespace on the test's event loop."""

    def __init__(self, block_bytes: int = BLOCK_BYTES, secret: bytes = b"", clock: Clock = CLOCK):
        self.namespace = a_namespace(block_bytes=block_bytes)
        self.block_bytes = block_bytes
        self.machine = BlockMachine(8 * block_bytes, LruEviction(), epoch=1)
        self.machine.open(self.namespace, Nanos(0))
        self.tier = SharedMemoryTier(8 * block_bytes)
        self.plane = DataPlaneServer(
            self.machine, self.tier, clock, AuthenticationKey(secret, Purpose.DATA) if secret else None
        )
        self.writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        address = await self.plane.listen("127.0.0.1", 0)
        self.port = int(address.rpartition(":")[2])

    def settle(self) -> None:
        for command in self.machine.commands():
            (self.tier.claim if isinstance(command, Claim) else self.tier.discard)(command.address)

    def reserve(self, name: bytes) -> tuple[int, Slot]:
        reservation = self.machine.reserve(self.namespace.digest, [name], owner="w", lease=LEASE, now=Nanos(0))
        self.settle()
        return reservation.reservation_id, reservation.reserved[0].slot

    def hold(self, name: bytes, block: np.ndarray) -> Slot:
        reservation_id, slot = self.reserve(name)
        self.tier.view(self.machine.writable(self.namespace.digest, slot))[:] = block
        checksum = crc32c(pieces(block))
        self.machine.publish(reservation_id, {0: checksum}, owner="w", now=Nanos(0))
        return Slot(slot.offset, slot.generation, checksum)

    async def dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect and bind the connection to the namespace."""
        reader, writer = await self.connect()
        writer.write(an_opening(self.namespace.digest))
        assert await challenge(reader) is DataPlaneStatus.DONE
        return reader, writer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        self.plane.close()
        for writer in self.writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


@pytest.fixture
async def plane():
    plane = TcpDataPlane()
    await plane.start()
    yield plane
    await plane.close()


async def challenge(reader: asyncio.StreamReader) -> DataPlaneStatus:
    async with asyncio.timeout(60):
        magic, status, _ = CHALLENGE.unpack(await reader.readexactly(CHALLENGE.size))
    assert magic == MAGIC
    return DataPlaneStatus(status)


async def reply(reader: asyncio.StreamReader) -> list[DataPlaneStatus]:
    async with asyncio.timeout(60):
        magic, count = REPLY.unpack(await reader.readexactly(REPLY.size))
        assert magic == MAGIC
        return [DataPlaneStatus(status) for status in await reader.readexactly(count)]


async def block(reader: asyncio.StreamReader, length: int = BLOCK_BYTES) -> tuple[bytes, DataPlaneStatus]:
    """Read the rest of the reply to a GET of one present block."""
    async with asyncio.timeout(60):
        return await reader.readexactly(length), DataPlaneStatus((await reader.readexactly(1))[0])


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(60):
            return await reader.read() == b""
    except ConnectionResetError:
        return True


def an_opening(digest: bytes, magic: bytes = MAGIC) -> bytes:
    return OPENING.pack(magic, DataPlaneOperation.OPEN, digest, b"n" * NONCE_BYTES)


def a_request(slot: Slot, operation: int = DataPlaneOperation.GET, magic: bytes = MAGIC, count: int = 1) -> bytes:
    return REQUEST.pack(magic, operation, count) + ENTRY.pack(slot.offset, slot.generation, slot.crc32c)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        random.Random(1).randbytes(4096),
        an_opening(b"d" * 16, magic=b"FKV1"),
        a_request(Slot(0, 1)) * 2,  # before OPEN
    ],
)
async def test_garbage_before_the_opening_ends_the_connection(plane, garbage):
    reader, writer = await plane.connect()

    writer.write(garbage)

    assert await is_closed(reader)


@pytest.mark.parametrize(
    "garbage",
    [
        a_request(Slot(0, 1), count=0),
        a_request(Slot(0, 1), count=WINDOW + 1),
        a_request(Slot(0, 1), DataPlaneOperation.PUT, count=0xFFFFFFFF),
        a_request(Slot(0, 1), magic=b"FKVM"),
        a_request(Slot(0, 1), operation=9),
        an_opening(b"d" * 16),  # a second one
    ],
)
async def test_garbage_after_the_opening_ends_only_its_connection(plane, garbage):
    slot = plane.hold(a_chain(1)[0], a_block(1))
    reader, writer = await plane.dial()
    other_reader, other_writer = await plane.dial()

    writer.write(garbage)

    assert await is_closed(reader)
    other_writer.write(a_request(slot))
    assert await reply(other_reader) == [DataPlaneStatus.DONE]


async def test_a_slot_of_another_namespace_is_gone(plane):
    slot = plane.hold(a_chain(1)[0], a_block(1))
    other = a_namespace(model="other")
    plane.machine.open(other, Nanos(0))
    reader, writer = await plane.connect()
    writer.write(an_opening(other.digest))
    assert await challenge(reader) is DataPlaneStatus.DONE

    writer.write(a_request(slot))

    assert await reply(reader) == [DataPlaneStatus.GONE]


async def test_writer_of_an_ended_reservation_touches_nothing_more(plane):
    _, slot = plane.reserve(a_chain(1, "late")[0])
    reader, writer = await plane.dial()
    late = bytes(a_block(1))
    writer.write(
        a_request(Slot(slot.offset, slot.generation, crc32c([a_block(1)])), DataPlaneOperation.PUT) + late[:100]
    )
    place = plane.tier.view(plane.machine.writable(plane.namespace.digest, slot))
    await until(lambda: bytes(place[:100]) == late[:100])
    plane.machine.expire(LEASE)
    plane.settle()
    present = plane.hold(a_chain(1, "new")[0], a_block(2))
    assert present.offset == slot.offset

    writer.write(late[100:] + a_request(present))

    assert await reply(reader) == [DataPlaneStatus.GONE]
    assert await reply(reader) == [DataPlaneStatus.DONE]
    assert await block(reader) == (bytes(a_block(2)), DataPlaneStatus.DONE)


async def test_slot_reused_during_a_read_is_never_returned_as_good():
    plane = TcpDataPlane(block_bytes=8 << 20)  # more than the buffers of a connection
    await plane.start()
    slot = plane.hold(a_chain(1)[0], a_block(1, 8 << 20))
    async with a_slow_link(plane.port) as (port, go_on):
        reading = asyncio.create_task(asyncio.to_thread(read, plane, port, slot))
        await asyncio.to_thread(go_on.passed, 1 << 16)
        others = [plane.hold(name, a_block(2, 8 << 20)) for name in a_chain(8, "new")]
        assert slot.offset in {other.offset for other in others}
        go_on.set()

        assert await reading == [BlockOutcome.GONE]
    await plane.close()


async def test_bytes_damaged_on_write_are_rejected(plane):
    _, slot = plane.reserve(a_chain(1)[0])
    reader, writer = await plane.dial()
    damaged = bytearray(a_block(1))
    damaged[17] ^= 1

    writer.write(a_request(Slot(slot.offset, slot.generation, crc32c([a_block(1)])), DataPlaneOperation.PUT))
    writer.write(damaged)

    assert await reply(reader) == [DataPlaneStatus.CORRUPT]


async def test_bytes_damaged_on_read_are_noticed_by_the_client(plane):
    slot = plane.hold(a_chain(1)[0], a_block(1))

    async with a_proxy_that_flips_a_byte(plane.port, at=CHALLENGE.size + REPLY.size + 100) as port:
        assert await asyncio.to_thread(read, plane, port, slot) == [BlockOutcome.CORRUPT]


async def test_client_that_stops_midway_is_cut(plane):
    idle_reader, idle_writer = await plane.dial()
    reader, writer = await plane.dial()
    await until(lambda: not any(connection.busy for connection in plane.plane.connections))
    writer.write(MAGIC)
    await until(lambda: any(connection.busy for connection in plane.plane.connections))

    plane.plane.cut_stalled(Nanos(CLOCK.now() + STALLED))

    assert await is_closed(reader)
    idle_writer.write(a_request(Slot(0, 1)))
    assert await reply(idle_reader) == [DataPlaneStatus.GONE]


async def test_slow_handshake_is_cut_although_bytes_arrive():
    clock = ManualClock()
    plane = TcpDataPlane(secret=b"the secret of this deployment", clock=clock)
    await plane.start()
    reader, writer = await plane.connect()
    await until(lambda: plane.plane.connections)
    clock.move(STALLED - 1)
    writer.write(an_opening(plane.namespace.digest))
    assert await challenge(reader) is DataPlaneStatus.AUTHENTICATE
    plane.plane.cut_stalled(clock.now())
    assert plane.plane.connections

    clock.move(1)
    plane.plane.cut_stalled(clock.now())

    assert await is_closed(reader)
    await plane.close()


async def test_slow_request_of_a_proven_client_is_served():
    clock = ManualClock()
    plane = TcpDataPlane(clock=clock)
    await plane.start()
    reader, writer = await plane.dial()
    await until(lambda: not any(connection.busy for connection in plane.plane.connections))
    request = a_request(Slot(0, 1))
    clock.move(STALLED)
    writer.write(request[:1])
    await until(lambda: all(connection.busy for connection in plane.plane.connections))

    clock.move(STALLED - 1)
    plane.plane.cut_stalled(clock.now())

    writer.write(request[1:])
    assert await reply(reader) == [DataPlaneStatus.GONE]
    await plane.close()


async def test_client_that_does_not_read_holds_nobody_up():
    plane = TcpDataPlane(block_bytes=1 << 20)
    await plane.start()
    slot = plane.hold(a_chain(1)[0], a_block(1, 1 << 20))
    reader, writer = await plane.dial()
    writer.transport.pause_reading()
    other_reader, other_writer = await plane.dial()
    before = psutil.Process().memory_info().rss

    writer.write(
        (REQUEST.pack(MAGIC, DataPlaneOperation.GET, WINDOW) + ENTRY.pack(slot.offset, slot.generation, 0) * WINDOW) * 4
    )
    for _ in range(8):
        other_writer.write(a_request(slot))
        assert await reply(other_reader) == [DataPlaneStatus.DONE]
        await block(other_reader, 1 << 20)

    assert psutil.Process().memory_info().rss - before < 32 << 20
    writer.transport.resume_reading()
    for _ in range(4):
        assert await reply(reader) == [DataPlaneStatus.DONE] * WINDOW
        assert await reader.readexactly(WINDOW << 20) == bytes(a_block(1, 1 << 20)) * WINDOW
        assert await reader.readexactly(WINDOW) == bytes(WINDOW)
    await plane.close()


async def test_connections_beyond_the_limit_are_rejected(plane, monkeypatch):
    monkeypatch.setattr(tcp_server, "CONNECTIONS", 2)
    kept = [await plane.dial() for _ in range(2)]

    reader, writer = await plane.connect()
    writer.write(an_opening(plane.namespace.digest))

    assert await is_closed(reader)
    kept[0][1].write(a_request(Slot(0, 1)))
    assert await reply(kept[0][0]) == [DataPlaneStatus.GONE]


def test_hung_node_is_one_miss_at_the_deadline():
    with a_node_that_only_opens() as address:
        transport = TcpTransport(address, b"d" * 16, BLOCK_BYTES, CLOCK, deadline_in(30))
        started = time.monotonic()
        with at_most(20):
            assert transport.get([Slot(0, 1)], [bytearray(BLOCK_BYTES)], deadline_in(0.3)) == [BlockOutcome.GONE]
        assert time.monotonic() - started > 0.25

        with at_most(20):
            for _ in range(100):
                assert transport.get([Slot(0, 1)], [bytearray(BLOCK_BYTES)], deadline_in(0.3)) == [BlockOutcome.GONE]
        transport.close()


def test_closing_ends_calls_of_other_threads():
    with a_node_that_only_opens() as address, ThreadPoolExecutor(1) as threads:
        transport = TcpTransport(address, b"d" * 16, BLOCK_BYTES, CLOCK, deadline_in(30))
        reading = threads.submit(transport.get, [Slot(0, 1)], [bytearray(BLOCK_BYTES)], deadline_in(60))
        eventually(lambda: transport.busy)

        transport.close()

        assert reading.result(60) == [BlockOutcome.GONE]
        assert transport.get([Slot(0, 1)], [bytearray(BLOCK_BYTES)], deadline_in(60)) == [BlockOutcome.GONE]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        REPLY.pack(MAGIC, 2) + bytes([DataPlaneStatus.DONE, DataPlaneStatus.DONE]),  # in reply to a request of one
        REPLY.pack(MAGIC, 1) + bytes([77]),
        REPLY.pack(MAGIC, 1) + bytes([DataPlaneStatus.REFUSED]),
        REPLY.pack(MAGIC, 1) + bytes([DataPlaneStatus.DONE]) + bytes(10),  # and no further byte
    ],
)
def test_invalid_reply_of_a_node_is_a_miss(nonsense):
    with a_node_that_only_opens(and_says=nonsense) as address:
        transport = TcpTransport(address, b"d" * 16, BLOCK_BYTES, CLOCK, deadline_in(30))

        assert transport.get([Slot(0, 1)], [bytearray(BLOCK_BYTES)], deadline_in(30)) == [BlockOutcome.GONE]

        transport.close()


@contextmanager
def a_node_that_only_opens(and_says: bytes = b"") -> Iterator[str]:
    """Run a node that answers only the opening of one connection, or that answers everything alike and hangs up."""

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(OPENING.size, socket.MSG_WAITALL)
            connection.sendall(CHALLENGE.pack(MAGIC, DataPlaneStatus.DONE, bytes(NONCE_BYTES)))
            if and_says:
                connection.recv(REQUEST.size + ENTRY.size, socket.MSG_WAITALL)
                connection.sendall(and_says)
            else:
                over.wait(60)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join()


@asynccontextmanager
async def a_proxy_that_flips_a_byte(port: int, at: int) -> AsyncIterator[int]:
    """Run a proxy for one connection that flips a byte from the server, by its position."""
    over = asyncio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_server_reader, to_server = await asyncio.open_connection("127.0.0.1", port)

        async def forth() -> None:
            while data := await reader.read(65536):
                to_server.write(data)
            to_server.close()

        async def back() -> None:
            passed = 0
            while data := bytearray(await to_server_reader.read(65536)):
                if passed <= at < passed + len(data):
                    data[at - passed] ^= 1
                passed += len(data)
                writer.write(data)
            writer.close()

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forth())
            tasks.create_task(back())
        await writer.wait_closed()
        over.set()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]
        async with asyncio.timeout(60):
            await over.wait()


class SlowLink:
    """Proxy in a thread that forwards everything to the server, and back only a given number of bytes."""

    def __init__(self, port: int):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(60)
        self._server_port = port
        self.port = self._listener.getsockname()[1]
        self._open = threading.Event()
        self._bytes = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def set(self) -> None:
        self._open.set()

    def passed(self, count: int) -> None:
        """Wait until that many bytes came back."""
        eventually(lambda: self._bytes >= count)

    def close(self) -> None:
        self._open.set()
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.create_connection(("127.0.0.1", self._server_port), 5) as server:
            forth = threading.Thread(target=self._forth, args=(client, server), daemon=True)
            forth.start()
            with suppress(OSError):
                while data := server.recv(1 << 16):
                    if self._bytes >= 1 << 17:
                        self._open.wait(60)
                    client.sendall(data)
                    self._bytes += len(data)
            client.shutdown(socket.SHUT_RDWR)
            forth.join()

    def _forth(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)


@asynccontextmanager
async def a_slow_link(port: int) -> AsyncIterator[tuple[int, SlowLink]]:
    link = SlowLink(port)
    yield link.port, link
    await asyncio.to_thread(link.close)


def read(plane: TcpDataPlane, port: int, slot: Slot, key: AuthenticationKey | None = None) -> list[BlockOutcome]:
    transport = TcpTransport(
        f"127.0.0.1:{port}", plane.namespace.digest, plane.block_bytes, CLOCK, deadline_in(30), key
    )
    try:
        return transport.get([slot], [bytearray(plane.block_bytes)], deadline_in(30))
    finally:
        transport.close()
