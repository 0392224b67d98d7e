"""The way between processes of one host: the client maps the node's pool and copies for itself.

The pool's descriptor is handed out over a Unix socket (SCM_RIGHTS), to whoever names a namespace that is open. One
exchange a connection: ``magic ‖ digest (16)`` one way, ``magic ‖ status (1) ‖ 3 unused ‖ capacity in bytes (8)`` and
the descriptor the other way; integers are big-endian. A connection that begins with the magic `CALLS` instead is for
the calls of `kvstore.protocol.calls`.
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
from kvstore.transports.checksums import fetch_result

MAGIC = b"FKVM"
CALLS = b"FKVC"
QUESTION = struct.Struct(">4s16s")
ANSWER = struct.Struct(">4sB3xQ")
GRANTED, REFUSED = 0, 1

POPULATE_BYTES = 1 << 30
"""Of a pool, set up in a client's page tables when it opens: 0.3 s a GiB once, instead of a fault a page later."""

BATCH_BYTES = 16 << 20  # copied between two looks at the clock: one to two milliseconds

OUTCOMES = (BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.CORRUPT)  # by the number that native code gives them

HANDOUT_SECONDS = 2.0  # for a client to ask its question
HANDOUTS = 32  # connections that have not asked yet; when one more comes, who has been silent for longest goes
QUEUE_SECONDS = 1.0  # that a client waits where too many others do; then it goes another way, and tries again by and by
OUT_OF_FILES_SECONDS = 0.1  # until a client that waits is looked at again


Answer = TypeVar("Answer")


class SharedMemoryTransport:
    """Reads and writes the pool in place of the node. See `kvstore.ports.Transport`."""

    def __init__(self, path: str, digest: bytes, block_bytes: int, clock: Clock, deadline: Nanos):
        """Fetches and maps the pool.

        Raises:
            StoreUnreachable: Nobody answers on that socket in time, or the memory cannot be mapped.
            NamespaceUnknown: The node does not know the namespace.
        """
        self._block_bytes = block_bytes
        self._clock = clock
        self._mapping = _fetch(path, digest, clock, deadline)

    def get(self, slots: AnySlots, into: Sequence[MutableBlock], deadline: Nanos) -> list[BlockOutcome]:
        def move(packed: bytes, parts: list[ByteArray]) -> list[BlockOutcome]:
            memory = self._mapping
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
            memory = self._mapping
            codes, sums = checksums.put_blocks(
                memory.bytes, memory.stamps, PAGE_BYTES, packed, self._block_bytes, parts
            )
            return [fetch_result(OUTCOMES[code], checksum) for code, checksum in zip(codes, sums, strict=True)]

        return self._move(slots, blocks, deadline, move, GONE)

    def get_shard(
        self, slots: AnySlots, shard: RankShard, into: Sequence[MutableBlock], deadline: Nanos
    ) -> list[BlockOutcome]:
        """As `get`, of what one rank holds of each block; all of the block is verified."""
        assert len(slots) == len(into), (len(slots), len(into))
        return [
            self._get_one_shard(slot, shard, pieces(each), deadline) for slot, each in zip(slots, into, strict=True)
        ]

    def put_shard(
        self, slots: AnySlots, shard: RankShard, blocks: Sequence[Block], deadline: Nanos
    ) -> list[int | None]:
        """Write what one rank holds of blocks into reserved slots: what it adds to their checksums.

        None for a block that was not written: its place is another's by now, or it is too late.
        """
        assert len(slots) == len(blocks), (len(slots), len(blocks))
        return [
            self._put_one_shard(slot, shard, pieces(each), deadline) for slot, each in zip(slots, blocks, strict=True)
        ]

    def close(self) -> None:
        """Nothing to do: the mapping goes with its last user, which may be a thread that still copies."""

    def _get_one_shard(self, slot: Slot, shard: RankShard, parts: list[ByteArray], deadline: Nanos) -> BlockOutcome:
        place = self._place(slot, deadline)
        if place is None:
            return BlockOutcome.GONE
        checksum = shard.get(place, parts)
        if checksum == slot.crc32c:
            return BlockOutcome.MOVED
        return BlockOutcome.CORRUPT if self._mapping.holds(slot) else BlockOutcome.GONE

    def _put_one_shard(self, slot: Slot, shard: RankShard, parts: list[ByteArray], deadline: Nanos) -> int | None:
        place = self._place(slot, deadline)
        if place is None:
            return None
        added = shard.put(parts, place)
        return added if self._mapping.holds(slot) else None

    def _place(self, slot: Slot, deadline: Nanos) -> ByteArray | None:
        """A block's bytes; None when they are another's, or it is too late."""
        if self._clock.now() >= deadline or slot.offset + self._block_bytes > self._mapping.bytes.nbytes:
            return None
        return self._mapping.block(slot.offset, self._block_bytes) if self._mapping.holds(slot) else None

    def _move(
        self,
        slots: AnySlots,
        blocks: "Sequence[Block] | Sequence[MutableBlock]",
        deadline: Nanos,
        move: Callable[[bytes, list[ByteArray]], list[Answer]],
        late: Answer,
    ) -> list[Answer]:
        """A batch at a time, as long as there is time; what came of each block."""
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


def _fetch(path: str, digest: bytes, clock: Clock, deadline: Nanos) -> Mapping:
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
            raise StoreUnreachable(f"unix:{path} sent no memory")
        mapping = Mapping(files[0], capacity_bytes)
    except (OSError, ValueError) as error:
        raise StoreUnreachable(f"no shared memory from unix:{path}: {reason(error)}") from error
    finally:
        for file in files:
            os.close(file)
    mapping.populate(POPULATE_BYTES)
    return mapping


class MemoryHandout:
    """The node's end: hands the pool out."""

    def __init__(
        self,
        listener: socket.socket,
        tier: SharedMemoryTier,
        knows: Callable[[bytes], bool],
        take_caller: Callable[[socket.socket], Awaitable[None]] | None = None,
    ):
        """Serves from `run` on.

        Args:
            listener: A listening Unix socket, not blocking; the caller closes it.
            tier: Whose memory to hand out.
            knows: Whether the namespace with that digest is open.
            take_caller: Takes a connection over that is for calls; None: they are not served here.
        """
        self._listener = listener
        self._tier = tier
        self._knows = knows
        self._take_caller = take_caller
        self._silent: dict[int, asyncio.Task[None]] = {}  # connections that have not asked yet, by number; oldest first

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            for number in itertools.count():
                connection = await self._accepted(loop)
                if len(self._silent) >= HANDOUTS:
                    self._silent.pop(next(iter(self._silent))).cancel()
                self._silent[number] = tasks.create_task(self._serve(number, connection))
                await asyncio.sleep(0)  # it may have asked already; and accepting does not wait while there are more

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
        with connection, contextlib.suppress(OSError, TimeoutError):  # a client that left, or says nothing
            try:
                question = await _question(connection)
            finally:
                self._silent.pop(number, None)
            if len(question) < QUESTION.size:
                return
            magic, digest = QUESTION.unpack(question)
            if magic == CALLS and self._take_caller is not None:
                await self._take_caller(socket.socket(fileno=connection.detach()))
            if magic != MAGIC:
                return
            if self._knows(digest):
                answer = ANSWER.pack(MAGIC, GRANTED, self._tier.capacity_bytes)
                socket.send_fds(connection, [answer], [self._tier.fileno()])
            else:
                connection.send(ANSWER.pack(MAGIC, REFUSED, 0))


async def _question(connection: socket.socket) -> bytes:
    """What a client asks; less where it leaves before that."""
    loop = asyncio.get_running_loop()
    question = b""
    async with asyncio.timeout(HANDOUT_SECONDS):
        while len(question) < QUESTION.size:
            received = await loop.sock_recv(connection, QUESTION.size - len(question))
            if not received:
                break
            question += received
    return question
