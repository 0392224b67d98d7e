"""NIXL transport: the client reads and writes the pool of a node on another host by RDMA, without the node's processor.

Rules:

1. A block that was read is MOVED if its checksum is right and the stamp of its place is still the slot's generation
   (stamps: `kvstore.tiers.shared_memory`, rule 3). The stamp is read after the bytes. Generations are never reused, so
   the place belonged to the block during the whole read.
   A block with a wrong checksum and the right stamp is CORRUPT; any other block is GONE.
2. A block is written only if the stamp of its place is the slot's generation before the write. It is MOVED if the stamp
   is still the same after the write. If the writer's reservation ends during the write, the place may get another
   block, which the write damages. The readers of that block then find a wrong checksum.
3. NIXL has no deadlines, and a late transfer may write to its destination at any time. After the first failure or
   missed deadline, the agent is therefore closed before the call returns. This ends all its transfers, so the caller
   can reuse its buffers. Because closing takes time, calls stop waiting for transfers when only the time `CLOSING` is
   left until their deadline.
4. When a circuit breaker allows it, the next call begins to open a new agent in the background. The client first
   requests the node's offer again, because the node may have a new agent. Until the agent is open, every block is GONE
   at once.
5. UCX has no authentication: every program that reaches its ports and knows an agent's metadata can read and write the
   pool. The control plane gives the metadata only to authenticated clients; the network has to protect the ports.
"""

import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kvstore.buffers import Block, ByteArray, MutableBlock, pieces, size_of
from kvstore.circuit_breaker import CircuitBreaker
from kvstore.clock import MILLISECOND, SECOND, Clock, Nanos, seconds
from kvstore.errors import StoreError, StoreUnreachable
from kvstore.messages import AnySlots, BlockOutcome, FetchResult, Slot
from kvstore.native import checksums
from kvstore.pool.extents import PAGE_BYTES
from kvstore.transports.nixl_agent import NixlAgent, NixlAgentFailed, TransferDirection, joined, spans
from kvstore.transports.put_summing import put_with_checksums

CHUNK_BYTES = 8 << 20
"""Maximum number of bytes of one transfer, unless one block is larger. The checksums of the blocks of one transfer are
computed while the next transfer runs."""

BATCH = 1024  # maximum number of blocks whose stamps (rule 1) are read by one transfer
STAMP_BYTES = 8

CLOSING = Nanos(300 * MILLISECOND)
SHORTEST = Nanos(50 * MILLISECOND)  # minimum time that a call waits for transfers, unless its deadline is nearer

REOPENING = Nanos(10 * SECOND)

SPINS = 200  # number of polls of a transfer without a pause between them; small transfers end within them
PAUSE_SECONDS = 50e-6
PAUSE = threading.Event()  # never set; waiting for it with a timeout is a pause
HAND_OVER_SECONDS = 0.002
"""Maximum time for which the copying thread waits until the checksum thread has begun. NIXL holds Python's interpreter
lock (GIL) while it copies, so without this wait the checksum thread would begin only after the next copy."""

NUDGE_AFTER = Nanos(2 * MILLISECOND)
NUDGE_EVERY = Nanos(500 * MILLISECOND)


class NixlOffer(Struct, frozen=True):
    """The data that a client needs to reach a node's NIXL agent. The client gets them in the handshake."""

    metadata: bytes
    blocks: int  # address of the pool's first byte in the agent's process
    stamps: int  # address of the first stamp (rule 1) in the agent's process


class NixlTransport:
    """The `Transport` by RDMA between a client and the pool of a node. Only one thread at a time moves bytes."""

    def __init__(
        self,
        offer: NixlOffer,
        block_bytes: int,
        clock: Clock,
        deadline: Nanos,
        renew: Callable[[Nanos], NixlOffer | None],
        make_agent: Callable[[str], NixlAgent] = NixlAgent,
    ):
        """Open an agent, and connect it to the node's agent.

        Args:
            offer: The node's offer.
            block_bytes: Block size of the namespace in bytes. The node has opened the namespace already.
            clock: The clock of deadlines.
            deadline: Ends the connection attempt.
            renew: Function that asks the node for its current offer, by a deadline, and returns None if the node has no
                offer. The transport calls this function in a new thread.
            make_agent: Makes an agent with a unique name.

        Raises:
            StoreUnreachable: NIXL cannot be used here, or the node's agent does not answer in time.
        """
        self._block_bytes = block_bytes
        self._clock = clock
        self._renew = renew
        self._make_agent = make_agent
        self._breaker = CircuitBreaker()
        self._turn = threading.Lock()
        self._closed = False
        self._opening = False
        try:
            self._connection: _NixlConnection | None = _NixlConnection(offer, make_agent, clock, deadline)
        except NixlAgentFailed as error:
            raise StoreUnreachable(f"no NIXL connection: {error}") from error

    def get(self, slots: AnySlots, into: Sequence[MutableBlock], deadline: Nanos) -> list[BlockOutcome]:
        return self._exchange(_get, slots, [self._pieces(block) for block in into], deadline)

    def put(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[BlockOutcome]:
        return self._exchange(_put, slots, [self._pieces(block) for block in blocks], deadline)

    def put_summing(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[FetchResult]:
        return put_with_checksums(self.put, slots, blocks, deadline)

    def close(self) -> None:
        """Wait until the running call has ended, at the latest at its deadline, and close the agent."""
        self._closed = True
        with self._turn:
            self._drop()

    def _exchange(
        self, act: "_Act", slots: AnySlots, blocks: list[list[ByteArray]], deadline: Nanos
    ) -> list[BlockOutcome]:
        assert len(slots) == len(blocks), (len(slots), len(blocks))
        batches = [
            _NixlTransfer(slots[start : start + BATCH], blocks[start : start + BATCH])
            for start in range(0, len(slots), BATCH)
        ]
        left = seconds(deadline - self._clock.now())
        if batches and left > 0 and self._turn.acquire(timeout=left):
            try:
                self._run(act, batches, deadline)
            finally:
                self._turn.release()
        return [outcome for batch in batches for outcome in batch.outcomes]

    def _run(self, act: "_Act", batches: list["_NixlTransfer"], deadline: Nanos) -> None:
        started = self._clock.now()
        connection = self._current(started)
        if connection is None:
            return
        until = max(Nanos(deadline - CLOSING), min(Nanos(started + SHORTEST), deadline))
        in_order = False
        try:
            for batch in batches:
                act(connection, batch, until)
            in_order = True
        except NixlAgentFailed:
            self._breaker.failed(started, self._clock.now())
        finally:
            del connection  # without this, the local variable would keep the agent alive after `close`
            if not in_order:
                self._drop()

    def _current(self, now: Nanos) -> "_NixlConnection | None":
        """Return the connection to the node's agent; None if no connection is open.

        If no connection is open and the circuit breaker allows it, begin to open one in a new thread.
        """
        if self._connection is None and not self._closed and not self._opening and self._breaker.allows(now):
            self._opening = True
            threading.Thread(target=self._open_again, args=(now,), name="kvstore-nixl", daemon=True).start()
        return None if self._closed else self._connection

    def _open_again(self, started: Nanos) -> None:
        deadline = Nanos(started + REOPENING)
        try:
            offer = self._renew(deadline)
            connection = None if offer is None else _NixlConnection(offer, self._make_agent, self._clock, deadline)
        except (NixlAgentFailed, StoreError, ValueError):  # ValueError: the client has closed the control plane
            connection = None
        with self._turn:
            self._opening = False
            if connection is None:
                self._breaker.failed(started, self._clock.now())
            elif self._closed:
                connection.close()
            else:
                self._breaker.succeeded()
                self._connection = connection

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _pieces(self, block: Block) -> list[ByteArray]:
        parts = pieces(block)
        assert size_of(parts) == self._block_bytes, (size_of(parts), self._block_bytes)
        return parts


class _NixlTransfer:
    """Holds the blocks of one batch, their addresses at the client and in the pool, and the outcome of each block."""

    def __init__(self, slots: AnySlots, blocks: list[list[ByteArray]]):
        self.slots = slots
        self.blocks = blocks
        self.is_sound = [False] * len(slots)  # for each block: True if its checksum is right
        self.outcomes = [BlockOutcome.GONE] * len(slots)
        parts = [part for parts in blocks for part in parts]
        self.starts = [0, *itertools.accumulate(len(parts) for parts in blocks)]  # index of each block's first part
        self.local = spans([(int(part.__array_interface__["data"][0]), part.nbytes) for part in parts])
        block_bytes = size_of(blocks[0])
        inside = np.cumsum(self.local[:, 1]) - self.local[:, 1]  # offset of each part within the bytes of all blocks
        of = np.repeat(np.arange(len(blocks)), [len(parts) for parts in blocks])
        offsets = np.array([slot.offset for slot in slots], dtype=np.uint64)
        self.remote = self.local.copy()  # like `local`, but with offsets in the pool instead of addresses
        self.remote[:, 0] = offsets[of] + inside - of.astype(np.uint64) * np.uint64(block_bytes)

    def __len__(self) -> int:
        return len(self.slots)

    def subset(self, indices: list[int]) -> "_NixlTransfer":
        return _NixlTransfer([self.slots[index] for index in indices], [self.blocks[index] for index in indices])

    def check_checksums(self, chunk: range, begun: threading.Event | None = None) -> None:
        """Check the checksums of a chunk of blocks.

        The event `begun` is set just before the native code computes the checksums. The native code does not hold Python's
        interpreter lock, so other threads run meanwhile.
        """
        parts = [part for parts in self.blocks[chunk.start : chunk.stop] for part in parts]
        block_bytes = size_of(self.blocks[chunk.start])
        if begun is not None:
            begun.set()
        for index, checksum in zip(chunk, checksums.sums(len(chunk), block_bytes, parts), strict=True):
            self.is_sound[index] = checksum == self.slots[index].crc32c

    def chunks(self) -> Iterator[range]:
        step = max(1, CHUNK_BYTES // size_of(self.blocks[0]))
        for start in range(0, len(self), step):
            yield range(start, min(start + step, len(self)))


_Act = Callable[["_NixlConnection", _NixlTransfer, Nanos], None]


class _NixlConnection:
    """Reads and writes the pool of a node by a client's agent, which is connected to the node's agent.

    All methods may raise `NixlAgentFailed`; after that, only `close` may be called.
    """

    def __init__(self, offer: NixlOffer, make_agent: Callable[[str], NixlAgent], clock: Clock, deadline: Nanos):
        self._offer = offer
        self._clock = clock
        self._agent = make_agent(f"kvstore-client-{uuid.uuid4().hex}")
        try:
            self._stamps: NDArray[np.uint64] = np.zeros(BATCH, np.uint64)
            address = int(self._stamps.__array_interface__["data"][0])
            self._agent.register(spans([(address, self._stamps.nbytes)]))
            self._into = spans([(address + index * STAMP_BYTES, STAMP_BYTES) for index in range(BATCH)])
            self._peer = self._agent.add_peer(offer.metadata)
            self.holds([Slot(0, 0)], deadline)  # reads one stamp, only to find out whether transfers work
        except BaseException:
            self._agent.close()
            raise

    def register(self, work: _NixlTransfer) -> int:
        return self._agent.register(joined(work.local))

    def deregister(self, registered: int) -> None:
        self._agent.deregister(registered)

    def start(self, direction: TransferDirection, work: _NixlTransfer, chunk: range) -> int:
        parts = slice(work.starts[chunk.start], work.starts[chunk.stop])
        remote = work.remote[parts].copy()
        remote[:, 0] += np.uint64(self._offer.blocks)
        return self._agent.start(direction, work.local[parts], remote, self._peer)

    def holds(self, slots: AnySlots, until: Nanos) -> list[bool]:
        """Read the stamps (rule 1) from the node, and return for each slot whether it is still valid.

        A slot is valid if the stamp of its place is the slot's generation, so the place was not given to another block.

        Raises:
            NixlAgentFailed: The read failed, or has not ended at `until`.
        """
        pages = np.array([slot.offset // PAGE_BYTES for slot in slots], dtype=np.uint64)
        remote = np.full((len(slots), 3), (0, STAMP_BYTES, 0), dtype=np.uint64)
        remote[:, 0] = np.uint64(self._offer.stamps) + pages * np.uint64(STAMP_BYTES)
        self.wait(self._agent.start(TransferDirection.READ, self._into[: len(slots)], remote, self._peer), until)
        generations = np.array([slot.generation for slot in slots], dtype=np.uint64)
        return [bool(each) for each in self._stamps[: len(slots)] == generations]

    def wait(self, transfer: int, until: Nanos) -> None:
        looks = 0
        nudge_at: Nanos | None = None
        while not self._agent.is_done(transfer):
            looks += 1
            if looks <= SPINS:
                continue
            now = self._clock.now()
            if now >= until:
                raise NixlAgentFailed("the deadline has passed")
            if nudge_at is None:
                nudge_at = Nanos(now + NUDGE_AFTER)
            elif now >= nudge_at:
                self._agent.nudge(self._peer)
                nudge_at = Nanos(now + NUDGE_EVERY)
            PAUSE.wait(PAUSE_SECONDS)

    def close(self) -> None:
        self._agent.close()


def _get(connection: _NixlConnection, work: _NixlTransfer, until: Nanos) -> None:
    registered = connection.register(work)
    # A second thread computes the checksums. If the node is on this host, the calling thread copies the bytes itself,
    # and with a second thread both run at the same time.
    with ThreadPoolExecutor(1, "kvstore-checksums") as checksum_thread:
        for arrived in _moved(connection, TransferDirection.READ, work, until):
            if arrived.stop < len(work):
                begun = threading.Event()
                checksum_thread.submit(work.check_checksums, arrived, begun)
                begun.wait(HAND_OVER_SECONDS)
            else:
                work.check_checksums(arrived)
    for index, is_held in enumerate(connection.holds(work.slots, until)):
        if is_held:
            work.outcomes[index] = BlockOutcome.MOVED if work.is_sound[index] else BlockOutcome.CORRUPT
    connection.deregister(registered)


def _put(connection: _NixlConnection, work: _NixlTransfer, until: Nanos) -> None:
    held = [index for index, is_held in enumerate(connection.holds(work.slots, until)) if is_held]
    if not held:
        return
    writing = work if len(held) == len(work) else work.subset(held)
    registered = connection.register(writing)
    for _ in _moved(connection, TransferDirection.WRITE, writing, until):
        pass
    for index, is_held in zip(held, connection.holds(writing.slots, until), strict=True):
        if is_held:
            work.outcomes[index] = BlockOutcome.MOVED
    connection.deregister(registered)


def _moved(
    connection: _NixlConnection, direction: TransferDirection, work: _NixlTransfer, until: Nanos
) -> Iterator[range]:
    """Move the blocks chunk by chunk; yield each chunk that has arrived, while the next one is being moved."""
    before: tuple[int, range] | None = None
    for chunk in work.chunks():
        transfer = connection.start(direction, work, chunk)
        if before is not None:
            connection.wait(before[0], until)
            yield before[1]
        before = transfer, chunk
    if before is not None:
        connection.wait(before[0], until)
        yield before[1]
