"""Direct transfer: blocks move from one simulated engine's memory to another's.

Rules:

1. `fleet.batching.handoff_leases` decides how long a prefill engine keeps the blocks that it lends. A lease has a
   random name. A borrower that shows this name gets the blocks, without any other proof.
2. A block's checksum is computed when the block is lent, so that the borrower notices any later change of its bytes.
   The borrower verifies every block before use; of a chain, it uses only the blocks before the first missing or wrong one.
3. One exchange has a request frame, an answer frame, and a request that returns the lease. A frame is a message as
   MessagePack, after its length in 4 bytes, big-endian. A peer that breaks these rules is disconnected.
"""

import asyncio
import contextlib
import logging
import secrets
import struct
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import google_crc32c
import msgspec
from msgspec import Struct

from fleet.batching.handoff_leases import HandoffLeases, LoanState, LoanStep, advance_loan
from fleet.batching.kv_blocks import KvBlocks
from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from kvstore.block import BlockHash
from kvstore.net.listeners import stop_listening

log = logging.getLogger(__name__)

# Maximum length of a request in bytes, enough for 58,000 block names. A longer one ends the connection.
MAX_REQUEST_BYTES = 1 << 20
MAX_CONNECTIONS = 256
# The lender closes a connection after this time, whatever happens on it. One exchange normally takes much less.
IDLE_SECONDS = 10.0
_LENGTH = struct.Struct(">I")


class DirectParams(Struct, frozen=True, kw_only=True):
    """The parameters of a handoff by direct transfer: a borrower fetches the blocks at `address`, and shows the name of the lease."""

    address: str
    lease: str


class BlockRequest(Struct, frozen=True, kw_only=True):
    lease: str
    names: tuple[bytes, ...] = ()
    done: bool = False  # True if the request returns the lease and asks for no blocks (rule 3)


class LentBlock(Struct, frozen=True, kw_only=True):
    """Contains the bytes of one lent block and their checksum."""

    crc32c: int
    content: bytes


class BlockLoan(Struct, frozen=True, kw_only=True):
    """The answer to a borrower: the lent blocks in the order of the requested names.

    The entry of a block is None if the lease never contained the block or has ended.
    """

    blocks: tuple[LentBlock | None, ...]


class BlockLender:
    """Manages the leases of the blocks that a prefill engine lends. It does no I/O.

    The caller calls `expire` when the time of a lease may be over.
    """

    def __init__(self, blocks: KvBlocks[BlockHash], lease: Nanos) -> None:
        self.leases = HandoffLeases(blocks, lease)
        """The leases that have not ended; other classes only read them."""
        # The bytes and checksums of the lent blocks, by the name of the lease and the name of the block.
        self._lent: dict[str, dict[BlockHash, tuple[bytearray, int]]] = {}

    def lend(self, lease: str, blocks: Mapping[BlockHash, bytearray], now: Nanos) -> None:
        """Keep the named blocks for a borrower; `lease` is a new random name for the lease."""
        self.leases.offer(lease, tuple(blocks), now)
        self._lent[lease] = {name: (content, _crc32c(content)) for name, content in blocks.items()}

    def end(self, lease: str) -> bool:
        """End a lease and release its blocks; return False if the lease is unknown or had ended already."""
        self._lent.pop(lease, None)
        return self.leases.give_back(lease)

    def expire(self, now: Nanos) -> bool:
        """End the leases whose time is over; return whether any lease was ended."""
        expired = self.leases.expire(now)
        for lease in expired:
            log.info("handoff lease expired unfetched", extra={"lease": lease[:8]})
            del self._lent[lease]
        return bool(expired)

    def answer(self, request: BlockRequest) -> BlockLoan | None:
        """Return the answer to a borrower's request; None if the request only returned its lease."""
        if request.done:
            self.end(request.lease)
            return None
        held = set(self.leases.pull(request.lease))
        lent = self._lent.get(request.lease, {})
        return BlockLoan(
            blocks=tuple([_copied(lent[BlockHash(name)]) if name in held else None for name in request.names])
        )

    def check(self) -> None:
        """Assert that block contents are kept for the open leases and for no others."""
        self.leases.check()
        assert set(self.leases) == self._lent.keys()


def _copied(lent: tuple[bytearray, int]) -> LentBlock:
    return LentBlock(crc32c=lent[1], content=bytes(lent[0]))


class BlockBorrower:
    """Holds the state of a decode engine that borrows blocks under one lease. It does no I/O."""

    def __init__(self, lease: str, names: Sequence[BlockHash], block_bytes: int) -> None:
        self.state = LoanState.OFFERED
        self._lease, self._names, self._block_bytes = lease, tuple(names), block_bytes

    def begin(self) -> BlockRequest:
        """Accept the handoff, and return the first request.

        The request asks for the blocks, or returns the lease if no blocks are needed.
        """
        self.state = advance_loan(self.state, LoanStep.PULL if self._names else LoanStep.DECLINE)
        return BlockRequest(lease=self._lease, names=self._names) if self._names else self.end()

    def receive(self, loan: BlockLoan) -> list[bytes]:
        """Verify the lender's answer, and return the leading blocks that are correct.

        The caller then has to return the lease.
        """
        self.state = advance_loan(self.state, LoanStep.RECEIVE)
        return _verified(loan, self._block_bytes)

    def end(self) -> BlockRequest:
        """Return the request by which the lender learns that the lease is needed no longer."""
        return BlockRequest(lease=self._lease, done=True)

    def fail(self) -> None:
        """Record that the loan failed: the connection was lost, or the answer was late or unreadable. Do nothing if the loan has ended."""
        if self.state in (LoanState.OFFERED, LoanState.PULLING):
            self.state = advance_loan(self.state, LoanStep.FAIL)


class BlockLending:
    """Lends blocks to borrowers that connect, and ends each lease when its time is over."""

    def __init__(self, blocks: KvBlocks[BlockHash], lease: Nanos, *, on_end: Callable[[], None]) -> None:
        self.lender = BlockLender(blocks, lease)
        self.address = ""  # address at which borrowers connect; set by `listen`
        self.connections: set[asyncio.Transport] = set()
        # Called after leases have ended, because waiting requests may get the blocks that are free now.
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None

    @property
    def leases(self) -> int:
        """Number of leases that keep blocks now."""
        return len(self.lender.leases)

    @property
    def expired(self) -> int:
        """Number of leases since the start that ended by themselves, because no borrower returned them in time."""
        return self.lender.leases.expired

    def lend(self, blocks: Mapping[BlockHash, bytearray]) -> str:
        """Keep the named blocks for a borrower; return the name of the new lease."""
        lease = secrets.token_hex(16)
        self.lender.lend(lease, blocks, _now())
        if self._timer is None:
            self._wait()
        return lease

    def answer(self, request: BlockRequest) -> BlockLoan | None:
        """Return the answer to a borrower's request; None if the request only returned its lease."""
        answered = self.lender.answer(request)
        if answered is None:
            self._on_end()
        return answered

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for lease in list(self.lender.leases):
            self.lender.end(lease)
        for connection in list(self.connections):
            connection.abort()

    def _wait(self) -> None:
        ends = self.lender.leases.next_end
        self._timer = None if ends is None else asyncio.get_running_loop().call_at(ends / SECOND, self._expire)

    def _expire(self) -> None:
        if self.lender.expire(_now()):
            self._on_end()
        self._wait()


def _now() -> Nanos:
    return Nanos(round(asyncio.get_running_loop().time() * SECOND))


class LenderProtocol(asyncio.Protocol):
    """Answers one borrower's requests on its connection.

    It needs no task, because it answers as soon as a request has arrived.
    """

    def __init__(self, lending: BlockLending) -> None:
        self._lending = lending
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The cast is needed, because uvloop's transports are not asyncio's classes.
        transport = cast("asyncio.Transport", transport)
        self._transport = transport
        if len(self._lending.connections) >= MAX_CONNECTIONS:
            transport.abort()
            return
        self._lending.connections.add(transport)
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature of asyncio.Protocol
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._lending.connections.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > MAX_REQUEST_BYTES:
                self._transport.abort()
                return
            end = _LENGTH.size + length
            if len(self._received) < end:
                return
            frame = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            try:
                request = msgspec.msgpack.decode(frame, type=BlockRequest)
            except msgspec.DecodeError:
                self._transport.abort()
                return
            if (answer := self._lending.answer(request)) is not None:
                self._transport.write(_frame(answer))


@contextlib.asynccontextmanager
async def listen(lending: BlockLending, address: str) -> AsyncIterator[None]:
    """Accept borrowers at host:port (port 0: any free port) or unix:path while the context is open.

    Raises:
        ConfigurationRefused: The address is in use or does not belong to this machine.
    """
    loop = asyncio.get_running_loop()
    path = address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    try:
        if path != address:
            server: asyncio.Server = await loop.create_unix_server(lambda: LenderProtocol(lending), path)
            lending.address = address
        else:
            server = await loop.create_server(lambda: LenderProtocol(lending), host, int(port))
            lending.address = f"{host}:{server.sockets[0].getsockname()[1]}"
    except (OSError, ValueError) as error:
        raise ConfigurationRefused(f"simulated.direct_listen: {address}: {error}") from error
    try:
        yield
    finally:
        stop_listening(server)
        await asyncio.sleep(0)
        lending.close()
        await server.wait_closed()
        if path != address:
            Path(path).unlink(missing_ok=True)  # noqa: ASYNC240 - this call does not block for long


async def borrow(params: DirectParams, names: Sequence[BlockHash], *, block_bytes: int, deadline: Nanos) -> list[bytes]:
    """Return the leading blocks of `names` that arrive correctly within the duration `deadline`, and return the lease.

    If the lender cannot be reached or does not answer correctly in time, return no blocks. The lease then ends by itself.
    """
    borrower = BlockBorrower(params.lease, names, block_bytes)
    blocks: list[bytes] = []
    try:
        async with asyncio.timeout(deadline / SECOND):
            reader, writer = await _connect(params.address)
            try:
                request = borrower.begin()
                writer.write(_frame(request))
                if not request.done:
                    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                    if length > len(names) * (block_bytes + 64) + 64:
                        raise ValueError(f"an answer of {length} bytes to {len(names)} names")
                    blocks = borrower.receive(msgspec.msgpack.decode(await reader.readexactly(length), type=BlockLoan))
                    writer.write(_frame(borrower.end()))
                await writer.drain()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, EOFError, TimeoutError, ValueError) as error:  # msgspec's DecodeError is a ValueError
        log.warning("block fetch failed", extra={"address": params.address, "cause": str(error)})
        borrower.fail()
    return blocks


def _verified(loan: BlockLoan, block_bytes: int) -> list[bytes]:
    whole: list[bytes] = []
    for lent in loan.blocks:
        if lent is None:
            break
        if len(lent.content) != block_bytes or _crc32c(lent.content) != lent.crc32c:
            log.warning("kv block checksum mismatch", extra={"position": len(whole)})
            break
        whole.append(lent.content)
    return whole


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _frame(message: Struct) -> bytes:
    encoded = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


def _crc32c(content: bytes | bytearray) -> int:
    return int(google_crc32c.value(bytes(content)))
