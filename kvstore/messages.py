"""Messages: the values that the store's parts and its clients pass to each other, such as slots and matches."""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NewType, Self, TypeAlias, overload

from msgspec import Struct

from kvstore.block import BlockHash

LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)

NO_LEASE = LeaseId(0)
"""Lease id of a match that found no block, or that was made without a lease."""

NO_RESERVATION = ReservationId(0)
"""Reservation id of an answer that reserves nothing, because each block is stored, is being written, or finds no
space."""


NODE = "node"
"""Name of the owner of those write reservations that the node makes itself. No client may use this name."""

POOL_TIER = "cpu"
"""Name of the pool in lists of tiers. The pool is the first tier of a node."""


class BlockKey(Struct, frozen=True, order=True, gc=False):
    """Identity of a block on a node: its namespace and its block hash.

    A node has millions of these objects. They are therefore created with positional arguments, and are excluded from
    Python's cyclic garbage collection (`gc=False`).
    """

    digest: bytes  # digest of the namespace
    name: BlockHash


class Slot(Struct, frozen=True, gc=False):
    """The place of a block's bytes in the pool, in the form in which clients get it."""

    offset: int  # offset of the block's first byte, in bytes from the start of the pool
    generation: int  # slot generation: changes when the place is given to another block
    crc32c: int = 0  # CRC-32C of the block's bytes; 0 before they are published

    def pack(self) -> bytes:
        """Return this slot in its wire form of 20 bytes, in which `Slots` stores it."""
        return SLOT.pack(self.offset, self.generation, self.crc32c)


SLOT = struct.Struct("<QQI")  # offset, generation and CRC-32C of a slot, as on the wire


class Slots(Struct, frozen=True, gc=False):
    """Sequence of slots in their wire form: one byte string instead of one object for each slot, to save time."""

    packed: bytes = b""  # consecutive `SLOT` records

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Self:
        return cls(b"".join([SLOT.pack(slot.offset, slot.generation, slot.crc32c) for slot in slots]))

    def __len__(self) -> int:
        return len(self.packed) // SLOT.size

    @overload
    def __getitem__(self, index: int) -> Slot: ...

    @overload
    def __getitem__(self, index: slice) -> Self: ...

    def __getitem__(self, index: int | slice) -> Slot | Self:
        if isinstance(index, slice):
            return self.some(range(len(self))[index])
        if not 0 <= index < len(self):
            raise IndexError(f"slot {index} of {len(self)}")
        return Slot(*SLOT.unpack_from(self.packed, index * SLOT.size))

    def some(self, indices: Sequence[int]) -> Self:
        """Return the slots with these indices, in the order of the indices."""
        if isinstance(indices, range) and indices.step == 1 and indices.start >= 0 and indices.stop <= len(self):
            return type(self)(self.packed[indices.start * SLOT.size : indices.stop * SLOT.size])
        return type(self).of(self[index] for index in indices)

    def __iter__(self) -> Iterator[Slot]:
        return (Slot(*fields) for fields in SLOT.iter_unpack(self.packed))


AnySlots: TypeAlias = Slots | Sequence[Slot]
"""Slots, either packed or as a sequence of objects."""


class Address(Struct, frozen=True, kw_only=True, gc=False):
    """The place of a block's bytes in the pool, in the form in which the node uses it."""

    key: BlockKey
    offset: int  # offset of the block's first byte, in bytes from the start of the pool
    length: int  # number of bytes of the block
    generation: int


class Match(Struct, frozen=True, kw_only=True):
    """Longest prefix of a chain that is in a node's pool. With a lease, its blocks are pinned until the lease ends.

    A match can be pickled or encoded by msgspec. Another process can therefore receive the match and read its blocks.
    """

    incarnation: str  # incarnation of the node that made the match
    lease_id: LeaseId = NO_LEASE
    names: tuple[BlockHash, ...] = ()
    slots: Slots = Slots()
    # number of consecutive blocks after the matched ones that are being promoted or looked for; a later match finds
    # them
    loading: int = 0
    # Number of promoted blocks in this match, by tier; empty without a lease. Each promoted block is reported in one
    # match only.
    promoted: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.slots)


def merge_promoted(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Add up the promoted blocks, by tier, of two matches of the same chain.

    The caller ensures that no block is counted in both.
    """
    return {tier: one.get(tier, 0) + other.get(tier, 0) for tier in {**one, **other}}


def blocks_by_tier(good: int, asked: int, promoted: Mapping[str, int]) -> dict[str, int]:
    """Return how many blocks of a read came from each tier of the node.

    The read has asked for the last `asked` blocks of a match. The first `good` of them have arrived and are counted.
    `promoted` has the numbers of promoted blocks of the match by tier. The promoted blocks are the last ones of the
    match; the blocks before them were in the pool already.
    """
    tiers: dict[str, int] = {}
    memory = max(0, asked - sum(promoted.values()))
    for tier, count in ((POOL_TIER, memory), *promoted.items()):
        if taken := min(count, good - sum(tiers.values())):
            tiers[tier] = taken
    return tiers


class BlockOutcome(StrEnum):
    """Result of copying one block."""

    MOVED = "moved"  # the block arrived with the right checksum
    # the block was not copied: it is not there any more, its slot has another block, or no answer came in time
    GONE = "gone"
    CORRUPT = "corrupt"  # the bytes do not match the checksum


class FetchResult(Struct, frozen=True, gc=False):
    """Result of reading one block from a backing tier, or of writing one block by `Transport.put_summing`."""

    outcome: BlockOutcome
    crc32c: int = 0  # CRC-32C of the block's bytes as they were copied; 0 unless the outcome is MOVED


GONE = FetchResult(BlockOutcome.GONE)
CORRUPT = FetchResult(BlockOutcome.CORRUPT)


class TierStatus(Struct, frozen=True, kw_only=True):
    """State of a backing tier, with its counters since it was opened.

    The tier may also hold blocks that were written before it was opened.
    """

    name: str  # name of the tier: "ssd", "redis", "s3" or "peer"
    blocks: int = 0  # number of blocks in the tier now, as far as the node knows
    bytes: int = 0  # number of bytes that these blocks occupy
    capacity_bytes: int = 0  # number of bytes that the tier can hold; 0 if unknown
    hits: int = 0  # number of blocks that were read
    misses: int = 0  # number of blocks that were requested and not found, or corrupt
    bytes_read: int = 0
    bytes_written: int = 0
    refused: int = 0  # number of blocks that were not written, for example for lack of space or write budget
    evicted: int = 0
    corrupt: int = 0  # number of blocks whose bytes did not match their checksum or could not be decoded
    failures: int = 0  # number of operations that raised `TierFailed` or missed their deadline
    damaged: int = 0  # number of corrupt blocks that stay in the tier: a second reading did not find the same damage
    fenced: int = 0  # number of servers that are fenced now, because their answers were often damaged


class BlockChanges(Struct, frozen=True, kw_only=True):
    """Blocks of one namespace and tier that became readable (`stored`) or stopped being readable (`removed`).

    No block is in both lists. In a cache dump, `stored` has all readable blocks.
    """

    digest: bytes
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    tier: str = POOL_TIER


class Claim(Struct, frozen=True, gc=False):
    """Command: mark the place at `address` as given to the block of `address`, whose bytes a writer will write later."""

    address: Address


class Discard(Struct, frozen=True, gc=False):
    """Command: mark the place at `address` as empty, so that clients that still read there notice that the block is gone."""

    address: Address


TierCommand = Claim | Discard


class ReservedSlot(Struct, frozen=True, gc=False):
    """Slot for one block that a writer may write."""

    index: int  # index of the block in the requested hashes
    slot: Slot


class WriteReservation(Struct, frozen=True, kw_only=True):
    """Slots that a writer may write, until it publishes the blocks or the reservation ends."""

    reservation_id: ReservationId
    reserved: tuple[ReservedSlot, ...]
    refused: int  # number of blocks that are neither stored nor being written, and for which there is no space


class ClientWriteReservation(Struct, frozen=True, kw_only=True):
    """Write reservation, as a client receives it."""

    reservation_id: ReservationId
    indices: tuple[int, ...]  # indices of the reserved blocks in the requested hashes
    slots: Slots  # one slot for each index
    refused: int

    def __len__(self) -> int:
        return len(self.indices)


class LeasedSlots(Struct, frozen=True, kw_only=True):
    """Answer of the pool machine to a match: the slots of the matched blocks, and the lease that pins them, or `NO_LEASE`."""

    lease_id: LeaseId
    slots: Slots


class PinnedBlocks(Struct, frozen=True):
    """Blocks of the pool that are not evicted until `unpin` is called with `pin_id`."""

    pin_id: int
    addresses: tuple[Address, ...]
    checksums: tuple[int, ...]  # CRC-32C with which each block was published


class SessionPinResult(Struct, frozen=True, kw_only=True):
    """Result of pinning a session's chain."""

    blocks: int  # number of leading blocks of the chain that are pinned now
    # number of blocks after the pinned ones that are in the pool, but were not pinned, because the limit for the bytes
    # of all session pins was reached
    refused: int = 0


class EvacuationResult(Struct, frozen=True, kw_only=True):
    """Result of copying blocks to a tier in which other nodes, or this node's successor, find them."""

    tier: str = ""  # name of the tier; empty if no tier is suitable, or if no copy is needed
    done: int = 0  # number of leading blocks of the request that are finished: copied, already in the tier, or given up
    moved: int = 0  # number of blocks that were copied to the tier during this request
    there: int = 0  # number of blocks that the tier had already
    # number of blocks that were given up: the tier or its write budget refused them, the pool has lost them, or writes failed repeatedly
    refused: int = 0
    # number of copies to the tier that failed during this request; later copies of the same blocks may have succeeded
    failed: int = 0


class StoreClientCounters(Struct, frozen=True, kw_only=True):
    """Counters of one store client since it was made."""

    hits: int = 0  # number of blocks that were matched under a lease
    misses: int = 0  # number of blocks that were requested under a lease and not found
    bytes_read: int = 0  # number of bytes of the blocks that were read with the right checksum
    bytes_written: int = 0  # number of bytes of published blocks
    corrupt: int = 0  # number of blocks that were read with a wrong checksum
    # number of corrupt blocks that the node did not condemn, usually because they were damaged only in transit
    damaged: int = 0
    # number of matched blocks that could not be read, for example because the lease had ended already
    lost: int = 0
    dropped: int = 0  # number of blocks that should be stored and were not, for example because the pool was full
    failures: int = 0  # number of calls that the node did not answer, or refused because one of its limits was reached


class TenantStats(Struct, frozen=True, kw_only=True):
    """Usage of the pool by a tenant with a quota.

    The counters restart at zero if the node has forgotten the tenant meanwhile (`kvstore.pool.quotas`, rule 4).
    """

    tenant: str  # first 16 hexadecimal digits of the SHA-256 of the tenant's salt; the salt itself is secret
    bytes: int  # number of bytes that the tenant's blocks occupy
    quota_bytes: int
    hits: int  # number of blocks that were matched under a lease
    misses: int
    evicted: int  # number of the tenant's blocks that were evicted to make room for other blocks of the tenant
    refused: int  # number of blocks that were not stored, because the quota or the pool had no room for them


class Stats(Struct, frozen=True, kw_only=True):
    """State of a node, with its counters since it started."""

    blocks: int
    bytes: int
    capacity_bytes: int
    hits: int  # number of blocks that were matched under a lease
    misses: int  # number of blocks that were requested under a lease and not matched
    written: int  # number of published blocks
    evicted: int
    corrupt: int  # number of condemned blocks
    expired: int  # number of reservations and leases that ended at their deadline, and not earlier by a call
    pinned: int  # number of blocks that are pinned now
    bytes_matched: int = 0  # number of bytes of the blocks that `hits` counts
    bytes_written: int = 0  # number of bytes of the blocks that `written` counts
    refused: int = 0  # number of blocks that were not stored, because the pool or a tenant's quota had no room
    leases: int = 0  # number of leases that are open now, including session pins and the node's own pins
    reservations: int = 0  # number of reservations that are open now
    held_bytes: int = 0  # number of bytes that session pins keep in the pool now
    tiers: tuple[TierStatus, ...] = ()  # state of each backing tier
    # One for each tenant with a quota whose account the node has not forgotten (`kvstore.pool.quotas`, rule 4).
    tenants: tuple[TenantStats, ...] = ()


class DataPath(StrEnum):
    """The way in which bytes move between a node's pool and a client."""

    SHM = "shm"  # shared memory: the client maps the pool into its address space
    NIXL = "nixl"  # the client reads and writes the pool over a fast network, with the library NIXL
    TCP = "tcp"


class StoreEndpoints(Struct, frozen=True, kw_only=True):
    """Addresses at which a node listens, with the actual ports if the system chose them."""

    store_id: str
    incarnation: str
    listen: tuple[str, ...]  # addresses of the gRPC server, each "unix:/path" or host:port
    shm_socket: str  # path of the memory handout's socket; empty if the node has no memory handout
    data_address: str  # host:port of the TCP data server; empty if the node has no TCP data server
