"""Ports of the store: tiers, codecs and transports."""

from collections.abc import Sequence
from typing import Protocol

from kvstore.buffers import Block, ByteArray, MutableBlock
from kvstore.clock import Nanos
from kvstore.messages import Address, AnySlots, BlockKey, BlockOutcome, FetchResult, TierStatus


class MemoryTier(Protocol):
    """The pool: a bounded space in memory for the bytes of blocks.

    It moves bytes and decides nothing: the `BlockMachine` knows which block lies where, who may read it and which block
    leaves. It must refuse a read or a write with another generation than the one that last claimed the place. Calls do
    not wait, and may come from several threads for different addresses.
    """

    @property
    def capacity_bytes(self) -> int: ...

    def claim(self, address: Address) -> None:
        """Give the place to this block, whose bytes are not there yet."""

    def write(self, address: Address, block: Block) -> bool:
        """Write a claimed block's `address.length` bytes; return False when the place is not claimed any more."""

    def read(self, address: Address, into: MutableBlock) -> bool:
        """Read a block's bytes; return False when the place was discarded or given to another block.

        The caller verifies the checksum. The bytes may be wrong, and `into` may have been changed even when the result
        is False.
        """

    def discard(self, address: Address) -> None:
        """Remove the block: later reads of this address return False. Does nothing if another block is there by now."""

    def view(self, address: Address) -> ByteArray:
        """Return the block's bytes without copying; after a discard they may be another block's."""

    def close(self) -> None: ...


class BackingTier(Protocol):
    """A tier below the pool (SSD, Redis, an object store, another node): whole blocks by their hash.

    It is a cache. It may lose any block at any time, and decides itself where bytes lie and which blocks leave. It
    answers a read with the bytes that were written under that key or not at all, and verifies everything that it reads.
    Calls block, may come from several threads, and keep their deadline as far as the system lets them. A caller on an
    event loop makes them in threads. Its buffers are in use until the call returns, however late that is.
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
        """Return which of these blocks, of whatever chains, the tier has now; raise TierFailed if it cannot be asked.

        The node calls this before the last copy elsewhere goes. A server that may lose blocks without reporting it is
        asked itself. Blocks about which it cannot be sure count as missing.
        """

    def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[ByteArray], deadline: Nanos, checksums: Sequence[int]
    ) -> list[bool]:
        """Write contiguous blocks; return which of them the tier has now, including those that it had before.

        A block that was not written by the deadline is False. The checksums are the CRC-32C with which the blocks were
        published. A block with another checksum, or whose bytes change while it is written, is not kept, or `get` finds
        the error. TierFailed means that nothing can be written now; some of the blocks may have been kept.
        """

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        """Read blocks into contiguous buffers of their length; a buffer is void if its answer is not MOVED.

        A block that has not arrived by the deadline is GONE. TierFailed means that nothing can be read now.
        """

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Remove blocks whose bytes were found wrong. Never raises; unknown blocks are ignored."""

    def gone(self) -> list[BlockKey]:
        """Return the blocks that the tier has removed since the last call, as far as it knows."""

    def held(self) -> list[BlockKey]:
        """Return the blocks that the tier holds, as far as it knows without asking a server, for new watchers.

        Only tiers that find in memory are asked. For the others, the node remembers what it learned
        (`kvstore.hierarchy.tier_states`).
        """

    def status(self) -> TierStatus: ...

    def close(self) -> None:
        """Close files and connections; the stored blocks stay."""


class Codec(Protocol):
    """Converts blocks to the form in which a backing tier stores them: plain, compressed or sealed.

    A codec belongs to one namespace. Thread-safe.
    """

    @property
    def codec_id(self) -> int:
        """0 to 255, stored with each block, so that a block of another setting is a miss instead of garbage."""

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:
        """Return the bytes to store, possibly `block` itself."""

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:
        """Fill `into` with the block; raise UndecodableBlock if this codec did not make these bytes for this key."""


class Transport(Protocol):
    """The client's end of a data path between its buffers and the slots of one node, bound to one namespace.

    Opening it fails with `NamespaceUnknown` when the node does not know the namespace, before any byte moves, and with
    `StoreUnreachable` when the data path does not exist. After that nothing raises: a block that does not arrive in
    time, or has a wrong checksum, is an outcome. Thread-safe.
    """

    def get(self, slots: AnySlots, into: Sequence[MutableBlock], deadline: Nanos) -> list[BlockOutcome]:
        """Read blocks of the namespace's size; checksums are verified on the bytes in `into` after they arrived.

        A block that has not arrived by the deadline, on the client's clock, is GONE.
        """

    def put(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[BlockOutcome]:
        """Write blocks into reserved slots whose `crc32c` is the checksum of the bytes.

        A data path on which bytes can be damaged verifies the checksum (CORRUPT). In any case `get` never returns a
        block whose bytes do not match.
        """

    def put_summing(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[FetchResult]:
        """Write blocks as `put` does into slots without a checksum; the answer has the checksums of the moved blocks.

        Where this process copies the bytes itself, the checksums cost nothing.
        """

    def close(self) -> None: ...
