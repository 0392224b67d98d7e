"""Direct transfer: blocks move from one simulated engine's memory to another's.

Rules:

1. A prefill engine lends the blocks of a prompt under a lease: it holds them until the borrower reports that it has
   them, or the lease ends. A lease has a random name, and a borrower needs nothing but that name.
2. A block's checksum is computed when the block is lent, so that the borrower notices any later change of its bytes.
   The borrower verifies every block before use; the first missing or wrong block ends the chain.
3. One exchange has a request frame, an answer frame, and a request that returns the lease. A frame is its length in 4
   bytes, big-endian, and MessagePack. A peer that breaks these rules is disconnected.
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

from fleet.batching.kv_blocks import KvBlocks
from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import ConfigurationRefused
from kvstore.block import BlockHash

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 1 << 20  # 60,000 names
MAX_CONNECTIONS = 256
IDLE_SECONDS = (
    10.0  # a connection without a request for this long is closed; the decode worker sends its request at once
)
_LENGTH = struct.Struct(">I")


class DirectParams(Struct, frozen=True, kw_only=True):
    """The parameters in a handoff that a borrower needs."""

    address: str
    lease: str


class BlockRequest(Struct, frozen=True, kw_only=True):
    lease: str
    names: tuple[bytes, ...] = ()
    done: bool = False  # true: the lease may end


class LentBlock(Struct, frozen=True, kw_only=True):
    """One lent block."""

    crc32c: int
    content: bytes


class BlockLoan(Struct, frozen=True, kw_only=True):
    """The answer to a borrower, in the order of the names.

    None for a block that the lease does not cover (any more).
    """

    blocks: tuple[LentBlock | None, ...]


class _BlockLease(Struct, frozen=True, kw_only=True):
    blocks: Mapping[BlockHash, tuple[bytearray, int]]  # content and checksum
    timer: asyncio.TimerHandle


class BlockLender:
    """The prefill engine's side."""

    def __init__(self, blocks: KvBlocks[BlockHash], lease: Nanos, *, on_end: Callable[[], None]) -> None:
        self.address = ""  # set by `listen`
        self._blocks = blocks
        self._on_end = on_end  # called when blocks may have become available
        self._lease_seconds = lease / SECOND
        self._leases: dict[str, _BlockLease] = {}
        self.connections: set[asyncio.Transport] = set()
        self.expired = 0  # leases that no borrower returned

    @property
    def leases(self) -> int:
        """The number of leases that hold blocks now."""
        return len(self._leases)

    def lend(self, blocks: Mapping[BlockHash, bytearray]) -> str:
        """Hold named blocks for a borrower; return the lease."""
        self._blocks.hold(list(blocks))
        lease = secrets.token_hex(16)
        self._leases[lease] = _BlockLease(
            blocks={name: (content, _crc32c(content)) for name, content in blocks.items()},
            timer=asyncio.get_running_loop().call_later(self._lease_seconds, self._expire, lease),
        )
        return lease

    def end(self, lease: str) -> None:
        """End a lease and release its blocks; an ended lease is ignored."""
        if (ended := self._leases.pop(lease, None)) is not None:
            ended.timer.cancel()
            self._blocks.release(list(ended.blocks))
            self._on_end()

    def answer(self, request: BlockRequest) -> BlockLoan | None:
        """Answer a borrower's request; None if the borrower needs no answer."""
        if request.done:
            self.end(request.lease)
            return None
        lease = self._leases.get(request.lease)
        held = lease.blocks if lease is not None else {}
        return BlockLoan(blocks=tuple([self._lent(held.get(name)) for name in request.names]))

    def close(self) -> None:
        for lease in list(self._leases):
            self.end(lease)
        for connection in list(self.connections):
            connection.abort()

    def _lent(self, known: tuple[bytearray, int] | None) -> LentBlock | None:
        return None if known is None else LentBlock(crc32c=known[1], content=bytes(known[0]))

    def _expire(self, lease: str) -> None:
        self.expired += 1
        log.info("handoff lease expired unfetched", extra={"lease": lease[:8]})
        self.end(lease)


class LenderProtocol(asyncio.Protocol):
    """One borrower's connection, without a task: it answers when the bytes arrive."""

    def __init__(self, lender: BlockLender) -> None:
        self._lender = lender
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # a stream socket's transport; uvloop's type does not say so
        self._transport = transport
        if len(self._lender.connections) >= MAX_CONNECTIONS:
            transport.abort()
            return
        self._lender.connections.add(transport)
        self._timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._lender.connections.discard(self._transport)

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
            if (answer := self._lender.answer(request)) is not None:
                self._transport.write(_frame(answer))


@contextlib.asynccontextmanager
async def listen(lender: BlockLender, address: str) -> AsyncIterator[None]:
    """Accept borrowers at host:port (0: any port) or unix:path while the context is open.

    Raises:
        ConfigurationRefused: The address is in use or does not belong to this machine.
    """
    loop = asyncio.get_running_loop()
    path = address.removeprefix("unix:")
    host, _, port = address.rpartition(":")
    try:
        if path != address:
            server: asyncio.Server = await loop.create_unix_server(lambda: LenderProtocol(lender), path)
            lender.address = address
        else:
            server = await loop.create_server(lambda: LenderProtocol(lender), host, int(port))
            lender.address = f"{host}:{server.sockets[0].getsockname()[1]}"
    except (OSError, ValueError) as error:
        raise ConfigurationRefused(f"simulated.direct_listen: {address}: {error}") from error
    try:
        yield
    finally:
        server.close()
        lender.close()
        await server.wait_closed()
        if path != address:
            Path(path).unlink(missing_ok=True)  # noqa: ASYNC240 - one local file


async def borrow(params: DirectParams, names: Sequence[BlockHash], *, block_bytes: int, deadline: Nanos) -> list[bytes]:
    """Fetch the longest prefix of `names` that arrives whole within `deadline` from now, then return the lease."""
    try:
        async with asyncio.timeout(deadline / SECOND):
            reader, writer = await _connect(params.address)
            try:
                loan = BlockLoan(blocks=())
                if names:
                    writer.write(_frame(BlockRequest(lease=params.lease, names=tuple(names))))
                    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                    if length > len(names) * (block_bytes + 64) + 64:
                        raise ValueError(f"an answer of {length} bytes to {len(names)} names")
                    loan = msgspec.msgpack.decode(await reader.readexactly(length), type=BlockLoan)
                writer.write(_frame(BlockRequest(lease=params.lease, done=True)))
                await writer.drain()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, EOFError, TimeoutError, ValueError) as error:  # DecodeError is a ValueError
        log.warning("block fetch failed", extra={"address": params.address, "cause": str(error)})
        return []
    return _verified(loan, block_bytes)


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
