"""Values of the store: places of blocks, matches, reservations and changes."""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NewType, Self, TypeAlias, overload

from msgspec import Struct

from kvstore.block import BlockHash

LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)

NO_LEASE = LeaseId(0)
"""Lease id of a match that pinned nothing."""

NO_RESERVATION = ReservationId(0)
"""Reservation id of a reservation that found nothing to write, or no space."""


NODE = "node"
"""Owner of the node's own reservations; no client may use this name."""

POOL_TIER = "cpu"
"""Name of the pool among the tiers of a node."""


class BlockKey(Struct, frozen=True, order=True, gc=False):
    """Identity of a block on a node. Positional, and ignored by the garbage collector, because there are millions."""

    digest: bytes  # digest of the namespace
    name: BlockHash


class Slot(Struct, frozen=True, gc=False):
    """Place of a block's bytes as clients see it."""

    offset: int  # bytes from the start of the pool
    generation: int  # slot generation, which changes when the place is given to another block
    crc32c: int = 0  # CRC-32C of the block's bytes; 0 while nothing is written

    def pack(self) -> bytes:
        """Return the wire form, as in `Slots`."""
        return SLOT.pack(self.offset, self.generation, self.crc32c)


SLOT = struct.Struct("<QQI")  # offset, generation, CRC-32C


class Slots(Struct, frozen=True, gc=False):
    """Sequence of slots in wire form: a match of hundreds of blocks is one string instead of hundreds of objects."""

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
        """Return the slots of these indices in that order."""
        if isinstance(indices, range) and indices.step == 1 and indices.start >= 0 and indices.stop <= len(self):
            return type(self)(self.packed[indices.start * SLOT.size : indices.stop * SLOT.size])
        return type(self).of(self[index] for index in indices)

    def __iter__(self) -> Iterator[Slot]:
        return (Slot(*fields) for fields in SLOT.iter_unpack(self.packed))


AnySlots: TypeAlias = Slots | Sequence[Slot]
"""Slots in either form."""


class Address(Struct, frozen=True, kw_only=True, gc=False):
    """Place of a block's bytes in the pool as the node sees it."""

    key: BlockKey
    offset: int  # bytes from the start of the pool
    length: int  # bytes
    generation: int


class Match(Struct, frozen=True, kw_only=True):
    """Longest prefix of a chain that a node holds, pinned until the lease is released or ends.

    A match can be pickled or encoded by msgspec, and read by another process than the one that matched.
    """

    incarnation: str  # incarnation of the node
    lease_id: LeaseId = NO_LEASE
    names: tuple[BlockHash, ...] = ()
    slots: Slots = Slots()
    loading: int = 0  # blocks right after these that are being promoted; match again to see them
    promoted: dict[str, int] = {}  # blocks of this match, by tier, that were promoted and not reported before

    def __len__(self) -> int:
        return len(self.slots)


def merge_promoted(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Add up the promoted blocks of two matches of the same chain; each reports blocks that the other does not."""
    return {tier: one.get(tier, 0) + other.get(tier, 0) for tier in {**one, **other}}


def blocks_by_tier(good: int, asked: int, promoted: Mapping[str, int]) -> dict[str, int]:
    """Return how many of the first `good` blocks that were read came from each tier of the node.

    `asked` blocks at the end of a match were requested; the `promoted` ones are the last of them.
    """
    tiers: dict[str, int] = {}
    memory = max(0, asked - sum(promoted.values()))
    for tier, count in ((POOL_TIER, memory), *promoted.items()):
        if taken := min(count, good - sum(tiers.values())):
            tiers[tier] = taken
    return tiers


class BlockOutcome(StrEnum):
    """Result of moving one block's bytes."""

    MOVED = "moved"  # the checksum was right
    GONE = "gone"  # the slot belongs to another block by now, or the node does not answer
    CORRUPT = "corrupt"  # the checksum is wrong


class FetchResult(Struct, frozen=True, gc=False):
    """Answer of a backing tier for one block."""

    outcome: BlockOutcome
    crc32c: int = 0  # CRC-32C of the bytes in the destination; 0 unless MOVED


GONE = FetchResult(BlockOutcome.GONE)
CORRUPT = FetchResult(BlockOutcome.CORRUPT)


class TierStatus(Struct, frozen=True, kw_only=True):
    """State of a backing tier. Its counters start when it is opened; it may hold blocks from before."""

    name: str  # "ssd", "redis", "s3", "peer"
    blocks: int = 0  # blocks held now, as far as the tier knows
    bytes: int = 0  # bytes that they occupy
    capacity_bytes: int = 0  # 0: unknown
    hits: int = 0  # blocks fetched
    misses: int = 0  # blocks asked for and not found, including corrupt ones
    bytes_read: int = 0
    bytes_written: int = 0
    refused: int = 0  # blocks not taken: no space or no budget
    evicted: int = 0
    corrupt: int = 0  # blocks whose bytes failed their checksum or could not be decoded
    failures: int = 0  # operations that raised `TierFailed` or ran past their deadline
    damaged: int = 0  # corrupt blocks that were damaged in transit; the stored bytes are, or may be, intact
    fenced: int = 0  # servers that are fenced now because their answers are damaged often


class BlockChanges(Struct, frozen=True, kw_only=True):
    """Blocks that became readable or stopped being readable, in one namespace and tier. No block is in both lists."""

    digest: bytes
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    tier: str = POOL_TIER


class Claim(Struct, frozen=True, gc=False):
    """Command: the place now belongs to this block, whose bytes are about to be written."""

    address: Address


class Discard(Struct, frozen=True, gc=False):
    """Command: the block is gone; readers that still read its place must notice."""

    address: Address


TierCommand = Claim | Discard


class ReservedSlot(Struct, frozen=True, gc=False):
    """Place for one block that a writer may fill."""

    index: int  # index into the hashes that were asked for
    slot: Slot


class WriteReservation(Struct, frozen=True, kw_only=True):
    """Places for a writer, kept until they are published or the reservation ends."""

    reservation_id: ReservationId
    reserved: tuple[ReservedSlot, ...]
    refused: int  # blocks that nobody holds and for which there is no space


class ClientWriteReservation(Struct, frozen=True, kw_only=True):
    """Write reservation as a client receives it."""

    reservation_id: ReservationId
    indices: tuple[int, ...]  # index into the hashes that were asked for
    slots: Slots  # one for each index
    refused: int

    def __len__(self) -> int:
        return len(self.indices)


class LeasedSlots(Struct, frozen=True, kw_only=True):
    """Answer of the pool machine to a match."""

    lease_id: LeaseId
    slots: Slots


class PinnedBlocks(Struct, frozen=True):
    """Blocks of the pool that stay in place until `unpin`."""

    pin_id: int
    addresses: tuple[Address, ...]
    checksums: tuple[int, ...]  # CRC-32C with which they were published


class SessionPinResult(Struct, frozen=True, kw_only=True):
    """Result of pinning a session's chain."""

    blocks: int  # leading blocks that are pinned now
    refused: int = 0  # blocks after them that are in the pool but exceed the limit of session pins


class EvacuationResult(Struct, frozen=True, kw_only=True):
    """Result of copying blocks to a tier where other nodes find them."""

    tier: str = ""  # name of the tier; empty: there is none, or no need
    done: int = 0  # leading blocks of the request that need nothing more
    moved: int = 0  # blocks that were copied there
    there: int = 0  # blocks that were there before
    refused: int = 0  # blocks that the tier has not taken
    failed: int = 0  # batches that failed; their blocks may have been copied by another batch


class StoreClientCounters(Struct, frozen=True, kw_only=True):
    """Counters of one client since it connected."""

    hits: int = 0  # blocks matched under a lease
    misses: int = 0  # blocks asked for under a lease and not available
    bytes_read: int = 0  # bytes whose checksum was verified
    bytes_written: int = 0  # bytes of published blocks
    corrupt: int = 0  # blocks whose checksum was wrong
    damaged: int = 0  # corrupt blocks that the node found intact: they were damaged in transit
    lost: int = 0  # blocks matched but gone when they were read: the lease had ended, or the node was away
    dropped: int = 0  # blocks not written, because the store was full or away
    failures: int = 0  # calls without an answer of the node


class TenantStats(Struct, frozen=True, kw_only=True):
    """Usage of a tenant with a quota.

    The counters restart at zero if the node has forgotten the tenant meanwhile (`kvstore.pool.quotas`, rule 4).
    """

    tenant: str  # first 16 hexadecimal digits of the SHA-256 of its salt; the salt itself is a secret
    bytes: int  # bytes that its blocks occupy
    quota_bytes: int
    hits: int  # blocks matched under a lease
    misses: int
    evicted: int  # blocks evicted for other blocks of the same tenant
    refused: int  # blocks not taken because the quota was full of blocks in use


class Stats(Struct, frozen=True, kw_only=True):
    """State of a node, and its counters since it started."""

    blocks: int
    bytes: int
    capacity_bytes: int
    hits: int  # blocks matched under a lease
    misses: int  # blocks asked for under a lease and not held
    written: int  # blocks published
    evicted: int
    corrupt: int  # blocks condemned
    expired: int  # reservations and leases that ended by their deadline
    pinned: int  # blocks pinned now
    bytes_matched: int = 0  # bytes of the hits
    bytes_written: int = 0  # bytes of the published blocks
    refused: int = 0  # blocks that found no space
    leases: int = 0  # open now, including session pins
    reservations: int = 0  # open now
    held_bytes: int = 0  # bytes kept by session pins now
    tiers: tuple[TierStatus, ...] = ()  # backing tiers
    tenants: tuple[TenantStats, ...] = ()  # tenants that have a quota and used it lately


class DataPath(StrEnum):
    """How bytes move between a node's pool and a client."""

    SHM = "shm"  # the client maps the pool
    NIXL = "nixl"  # the client reads and writes the pool over a fast fabric
    TCP = "tcp"


class StoreEndpoints(Struct, frozen=True, kw_only=True):
    """Addresses at which a node listens, with the chosen ports."""

    store_id: str
    incarnation: str
    listen: tuple[str, ...]  # gRPC: "unix:/path" or host:port
    shm_socket: str  # path; empty: none
    data_address: str  # host:port of the TCP data plane; empty: none
