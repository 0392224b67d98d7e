"""Shared-memory transport: a client on the node's host maps the pool, and copies blocks itself.

The node sends the pool's descriptor over a Unix socket (SCM_RIGHTS) to every client that names an open namespace. Each
connection is used for one request and its answer. The client sends ``magic ‖ digest (16)``; the node answers ``magic ‖
status (1) ‖ 3 unused ‖ capacity in bytes (8)`` with the descriptor. Integers are big-endian. A connection that begins
with the magic `CALLS` instead carries the calls of `kvstore.protocol.calls`.

A reader computes the CRC-32C of each whole block while it copies the block (`kvstore.native.checksums`). It reports a
block with a wrong checksum as corrupt, or as gone if the place belongs to another block now. The entry "checksum" in
docs/glossary.md names the other places where checksums are compared.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from kvstore.buffers import Block, ByteArray, MutableBlock, in_pieces, pieces
from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import NamespaceUnknown, StoreUnreachable, reason
from kvstore.layouts.rank_shards import RankShard
from kvstore.messages import GONE, SLOT, AnySlots, BlockOutcome, FetchResult, Slot, Slots
from kvstore.native import checksums
from kvstore.net.unix_sockets import OUT_OF_FILES, connect
from kvstore.pool.extents import PAGE_BYTES
from kvstore.tiers.shared_memory import Mapping, SharedMemoryTier
from kvstore.transports.put_summing import fetch_result

MAGIC = b"FKVM"
CALLS = b"FKVC"
QUESTION = struct.Struct(">4s16s")
ANSWER = struct.Struct(">4sB3xQ")
GRANTED, REFUSED = 0, 1

POPULATE_BYTES = 1 << 30
"""Maximum number of bytes of a pool that a client enters into its page tables when it maps the pool. This takes 0.3 s
for each GiB, and saves page faults later."""

BATCH_BYTES = 16 << 20  # bytes that are copied between two checks of the deadline; this takes one to two milliseconds

# The native code returns an outcome as a number, which is an index into this tuple.
OUTCOMES = (BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.CORRUPT)

HANDOUT_SECONDS = 2.0  # time after which the node closes a connection on which the client has not sent its request
HANDOUTS = 32  # maximum number of connections that have sent no request yet; a further one replaces the oldest one
QUEUE_SECONDS = 1.0  # maximum wait of a client for a connection to a busy node; it then uses another data path
OUT_OF_FILES_SECONDS = 0.1  # pause before the next `accept` if the process has no free file descriptor


Answer = TypeVar("Answer")


class SharedMemoryTransport:
    """Copies blocks between a client and the pool of a node on the same host, which the client has mapped."""

    def __init__(self, path: str, digest: bytes, block_bytes: int, clock: Clock, deadline: Nanos):
        """Fetch the pool's descriptor, and map the pool.

        Raises:
            StoreUnreachable: The socket does not answer in time, or the memory cannot be mapped.
            NamespaceUnknown: The node does not know the namespace.
        """
        self._block_bytes = block_bytes
        self._clock = clock
        self.mapping = _fetch_pool(path, digest, clock, deadline)

    def get(self, slots: AnySlots, into: Sequence[MutableBlock], deadline: Nanos) -> list[BlockOutcome]:
        def move(packed: bytes, parts: list[ByteArray]) -> list[BlockOutcome]:
            memory = self.mapping
            codes = checksums.get_blocks(memory.bytes, memory.stamps, PAGE_BYTES, packed, self._block_bytes, parts)
            return [OUTCOMES[code] for code in codes]

        return self._move(slots, into, deadline, move, BlockOutcome.GONE)

    def put(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[BlockOutcome]:
        put = zip(slots, self.put_summing(slots, blocks, deadline), strict=True)
        return [
            BlockOutcome.CORRUPT if each.outcome is BlockOutcome.MOVED and each.crc32c != slot.crc32c else each.outcome
            for slot, each in put
        ]

    def put_summing(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[FetchResult]:
        def move(packed: bytes, parts: list[ByteArray]) -> list[FetchResult]:
            memory = self.mapping
            codes, sums = checksums.put_blocks(
                memory.bytes, memory.stamps, PAGE_BYTES, packed, self._block_bytes, parts
            )
            return [fetch_result(OUTCOMES[code], checksum) for code, checksum in zip(codes, sums, strict=True)]

        return self._move(slots, blocks, deadline, move, GONE)

    def get_shard(
        self, slots: AnySlots, shard: RankShard, into: Sequence[MutableBlock], deadline: Nanos
    ) -> list[BlockOutcome]:
        """Copy one rank's shard of each block as `get` does; the checksum of the whole block is verified."""
        assert len(slots) == len(into), (len(slots), len(into))
        return [
            self._get_one_shard(slot, shard, pieces(each), deadline) for slot, each in zip(slots, into, strict=True)
        ]

    def put_shard(
        self, slots: AnySlots, shard: RankShard, blocks: Sequence[Block], deadline: Nanos
    ) -> list[int | None]:
        """Write one rank's shard of each block into reserved slots.

        Return for each block what the shard contributes to the block's checksum (`RankShard.put`).

        The result is None for a block that was not written: its place is outside the pool or belongs to another block, or
        the deadline has passed.
        """
        assert len(slots) == len(blocks), (len(slots), len(blocks))
        return [
            self._put_one_shard(slot, shard, pieces(each), deadline) for slot, each in zip(slots, blocks, strict=True)
        ]

    def close(self) -> None:
        """Do nothing, because another thread may still be copying.

        Python ends the mapping when no thread uses it any more.
        """

    def _get_one_shard(self, slot: Slot, shard: RankShard, parts: list[ByteArray], deadline: Nanos) -> BlockOutcome:
        place = self._place(slot, deadline)
        if place is None:
            return BlockOutcome.GONE
        checksum = shard.get(place, parts)
        if checksum == slot.crc32c:
            return BlockOutcome.MOVED
        return BlockOutcome.CORRUPT if self.mapping.holds(slot) else BlockOutcome.GONE

    def _put_one_shard(self, slot: Slot, shard: RankShard, parts: list[ByteArray], deadline: Nanos) -> int | None:
        place = self._place(slot, deadline)
        if place is None:
            return None
        added = shard.put(parts, place)
        return added if self.mapping.holds(slot) else None

    def _place(self, slot: Slot, deadline: Nanos) -> ByteArray | None:
        """Return a view of a block's bytes.

        Return None if the place is outside the pool or belongs to another block, or if the deadline has passed.
        """
        if self._clock.now() >= deadline or slot.offset + self._block_bytes > self.mapping.bytes.nbytes:
            return None
        return self.mapping.block(slot.offset, self._block_bytes) if self.mapping.holds(slot) else None

    def _move(
        self,
        slots: AnySlots,
        blocks: "Sequence[Block] | Sequence[MutableBlock]",
        deadline: Nanos,
        move: Callable[[bytes, list[ByteArray]], list[Answer]],
        late: Answer,
    ) -> list[Answer]:
        """Copy blocks in batches by the function `move`, and return the result of each block.

        The result is `late` for blocks that were not copied because the deadline had passed.
        """
        assert len(slots) == len(blocks), (len(slots), len(blocks))
        packed = slots.packed if isinstance(slots, Slots) else Slots.of(slots).packed
        step = max(1, BATCH_BYTES // self._block_bytes)
        answers: list[Answer] = []
        for start in range(0, len(blocks), step):
            if self._clock.now() >= deadline:
                return answers + [late] * (len(blocks) - start)
            parts = in_pieces(blocks[start : start + step], self._block_bytes)
            answers += move(packed[start * SLOT.size : (start + step) * SLOT.size], parts)
        return answers


def _fetch_pool(path: str, digest: bytes, clock: Clock, deadline: Nanos) -> Mapping:
    files: list[int] = []
    try:
        with connect(path, min(QUEUE_SECONDS, seconds(deadline - clock.now()))) as connection:
            connection.settimeout(max(seconds(deadline - clock.now()), 0.001))
            connection.sendall(QUESTION.pack(MAGIC, digest))
            answer, files, _, _ = socket.recv_fds(connection, ANSWER.size, 1)
        if len(answer) != ANSWER.size or answer[:4] != MAGIC:
            raise StoreUnreachable(f"unix:{path} is not the memory socket of a store node")
        _, status, capacity_bytes = ANSWER.unpack(answer)
        if status != GRANTED:
            raise NamespaceUnknown(digest)
        if not files:
            raise StoreUnreachable(f"unix:{path} sent no file descriptor")
        mapping = Mapping(files[0], capacity_bytes)
    except (OSError, ValueError) as error:
        raise StoreUnreachable(f"no shared memory from unix:{path}: {reason(error)}") from error
    finally:
        for file in files:
            os.close(file)
    mapping.populate(POPULATE_BYTES)
    return mapping


class MemoryHandout:
    """The memory handout: serves the socket at which processes of the node's host get the pool's memory."""

    def __init__(
        self,
        listener: socket.socket,
        tier: SharedMemoryTier,
        knows: Callable[[bytes], bool],
        take_caller: Callable[[socket.socket], Awaitable[None]] | None = None,
    ):
        """Prepare the handout; `run` serves it.

        Args:
            listener: A listening, non-blocking Unix socket; the caller closes it.
            tier: The pool.
            knows: Function that returns whether the namespace with a digest is open.
            take_caller: Function that takes over a connection for calls; None if calls are not served here.
        """
        self._listener = listener
        self._tier = tier
        self._knows = knows
        self._take_caller = take_caller
        # Tasks of the connections that have not sent their request yet, by number, the oldest first.
        self._waiting: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve connections until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                connection = await self._accepted(loop)
                if len(self._waiting) >= HANDOUTS:
                    self._waiting.pop(next(iter(self._waiting))).cancel()
                self._waiting[number] = tasks.create_task(self._serve(number, connection))
                await asyncio.sleep(0)  # lets the task start, and read a request that has already arrived

    async def _accepted(self, loop: asyncio.AbstractEventLoop) -> socket.socket:
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno not in OUT_OF_FILES:
                    raise
                await asyncio.sleep(OUT_OF_FILES_SECONDS)
            else:
                return connection

    async def _serve(self, number: int, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, TimeoutError):  # raised if the client leaves or stays silent
            try:
                request = await _read_request(connection)
            finally:
                self._waiting.pop(number, None)
            if len(request) < QUESTION.size:
                return
            magic, digest = QUESTION.unpack(request)
            if magic == CALLS and self._take_caller is not None:
                await self._take_caller(socket.socket(fileno=connection.detach()))
            if magic != MAGIC:
                return
            if self._knows(digest):
                answer = ANSWER.pack(MAGIC, GRANTED, self._tier.capacity_bytes)
                socket.send_fds(connection, [answer], [self._tier.fileno()])
            else:
                connection.send(ANSWER.pack(MAGIC, REFUSED, 0))


async def _read_request(connection: socket.socket) -> bytes:
    """Read a client's request; return an incomplete request if the client closes the connection."""
    loop = asyncio.get_running_loop()
    request = b""
    async with asyncio.timeout(HANDOUT_SECONDS):
        while len(request) < QUESTION.size:
            received = await loop.sock_recv(connection, QUESTION.size - len(request))
            if not received:
                break
            request += received
    return request
