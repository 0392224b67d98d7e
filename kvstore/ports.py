"""Ports of the store: tiers, codecs and transports."""

from collections.abc import Sequence
from typing import Protocol

from kvstore.buffers import Block, ByteArray, MutableBlock
from kvstore.clock import Nanos
from kvstore.messages import Address, AnySlots, BlockKey, BlockOutcome, FetchResult, TierStatus


class MemoryTier(Protocol):
    """The pool: a bounded space in memory for the bytes of blocks.

    The tier moves bytes and decides nothing: the `BlockMachine` decides where each block lies, who may read it and
    which block is evicted. `read` and `write` return False if the place was discarded, or if its last `claim` had
    another generation than the address. Calls do not wait, and may come from several threads for different addresses.
    """

    @property
    def capacity_bytes(self) -> int: ...

    def claim(self, address: Address) -> None:
        """Give the place at this address to the block `address.key`; the bytes of the block are written later."""

    def write(self, address: Address, block: Block) -> bool:
        """Write the `address.length` bytes of a claimed block; return False if the place is not claimed any more."""

    def read(self, address: Address, into: MutableBlock) -> bool:
        """Copy a block's bytes into `into`; return False if the block was discarded or another block has its place.

        The caller verifies the checksum. The bytes may be wrong, and `into` may have been changed even when the result
        is False.
        """

    def discard(self, address: Address) -> None:
        """Remove the block: later reads of this address return False.

        Do nothing if another block has the place by now.
        """

    def view(self, address: Address) -> ByteArray:
        """Return the block's bytes without copying them.

        After the block was discarded, another block may be written into the same memory.
        """

    def close(self) -> None: ...


class BackingTier(Protocol):
    """A tier below the pool (SSD, Redis, an object store, another node), which stores whole blocks by their hash.

    Implementations are in `kvstore/tiers/NAME`. CONTRIBUTING.md lists the files of a new one ("Add a store tier").

    The tier is a cache. It may lose any block at any time, and decides itself where bytes lie and which blocks it
    removes. A read gets either the bytes that were written under the key, or nothing, because the tier verifies
    everything that it reads. Calls block and may come from several threads. A caller on an event loop makes them in
    threads. Calls keep their deadline if the operating system allows it: a read from a hanging disk may take longer.
    The caller's buffers are in use until the call returns, even if it returns late.
    """

    @property
    def name(self) -> str:
        """Kind of the tier in metrics and events: "ssd", "redis", "s3" or "peer"."""

    @property
    def finds_in_memory(self) -> bool:
        """True if `find` answers in microseconds and never waits, so that an event loop may call it."""

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        """Return how many leading blocks of this chain the tier probably holds; raise TierFailed if it cannot be asked."""

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        """Return which of these blocks the tier has now; raise TierFailed if it cannot be asked.

        The blocks may belong to different chains.

        The node calls this before it discards the last other copy of these blocks. If the tier's server may lose blocks
        without reporting it, the tier queries the server. Blocks about which the tier cannot be sure count as missing.
        """

    def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[ByteArray], deadline: Nanos, checksums: Sequence[int]
    ) -> list[bool]:
        """Write contiguous blocks; return which of them the tier has now, including those that it had before.

        The result is False for a block that was not written by the deadline. The checksums are the CRC-32C with which
        the blocks were published. If a block has another checksum, or its bytes change while it is written, either the
        tier does not keep it, or `get` finds the error. TierFailed means that the tier has confirmed none of the
        blocks; it may have kept some of them all the same.
        """

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        """Read blocks into contiguous buffers of their length.

        The content of a buffer is valid only if the outcome for its block is MOVED.

        A block that has not arrived by the deadline is GONE. TierFailed means that the tier failed before it could
        answer for any block.
        """

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks whose bytes were found wrong; ignore unknown blocks, and never raise an exception."""

    def gone(self) -> list[BlockKey]:
        """Return the blocks that the tier has lost or removed since the last call, as far as it knows."""

    def held(self) -> list[BlockKey]:
        """Return the blocks that the tier holds, as far as it knows without asking a server.

        The node sends them to routers that have just begun to watch it. The node calls this method only if
        `finds_in_memory` is true; for the other tiers, the node uses what it has learned from earlier calls
        (`kvstore.hierarchy.tier_states`).
        """

    def status(self) -> TierStatus: ...

    def close(self) -> None:
        """Close files and connections; the stored blocks stay."""


class Codec(Protocol):
    """Converts blocks to the form in which a backing tier stores them: plain, compressed, quantised or sealed.

    A codec belongs to one namespace. Thread-safe.
    """

    @property
    def codec_id(self) -> int:
        """A number from 0 to 255 that identifies the codec and is stored with each block.

        Readers compare it, so a block that was stored with another codec counts as a miss.
        """

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:
        """Return the bytes to store for a block. A codec that changes nothing may return `block` itself."""

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:
        """Fill `into` with the block; raise UndecodableBlock if this codec did not make these bytes for this key."""


class Transport(Protocol):
    """The client's side of a data path between its buffers and the slots of one node, bound to one namespace.

    Opening it fails with `NamespaceUnknown` when the node does not know the namespace, before any byte moves, and with
    `StoreUnreachable` when the data path does not exist. Once the transport is open, its methods raise nothing: if a
    block does not arrive in time, or has a wrong checksum, the outcome for the block says so. Thread-safe.
    """

    def get(self, slots: AnySlots, into: Sequence[MutableBlock], deadline: Nanos) -> list[BlockOutcome]:
        """Read blocks from their slots into `into`, and verify the checksums of the bytes that arrived.

        A block that has not arrived by the deadline, on the client's clock, is GONE.
        """

    def put(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[BlockOutcome]:
        """Write blocks into reserved slots whose `crc32c` is the checksum of the bytes.

        If bytes can be damaged on the data path, the node verifies the checksum, and the outcome may be CORRUPT. On
        every data path, `get` never returns a block whose bytes do not match the checksum.
        """

    def put_summing(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[FetchResult]:
        """Write blocks as `put` does, but into slots without a checksum; return the checksums of the moved blocks too.

        If this process copies the bytes itself, it computes the checksums during the copy, which takes little extra
        time.
        """

    def close(self) -> None: ...
