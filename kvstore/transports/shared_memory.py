"""The way between processes of one host: the client maps the node's pool and copies for itself.

The pool's descriptor is handed out over a Unix socket (SCM_RIGHTS), to whoever names a namespace that is open. One
exchange a connection: ``magic ‖ digest (16)`` one way, ``magic ‖ status (1) ‖ 3 unused ‖ capacity in bytes (8)`` and
the descriptor the other way; integers are big-endian.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Sequence

from kvstore.buffers import Block, MutableBlock, gather_summing, pieces, scatter_summing, size_of
from kvstore.clock import Clock, Nanos, seconds
from kvstore.errors import NamespaceUnknown, StoreUnreachable
from kvstore.messages import GONE, Fetched, Outcome, Slot
from kvstore.tiers.shared_memory import Mapping, SharedMemoryTier

MAGIC = b"FKVM"
QUESTION = struct.Struct(">4s16s")
ANSWER = struct.Struct(">4sB3xQ")
GRANTED, REFUSED = 0, 1

POPULATE_BYTES = 1 << 30
"""Of a pool, set up in a client's page tables when it opens: 0.3 s a GiB once, instead of a fault a page later."""

HANDOUT_SECONDS = 2.0  # for a client to ask its question
HANDOUTS = 32  # at a time


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
        self._mapping = _fetch(path, digest, seconds(deadline - clock.now()))

    def get(self, slots: Sequence[Slot], into: Sequence[MutableBlock], deadline: Nanos) -> list[Outcome]:
        outcomes = []
        for slot, block in zip(slots, into, strict=True):
            late = self._clock.now() >= deadline
            outcomes.append(Outcome.GONE if late else self._get(slot, block))
        return outcomes

    def put(self, slots: Sequence[Slot], blocks: Sequence[Block], deadline: Nanos) -> list[Outcome]:
        put = zip(slots, self.put_summing(slots, blocks, deadline), strict=True)
        return [
            Outcome.CORRUPT if each.outcome is Outcome.MOVED and each.crc32c != slot.crc32c else each.outcome
            for slot, each in put
        ]

    def put_summing(self, slots: Sequence[Slot], blocks: Sequence[Block], deadline: Nanos) -> list[Fetched]:
        answers = []
        for slot, block in zip(slots, blocks, strict=True):
            late = self._clock.now() >= deadline
            answers.append(GONE if late else self._put(slot, block))
        return answers

    def close(self) -> None:
        """Nothing to do: the mapping goes with its last user, which may be a thread that still copies."""

    def _get(self, slot: Slot, into: MutableBlock) -> Outcome:
        parts = pieces(into)
        assert size_of(parts) == self._block_bytes, (size_of(parts), self._block_bytes)
        if not self._mapping.holds(slot):
            return Outcome.GONE
        if scatter_summing(self._mapping.block(slot.offset, self._block_bytes), parts) == slot.crc32c:
            return Outcome.MOVED
        return Outcome.CORRUPT if self._mapping.holds(slot) else Outcome.GONE

    def _put(self, slot: Slot, block: Block) -> Fetched:
        parts = pieces(block)
        assert size_of(parts) == self._block_bytes, (size_of(parts), self._block_bytes)
        if not self._mapping.holds(slot):
            return GONE
        checksum = gather_summing(parts, self._mapping.block(slot.offset, self._block_bytes))
        return Fetched(Outcome.MOVED, checksum) if self._mapping.holds(slot) else GONE


def _fetch(path: str, digest: bytes, timeout_seconds: float) -> Mapping:
    files: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(max(timeout_seconds, 0.001))
            connection.connect(path)
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
        raise StoreUnreachable(f"no shared memory from unix:{path}: {error}") from error
    finally:
        for file in files:
            os.close(file)
    mapping.populate(POPULATE_BYTES)
    return mapping


class MemoryHandout:
    """The node's end: hands the pool out."""

    def __init__(self, listener: socket.socket, tier: SharedMemoryTier, knows: Callable[[bytes], bool]):
        """Serves from `run` on.

        Args:
            listener: A listening Unix socket, not blocking; the caller closes it.
            tier: Whose memory to hand out.
            knows: Whether the namespace with that digest is open.
        """
        self._listener = listener
        self._tier = tier
        self._knows = knows
        self._room = asyncio.Semaphore(HANDOUTS)

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._room.acquire()
                connection, _ = await loop.sock_accept(self._listener)
                tasks.create_task(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            with connection, contextlib.suppress(OSError, TimeoutError):  # a client that left, or says nothing
                question = b""
                async with asyncio.timeout(HANDOUT_SECONDS):
                    while len(question) < QUESTION.size:
                        received = await loop.sock_recv(connection, QUESTION.size - len(question))
                        if not received:
                            return
                        question += received
                magic, digest = QUESTION.unpack(question)
                if magic != MAGIC:
                    return
                if self._knows(digest):
                    answer = ANSWER.pack(MAGIC, GRANTED, self._tier.capacity_bytes)
                    socket.send_fds(connection, [answer], [self._tier.fileno()])
                else:
                    connection.send(ANSWER.pack(MAGIC, REFUSED, 0))
        finally:
            self._room.release()
