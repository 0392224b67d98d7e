"""The TCP data plane against clients that do not follow its rules."""

import asyncio
import random
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import numpy as np
import pytest

from kvstore.buffers import crc32c, pieces
from kvstore.clock import Nanos, nanos
from kvstore.eviction.lru import LruEviction
from kvstore.machine import BlockMachine
from kvstore.messages import Claim, Outcome, Slot
from kvstore.monotonic import MonotonicClock
from kvstore.tiers.memory import PrivateMemoryTier
from kvstore.transports.frames import MAGIC, OPENING, REPLY, REQUEST, Operation, Status
from kvstore.transports.tcp import TcpTransport
from kvstore.transports.tcp_server import STALLED, DataPlane
from tests.kv_builders import BLOCK_BYTES, LEASE, a_block, a_chain, a_namespace

pytestmark = pytest.mark.integration

CLOCK = MonotonicClock()


class Plane:
    """A data plane with one namespace, on this test's event loop."""

    def __init__(self, block_bytes: int = BLOCK_BYTES):
        self.namespace = a_namespace(block_bytes=block_bytes)
        self.block_bytes = block_bytes
        self.machine = BlockMachine(8 * block_bytes, LruEviction(), epoch=1)
        self.machine.open(self.namespace, Nanos(0))
        self.tier = PrivateMemoryTier(8 * block_bytes)
        self.plane = DataPlane(self.machine, self.tier, CLOCK)
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
        """Connected and bound to the namespace."""
        reader, writer = await self.connect()
        writer.write(OPENING.pack(MAGIC, Operation.OPEN, self.namespace.digest))
        assert (await reply(reader))[0] is Status.DONE
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
    plane = Plane()
    await plane.start()
    yield plane
    await plane.close()


async def reply(reader: asyncio.StreamReader) -> tuple[Status, int, int]:
    async with asyncio.timeout(5):
        magic, status, length, checksum = REPLY.unpack(await reader.readexactly(REPLY.size))
    assert magic == MAGIC
    return Status(status), length, checksum


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        async with asyncio.timeout(5):
            return await reader.read() == b""
    except ConnectionResetError:
        return True


def a_get(slot: Slot, length: int = BLOCK_BYTES, magic: bytes = MAGIC, operation: int = Operation.GET) -> bytes:
    return REQUEST.pack(magic, operation, slot.offset, slot.generation, length, 0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        random.Random(1).randbytes(4096),
        OPENING.pack(b"FKV2", Operation.OPEN, b"d" * 16),
        a_get(Slot(0, 1)),  # before OPEN
    ],
)
async def test_garbage_instead_of_an_opening_ends_the_connection(plane, garbage):
    reader, writer = await plane.connect()

    writer.write(garbage)

    assert await is_closed(reader)


@pytest.mark.parametrize(
    "garbage",
    [
        a_get(Slot(0, 1), length=BLOCK_BYTES + 1),
        a_get(Slot(0, 1), length=0xFFFFFFFF, operation=Operation.PUT),
        a_get(Slot(0, 1), magic=b"FKVM"),
        a_get(Slot(0, 1), operation=9),
        OPENING.pack(MAGIC, Operation.OPEN, b"d" * 16),  # a second one
    ],
)
async def test_garbage_after_the_opening_ends_the_connection_and_no_other(plane, garbage):
    slot = plane.hold(a_chain(1)[0], a_block(1))
    reader, writer = await plane.dial()
    other_reader, other_writer = await plane.dial()

    writer.write(garbage)

    assert await is_closed(reader)
    other_writer.write(a_get(slot))
    assert await reply(other_reader) == (Status.DONE, BLOCK_BYTES, slot.crc32c)


async def test_a_slot_of_another_namespace_is_gone(plane):
    slot = plane.hold(a_chain(1)[0], a_block(1))
    other = a_namespace(model="other")
    plane.machine.open(other, Nanos(0))
    reader, writer = await plane.connect()
    writer.write(OPENING.pack(MAGIC, Operation.OPEN, other.digest))
    assert (await reply(reader))[0] is Status.DONE

    writer.write(a_get(slot))

    assert await reply(reader) == (Status.GONE, 0, 0)


async def test_a_writer_whose_reservation_ends_halfway_touches_nothing_more(plane):
    _, slot = plane.reserve(a_chain(1, "late")[0])
    reader, writer = await plane.dial()
    late = bytes(a_block(1))
    head = REQUEST.pack(MAGIC, Operation.PUT, slot.offset, slot.generation, BLOCK_BYTES, crc32c([a_block(1)]))
    writer.write(head + late[:100])
    async with asyncio.timeout(5):
        while next(iter(plane.plane.connections))._filled != 100:
            await asyncio.sleep(0)
    plane.machine.expire(LEASE)
    plane.settle()
    present = plane.hold(a_chain(1, "new")[0], a_block(2))
    assert present.offset == slot.offset

    writer.write(late[100:] + a_get(present))

    assert await reply(reader) == (Status.GONE, 0, 0)
    assert await reply(reader) == (Status.DONE, BLOCK_BYTES, present.crc32c)
    assert await reader.readexactly(BLOCK_BYTES) == bytes(a_block(2))


async def test_bytes_damaged_on_the_way_in_are_not_accepted(plane):
    _, slot = plane.reserve(a_chain(1)[0])
    reader, writer = await plane.dial()
    damaged = bytearray(a_block(1))
    damaged[17] ^= 1

    writer.write(REQUEST.pack(MAGIC, Operation.PUT, slot.offset, slot.generation, BLOCK_BYTES, crc32c([a_block(1)])))
    writer.write(damaged)

    assert await reply(reader) == (Status.CORRUPT, 0, 0)


async def test_bytes_damaged_on_the_way_out_are_noticed_by_the_client(plane):
    slot = plane.hold(a_chain(1)[0], a_block(1))

    def read(port: int) -> list[Outcome]:
        transport = TcpTransport(f"127.0.0.1:{port}", plane.namespace.digest, BLOCK_BYTES, CLOCK, soon(5))
        outcomes = transport.get([slot], [bytearray(BLOCK_BYTES)], soon(5))
        transport.close()
        return outcomes

    async with a_proxy_that_flips_a_byte(plane.port, at=REPLY.size * 2 + 100) as port:
        assert await asyncio.to_thread(read, port) == [Outcome.CORRUPT]


async def test_a_client_that_stops_in_the_middle_is_cut(plane):
    idle_reader, idle_writer = await plane.dial()
    reader, writer = await plane.dial()
    writer.write(MAGIC)
    async with asyncio.timeout(5):
        while not any(connection._filled for connection in plane.plane.connections):
            await asyncio.sleep(0)

    plane.plane.cut_stalled(Nanos(CLOCK.now() + STALLED))

    assert await is_closed(reader)
    idle_writer.write(a_get(Slot(0, 1)))
    assert await reply(idle_reader) == (Status.GONE, 0, 0)


async def test_a_client_that_does_not_read_does_not_fill_the_nodes_memory():
    plane = Plane(block_bytes=1 << 20)
    await plane.start()
    slot = plane.hold(a_chain(1)[0], a_block(1, 1 << 20))
    reader, writer = await plane.dial()
    writer.transport.pause_reading()

    writer.write(a_get(slot, length=1 << 20) * 200)
    (connection,) = plane.plane.connections
    async with asyncio.timeout(5):
        while not connection._paused:
            await asyncio.sleep(0.01)
    waiting = connection._transport.get_write_buffer_size()

    assert waiting <= 3 << 20
    writer.transport.resume_reading()
    for _ in range(200):
        assert await reply(reader) == (Status.DONE, 1 << 20, slot.crc32c)
        await reader.readexactly(1 << 20)
    await plane.close()


def test_a_node_that_hangs_is_a_miss_at_the_deadline_and_costs_nothing_after():
    with a_node_that_only_opens() as address:
        transport = TcpTransport(address, b"d" * 16, BLOCK_BYTES, CLOCK, soon(5))
        started = time.monotonic()
        assert transport.get([Slot(0, 1)], [bytearray(BLOCK_BYTES)], soon(0.3)) == [Outcome.GONE]
        first = time.monotonic() - started

        for _ in range(100):
            assert transport.get([Slot(0, 1)], [bytearray(BLOCK_BYTES)], soon(0.3)) == [Outcome.GONE]

        assert 0.25 < first < 1
        assert time.monotonic() - started < first + 0.2
        transport.close()


@contextmanager
def a_node_that_only_opens() -> Iterator[str]:
    """Answers the opening of one connection, and then nothing more."""

    def answer() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(OPENING.size, socket.MSG_WAITALL)
            connection.sendall(REPLY.pack(MAGIC, Status.DONE, 0, 0))
            over.wait(10)

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        over.set()
        thread.join()


@asynccontextmanager
async def a_proxy_that_flips_a_byte(port: int, at: int) -> AsyncIterator[int]:
    """Counts bytes from the server to the client; for one connection."""
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
        async with asyncio.timeout(5):
            await over.wait()


def soon(seconds: float) -> Nanos:
    return Nanos(CLOCK.now() + nanos(seconds))
