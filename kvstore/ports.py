"""What the store needs of the world, and what extends it: tiers, transports, eviction policies."""

from collections.abc import Sequence
from typing import Protocol

from kvstore.buffers import Block, ByteArray, MutableBlock
from kvstore.clock import Nanos
from kvstore.messages import Address, AnySlots, BlockKey, BlockOutcome, FetchResult, TierStatus


class MemoryTier(Protocol):
    """The pool: a bounded space in memory that the bytes of blocks are written to and read from.

    It moves bytes and decides nothing: which block lies where, who may read it and what has to go is the knowledge of
    the `BlockMachine`. It must refuse a read or a write whose generation is not the one that last claimed the place.
    Calls do not wait, and may come from several threads, for different addresses.
    """

    @property
    def capacity_bytes(self) -> int: ...

    def claim(self, address: Address) -> None:
        """The place belongs to this block from now on; its bytes are not there yet."""
        ...

    def write(self, address: Address, block: Block) -> bool:
        """Put a claimed block's bytes, `address.length` of them; False when it is not claimed any more."""
        ...

    def read(self, address: Address, into: MutableBlock) -> bool:
        """Get a block's bytes; False when the place has been discarded or given to another block.

        The caller verifies the checksum; the bytes may be wrong, and `into` may have been written to even on False.
        """
        ...

    def discard(self, address: Address) -> None:
        """The block is gone: later reads of this address answer False. Ignored when another block is there by now."""
        ...

    def view(self, address: Address) -> ByteArray:
        """The block's bytes, without copying; they are another block's after a discard."""
        ...

    def close(self) -> None: ...


class BackingTier(Protocol):
    """A level below the pool (SSD, Redis, an object store, another node): whole blocks by name.

    A cache: it may lose any block at any time, decides by itself where bytes lie and what has to go, and answers a
    read with the bytes that were written under that name or not at all. It verifies whatever it reads. Calls block,
    may come from several threads, and keep to their deadline as far as the system lets them; a caller on an event loop
    makes them in threads, and counts on buffers being in use until the call returns, however late.
    """

    @property
    def name(self) -> str:
        """Of the kind of tier, in metrics and events: "ssd", "redis", "s3", "peer"."""
        ...

    @property
    def finds_in_memory(self) -> bool:
        """Whether `find` answers in microseconds and never waits, so that an event loop may call it."""
        ...

    def find(self, keys: Sequence[BlockKey], deadline: Nanos) -> int:
        """How many leading blocks of this chain the tier probably holds.

        Raises:
            TierFailed: It cannot be asked now.
        """
        ...

    def holds(self, keys: Sequence[BlockKey], deadline: Nanos) -> list[bool]:
        """Which of these blocks, whatever their chains, the tier has now.

        Asked before the last copy elsewhere goes: of a store that lets blocks go without a word the store itself is asked,
        and what it cannot be sure of the tier does not have.

        Raises:
            TierFailed: It cannot be asked about all of them now.
        """
        ...

    def put(
        self,
        keys: Sequence[BlockKey],
        blocks: Sequence[ByteArray],
        deadline: Nanos,
        checksums: Sequence[int],
    ) -> list[bool]:
        """Keep blocks; says which are there now, be it from before.

        Args:
            keys: Names.
            blocks: Their bytes, contiguous, one a key.
            deadline: What was not written by then is False.
            checksums: CRC-32C with which they were published. What has another, or gets it while it is written, is
                not kept, or found out by `get`.

        Raises:
            TierFailed: Nothing can be written now; blocks that were written before it are kept, or not.
        """
        ...

    def get(self, keys: Sequence[BlockKey], into: Sequence[ByteArray], deadline: Nanos) -> list[FetchResult]:
        """Fetch blocks; the content of `into` is void wherever the answer is not MOVED.

        Args:
            keys: Names.
            into: One contiguous buffer a key, of the length that the block was put with.
            deadline: What has not arrived by then is GONE.

        Raises:
            TierFailed: Nothing can be read now.
        """
        ...

    def discard(self, keys: Sequence[BlockKey]) -> None:
        """Forget blocks, because their bytes were found bad. Never raises; unknown ones are ignored."""
        ...

    def gone(self) -> list[BlockKey]:
        """Blocks that the tier has let go since the last call, as far as it knows."""
        ...

    def held(self) -> list[BlockKey]:
        """Blocks that it holds, as far as it knows without asking anybody; for routers that begin to watch.

        Asked only of tiers that find in memory; of the others the node remembers what it learnt (`kvstore.hierarchy.machine`).
        """
        ...

    def status(self) -> TierStatus: ...

    def close(self) -> None:
        """Let files and connections go; what is held stays where it is."""
        ...


class Codec(Protocol):
    """How a block's bytes are kept in a backing tier: as they are, smaller, or sealed. Bound to one namespace; thread-safe."""

    @property
    def codec_id(self) -> int:
        """0 to 255, kept with each block, so that what another setting wrote is a miss and not garbage."""
        ...

    def encode(self, key: BlockKey, block: ByteArray) -> ByteArray:
        """The bytes to keep; may be `block` itself."""
        ...

    def decode(self, key: BlockKey, encoded: ByteArray, into: ByteArray) -> None:
        """Fill `into` with the block.

        Raises:
            UndecodableBlock: These bytes were not made by this codec for this key.
        """
        ...


class Transport(Protocol):
    """The client's end of a way between its buffers and the slots of one node, bound to one namespace.

    Opening it fails with `NamespaceUnknown` when the node does not know the namespace, before any byte moves, and with
    `StoreUnreachable` when the way does not exist. After that nothing raises: a block whose bytes do not arrive
    in time, or do not match their checksum, is an outcome. Thread-safe.
    """

    def get(self, slots: AnySlots, into: Sequence[MutableBlock], deadline: Nanos) -> list[BlockOutcome]:
        """Fetch blocks; checksums are verified on the bytes in `into`, after they arrived.

        Args:
            slots: Of readable blocks.
            into: One block of buffers a slot, of the namespace's block size.
            deadline: On the client's clock; what has not arrived by then is GONE.
        """
        ...

    def put(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[BlockOutcome]:
        """Write blocks into reserved slots, whose `crc32c` says what the bytes sum up to.

        A way that bytes can be damaged on verifies it (CORRUPT); in any case a block whose bytes do not match is
        never returned by `get`.
        """
        ...

    def put_summing(self, slots: AnySlots, blocks: Sequence[Block], deadline: Nanos) -> list[FetchResult]:
        """As `put`, but of slots that have no checksum yet: the answer tells those of the blocks that were moved.

        Where this process copies the bytes itself, they cost nothing.
        """
        ...

    def close(self) -> None: ...


class Eviction(Protocol):
    """Says which block goes next. Sees published blocks only; pinned ones stay admitted while nobody needs their space."""

    def admit(self, key: BlockKey, size_bytes: int, now: Nanos) -> None:
        """The block may go from now on, and was in use until now; again means used again. Chains come tail first."""
        ...

    def withdraw(self, key: BlockKey) -> None:
        """The block is gone; or it was chosen while it is pinned, and comes back with its last pin. It was admitted before."""
        ...

    def choose(self) -> BlockKey | None:
        """The next to go; it stays admitted. None when nothing may go."""
        ...

    def __len__(self) -> int: ...

    def __contains__(self, key: BlockKey) -> bool: ...
