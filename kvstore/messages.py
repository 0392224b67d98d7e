"""Values of the store: where blocks lie, what was matched, what changed."""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NewType, Self, TypeAlias, overload

from msgspec import Struct

from kvstore.block import BlockHash

LeaseId = NewType("LeaseId", int)
ReservationId = NewType("ReservationId", int)

NO_LEASE = LeaseId(0)
"""What a match answers that pinned nothing."""

NO_RESERVATION = ReservationId(0)
"""What a reservation answers that found nothing to write, or no space."""


NODE = "node"
"""Owner of what a node reserves for itself; no client may call itself that."""

POOL_TIER = "cpu"
"""Name of a node's memory among its tiers."""


class BlockKey(Struct, frozen=True, order=True, gc=False):
    """What names a block on a node. Positional, and nothing for the garbage collector: there are millions."""

    digest: bytes  # of the namespace
    name: BlockHash


class Slot(Struct, frozen=True, gc=False):
    """Where the bytes of a block lie, as clients see it."""

    offset: int  # bytes from the start of the pool
    generation: int  # changes whenever the place is given to another block
    crc32c: int = 0  # of the block's bytes; 0 while nothing is written

    def pack(self) -> bytes:
        """As in `Slots`."""
        return SLOT.pack(self.offset, self.generation, self.crc32c)


SLOT = struct.Struct("<QQI")  # offset, generation, CRC-32C


class Slots(Struct, frozen=True, gc=False):
    """A sequence of slots in the form in which they travel: a match of hundreds is one string, not hundreds of objects."""

    packed: bytes = b""  # `SLOT`, one after the other

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
        """Those of the slots, in that order."""
        if isinstance(indices, range) and indices.step == 1 and indices.start >= 0 and indices.stop <= len(self):
            return type(self)(self.packed[indices.start * SLOT.size : indices.stop * SLOT.size])
        return type(self).of(self[index] for index in indices)

    def __iter__(self) -> Iterator[Slot]:
        return (Slot(*fields) for fields in SLOT.iter_unpack(self.packed))


AnySlots: TypeAlias = Slots | Sequence[Slot]
"""Slots in either form."""


class Address(Struct, frozen=True, kw_only=True, gc=False):
    """Where in the pool the bytes of a block lie, as the node sees it."""

    key: BlockKey
    offset: int  # bytes from the start of the pool
    length: int  # bytes
    generation: int


class Match(Struct, frozen=True, kw_only=True):
    """The longest prefix of a chain that a node holds, pinned until the lease is released or ends.

    Can be pickled or encoded by msgspec, and read by another process than the one that matched.
    """

    incarnation: str  # of the node
    lease_id: LeaseId = NO_LEASE
    names: tuple[BlockHash, ...] = ()
    slots: Slots = Slots()
    loading: int = 0  # blocks right after these that are on their way up from lower tiers; match again to see them
    promoted: dict[str, int] = {}  # of these, by tier, those that came up from one since anybody was told so

    def __len__(self) -> int:
        return len(self.slots)


def merge_promoted(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Blocks that came up, of two matches of the same chain, each of which tells what the other did not."""
    return {tier: one.get(tier, 0) + other.get(tier, 0) for tier in {**one, **other}}


def blocks_by_tier(good: int, asked: int, promoted: Mapping[str, int]) -> dict[str, int]:
    """Of the blocks that were read, how many each tier of the node had.

    Args:
        good: That were read: the first ones of those that were asked for.
        asked: For: the last ones of a match.
        promoted: Of the matches that found them, taken together; they are the last ones.
    """
    tiers: dict[str, int] = {}
    memory = max(0, asked - sum(promoted.values()))
    for tier, count in ((POOL_TIER, memory), *promoted.items()):
        if taken := min(count, good - sum(tiers.values())):
            tiers[tier] = taken
    return tiers


class BlockOutcome(StrEnum):
    """What came of moving one block's bytes."""

    MOVED = "moved"  # and their checksum was right
    GONE = "gone"  # the slot belongs to another block by now, or its node does not answer
    CORRUPT = "corrupt"  # the checksum is wrong


class FetchResult(Struct, frozen=True, gc=False):
    """What a backing tier answers for one block."""

    outcome: BlockOutcome
    crc32c: int = 0  # of the bytes that were put into the destination; 0 unless MOVED


GONE = FetchResult(BlockOutcome.GONE)
CORRUPT = FetchResult(BlockOutcome.CORRUPT)


class TierStatus(Struct, frozen=True, kw_only=True):
    """What a backing tier says of itself. Counters since it was opened; it may hold blocks from before."""

    name: str  # "ssd", "redis", "s3", "peer"
    blocks: int = 0  # held now, as far as the tier knows
    bytes: int = 0  # that they occupy there
    capacity_bytes: int = 0  # 0: not known, or not ours to say
    hits: int = 0  # blocks fetched
    misses: int = 0  # blocks asked for and not there, corrupt ones included
    bytes_read: int = 0
    bytes_written: int = 0
    refused: int = 0  # blocks not taken: no space, no budget
    evicted: int = 0
    corrupt: int = 0  # blocks whose bytes failed their checksum or could not be decoded
    failures: int = 0  # operations that raised `TierFailed` or ran past their deadline
    damaged: int = (
        0  # of the corrupt ones, blocks that were damaged on their way: where they lie they are sound, or may be
    )
    fenced: int = 0  # servers that are left alone now, because their answers are damaged often


class BlockChanges(Struct, frozen=True, kw_only=True):
    """What became readable and what ceased to be, in one namespace and tier. No name is in both."""

    digest: bytes
    stored: tuple[BlockHash, ...] = ()
    removed: tuple[BlockHash, ...] = ()
    tier: str = POOL_TIER


class Claim(Struct, frozen=True, gc=False):
    """Command: the place now belongs to this block, whose bytes are about to be written."""

    address: Address


class Discard(Struct, frozen=True, gc=False):
    """Command: the block is gone; whoever still reads there must notice."""

    address: Address


TierCommand = Claim | Discard


class ReservedSlot(Struct, frozen=True, gc=False):
    """A place to write one block to."""

    index: int  # into the names that were asked for
    slot: Slot


class WriteReservation(Struct, frozen=True, kw_only=True):
    """Places to write to, held until they are published or the reservation ends."""

    reservation_id: ReservationId
    reserved: tuple[ReservedSlot, ...]
    refused: int  # blocks that nobody holds and for which there is no space


class ClientWriteReservation(Struct, frozen=True, kw_only=True):
    """A reservation, as a client gets it."""

    reservation_id: ReservationId
    indices: tuple[int, ...]  # into the names that were asked for
    slots: Slots  # one an index
    refused: int

    def __len__(self) -> int:
        return len(self.indices)


class LeasedSlots(Struct, frozen=True, kw_only=True):
    """What the machine answers to a match."""

    lease_id: LeaseId
    slots: Slots


class SessionPinResult(Struct, frozen=True, kw_only=True):
    """What came of a request to hold a session's chain."""

    blocks: int  # leading blocks that are kept from eviction now
    refused: int = 0  # blocks after them that are there, but would exceed what holds may keep


class EvacuationResult(Struct, frozen=True, kw_only=True):
    """What has come of bringing blocks to where other nodes find them."""

    tier: str = ""  # where to; empty: there is nowhere else, or no need
    done: int = 0  # leading blocks of those asked for that need nothing more
    moved: int = 0  # blocks that came there
    there: int = 0  # that were there before
    refused: int = 0  # that the tier has not taken
    failed: int = 0  # batches that failed meanwhile; what was in them may have gone with another


class StoreClientCounters(Struct, frozen=True, kw_only=True):
    """What one client did since it connected."""

    hits: int = 0  # blocks matched under a lease
    misses: int = 0  # blocks asked for under a lease and not held, or not to be had
    bytes_read: int = 0  # verified
    bytes_written: int = 0  # published
    corrupt: int = 0  # blocks whose checksum was wrong
    damaged: int = (
        0  # of them, blocks that the node has looked at again, and found sound: they were damaged on their way
    )
    lost: int = 0  # blocks matched, but gone when they were read: the lease had ended, or the node was away
    dropped: int = 0  # blocks not written, because the store was full or away
    failures: int = 0  # calls that the node did not answer


class TenantStats(Struct, frozen=True, kw_only=True):
    """What a tenant with a quota has, and what came of it. Counters since its last account was opened."""

    tenant: str  # first 16 hexadecimal digits of the SHA-256 of its salt, which is a secret
    bytes: int  # that its blocks occupy
    quota_bytes: int
    hits: int  # blocks matched under a lease
    misses: int
    evicted: int  # blocks that made room for others of the same tenant
    refused: int  # blocks not taken, because the quota was full of blocks in use


class Stats(Struct, frozen=True, kw_only=True):
    """Counters since the node started, and what it holds now."""

    blocks: int
    bytes: int
    capacity_bytes: int
    hits: int  # blocks matched under a lease
    misses: int  # blocks asked for under a lease and not held
    written: int  # blocks published
    evicted: int
    corrupt: int  # blocks condemned
    expired: int  # reservations and leases that ended by themselves
    pinned: int  # blocks pinned now
    bytes_matched: int = 0  # of the hits
    bytes_written: int = 0  # of the blocks published
    refused: int = 0  # blocks that were to be written, and for which there was no space
    leases: int = 0  # open now, holds included
    reservations: int = 0  # open now
    held_bytes: int = 0  # kept by holds now
    tiers: tuple[TierStatus, ...] = ()  # below the pool
    tenants: tuple[TenantStats, ...] = ()  # that have a quota and used it of late


class DataPath(StrEnum):
    """How bytes get from a node's pool to a client."""

    SHM = "shm"  # the client maps the pool
    NIXL = "nixl"  # the client reads and writes the pool over a fast fabric
    TCP = "tcp"


class StoreEndpoints(Struct, frozen=True, kw_only=True):
    """Where a node really listens, ports filled in."""

    store_id: str
    incarnation: str
    listen: tuple[str, ...]  # gRPC: "unix:/path" or host:port
    shm_socket: str  # path; empty: none
    data_address: str  # host:port of the TCP data plane; empty: none
