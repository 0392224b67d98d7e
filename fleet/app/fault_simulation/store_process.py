"""Store process: runs production's pool machine and tier hierarchy over a virtual pool and a virtual disk.

The disk keeps its blocks when the process ends. In production, threads read and write it. In this simulation, each
transfer takes a drawn time, and may fail or miss its deadline. The process reports the results of transfers to the
hierarchy in the same way as `kvstore.service.transfer_executor`.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import assert_never

import google_crc32c
from msgspec import Struct

from fleet.app.fault_simulation.block_truth import BLOCK_BYTES, DIGEST, NAMESPACE, STORE_ID, BlockTruth
from fleet.app.fault_simulation.fault_points import FaultPoint, FaultPoints
from fleet.app.fault_simulation.promises import Promise, PromiseBroken
from fleet.app.fault_simulation.virtual_network import ConnectionEnd, Listener, VirtualNetwork
from fleet.app.fault_simulation.virtual_process import VirtualProcess
from fleet.core.clock import MILLISECOND, SECOND, Nanos
from fleet.router.messages import StoreChanged
from fleet.sim.kernel import Kernel
from kvstore.block import BlockHash
from kvstore.errors import Exhausted
from kvstore.eviction.lru import LruEviction
from kvstore.hierarchy.machine import Hierarchy
from kvstore.hierarchy.tier_states import AdmitEverything, TierRule
from kvstore.hierarchy.transfers import Confirm, Demote, Fetch, Find, TierTransfer
from kvstore.messages import (
    CORRUPT,
    GONE,
    BlockChanges,
    BlockKey,
    BlockOutcome,
    Claim,
    FetchResult,
    LeasedSlots,
    LeaseId,
    ReservationId,
    Slot,
    WriteReservation,
)
from kvstore.pool.extents import PAGE_BYTES
from kvstore.pool.machine import BlockMachine

STORE = "store"
POOL_BLOCKS = 16
TICK = Nanos(500 * MILLISECOND)
DISK_TIME = Nanos(4 * MILLISECOND)
READ_TIME = Nanos(3 * MILLISECOND)  # time until the bytes of a read have reached the client


class MatchCall(Struct, frozen=True, kw_only=True):
    names: tuple[BlockHash, ...]
    lease: Nanos
    max_wait: Nanos


class MatchAnswer(Struct, frozen=True):
    leased: LeasedSlots
    loading: int


class ReadCall(Struct, frozen=True):
    slots: tuple[Slot, ...]


class ReleaseCall(Struct, frozen=True):
    lease_id: LeaseId


class ReserveCall(Struct, frozen=True, kw_only=True):
    names: tuple[BlockHash, ...]
    owner: str
    lease: Nanos


class WriteCall(Struct, frozen=True):
    blocks: tuple[tuple[Slot, bytes], ...]


class PublishCall(Struct, frozen=True, kw_only=True):
    reservation_id: ReservationId
    checksums: dict[int, int]
    owner: str


class CondemnCall(Struct, frozen=True):
    name: BlockHash
    slot: Slot


class Refused(Struct, frozen=True):
    """Answer of the store node: it refuses a lease or a write reservation, because clients have too many of them open."""


StoreCall = MatchCall | ReadCall | ReleaseCall | ReserveCall | WriteCall | PublishCall | CondemnCall


class VirtualDisk:
    """Keeps records with checksums, and simulates the faults of a disk. It outlives the store process."""

    def __init__(self) -> None:
        self.records: dict[BlockKey, tuple[bytes, int]] = {}
        self.fails = False
        self.full = False
        self.hangs = False
        self.corrupts = 0  # how many of the next records will be damaged when they are written

    def write(self, key: BlockKey, content: bytes, checksum: int) -> bool:
        if self.full:
            return False
        if self.corrupts:
            self.corrupts -= 1
            content = bytes([content[0] ^ 1]) + content[1:]
        self.records[key] = (content, checksum)
        return True


class _Place(Struct):
    """The block at one offset of the pool; `content` is None until its bytes are written."""

    generation: int
    name: BlockHash
    content: bytes | None = None
    readable: bool = False  # True if a client has published the block, or it was read from the disk


class StoreProcess(VirtualProcess):
    """Runs one incarnation of the store node in virtual time."""

    def __init__(
        self,
        kernel: Kernel,
        network: VirtualNetwork,
        points: FaultPoints,
        truth: BlockTruth,
        disk: VirtualDisk,
        chance: Random,
        epoch: int,
    ):
        super().__init__(kernel, STORE)
        self.machine = BlockMachine(POOL_BLOCKS * PAGE_BYTES, LruEviction(), epoch=epoch, max_leases=64)
        self.machine.open(NAMESPACE, self.now)
        self.hierarchy = Hierarchy(
            self.machine,
            [TierRule(name="ssd", admission=AdmitEverything(), finds_in_memory=True)],
            batch_bytes=4 * BLOCK_BYTES,
        )
        self.calls = 0
        self._network, self._points, self._truth, self._disk = network, points, truth, disk
        self._random = chance.random
        self._places: dict[int, _Place] = {}  # the blocks in the pool, by their offsets
        self._watchers: list[ConnectionEnd] = []
        network.listeners[STORE] = Listener(process=self, accept=self._accept, handle=self._serve)
        self.after(TICK, self._tick)

    # Calls of clients.

    def _serve(self, request: object, answer: Callable[[object], None]) -> None:
        self.calls += 1
        machine, now = self.machine, self.now
        match request:
            case MatchCall():
                answer(self._match(request))
            case ReadCall():
                read = tuple(map(self._read, request.slots))
                self.after(READ_TIME, lambda: answer(read))
            case ReleaseCall():
                machine.release([request.lease_id], now)
                answer(None)
            case ReserveCall():
                answer(self._reserve(request))
            case WriteCall():
                for slot, content in request.blocks:
                    if (address := machine.writable(DIGEST, slot)) is not None:
                        self._places[address.offset].content = content
                answer(None)
            case PublishCall():
                answer(self._publish(request))
            case CondemnCall():
                answer(self._condemn(request))
            case _:
                raise AssertionError(request)
        self._settle()

    def _match(self, call: MatchCall) -> MatchAnswer | Refused:
        try:
            leased = self.machine.match(DIGEST, call.names, lease=call.lease, now=self.now)
        except Exhausted:
            return Refused()
        held = len(leased.slots)
        if held < len(call.names):
            self.hierarchy.prefetch(DIGEST, call.names, held, call.max_wait, self.now)
        for slot in leased.slots:
            place = self._places.get(slot.offset)
            if place is None or place.generation != slot.generation or not place.readable:
                raise PromiseBroken(Promise.PUBLISHED, f"a match found slot {slot}, which nobody has published")
        return MatchAnswer(leased, self.hierarchy.loading(DIGEST, call.names[held:]))

    def _read(self, slot: Slot) -> bytes | None:
        if (address := self.machine.readable(DIGEST, slot)) is None:
            self._points.reach(FaultPoint.SLOT_REUSED)
            return None
        place = self._places[address.offset]
        if place.generation != slot.generation or not place.readable or place.content is None:
            raise PromiseBroken(Promise.PUBLISHED, f"slot {slot} is read, which nobody has published")
        return place.content

    def _reserve(self, call: ReserveCall) -> WriteReservation | Refused:
        try:
            reservation = self.machine.reserve(DIGEST, call.names, owner=call.owner, lease=call.lease, now=self.now)
        except Exhausted:
            return Refused()
        self._points.reach(FaultPoint.POOL_FULL, reservation.refused)
        return reservation

    def _publish(self, call: PublishCall) -> int:
        writing = [place for place in self._places.values() if not place.readable]
        published = self.machine.publish(call.reservation_id, call.checksums, owner=call.owner, now=self.now)
        if published:  # mark as readable only the blocks that this call has published
            for place in writing:
                slot = self.machine.find(DIGEST, place.name)
                if slot is None or slot.generation != place.generation:
                    continue
                if place.content is None or google_crc32c.value(place.content) != slot.crc32c:
                    raise PromiseBroken(
                        Promise.PUBLISHED, f"slot {slot} was published and its bytes were never written"
                    )
                place.readable = True
        else:
            self._points.reach(FaultPoint.WRITE_TOO_LATE)
        return published

    def _condemn(self, call: CondemnCall) -> bool:
        address = self.machine.readable(DIGEST, call.slot)
        if address is None:
            return False
        content = self._places[address.offset].content
        if content is not None and google_crc32c.value(content) == call.slot.crc32c:
            return False  # the bytes in the pool are right, so they were damaged on the way to the client
        return self.machine.condemn(DIGEST, call.name, call.slot.generation, self.now)

    # Commands of the pool machine and the hierarchy.

    def _settle(self) -> None:
        """Perform the commands of the pool machine and the hierarchy, and report the changes to the watchers."""
        for command in self.machine.commands():
            address = command.address
            if isinstance(command, Claim):
                self._places[address.offset] = _Place(generation=address.generation, name=address.key.name)
            elif (place := self._places.get(address.offset)) is not None and place.generation == address.generation:
                del self._places[address.offset]
        changes = self.machine.changes()
        for change in changes:
            self.hierarchy.forget_origins(change.digest, change.removed)
            self.hierarchy.offer(change.digest, change.stored, self.now)
        for block_changes in (*changes, *self.hierarchy.changes()):
            for watcher in self._watchers:
                watcher.send(_store_changed(block_changes))
        for transfer in self.hierarchy.commands():
            self._begin(transfer)

    def _tick(self) -> None:
        self.machine.expire(self.now)
        self.hierarchy.tick(self.now)
        self._settle()
        self.machine.check()
        self.hierarchy.check()
        self.after(TICK, self._tick)

    # Transfers to and from the disk.

    def _begin(self, transfer: TierTransfer) -> None:
        began = self.now
        ended = False

        def late() -> None:
            if not ended:
                self._points.reach(FaultPoint.DISK_LATE)
                self.hierarchy.late(transfer, began, self.now)
                self._settle()

        def end() -> None:
            nonlocal ended
            if self._disk.hangs:
                self.after(SECOND, end)
                return
            ended = True
            if self._disk.fails:
                self._points.reach(FaultPoint.DISK_FAILED)
                self.hierarchy.failed(transfer, began, self.now)
            else:
                self._end(transfer)
            self._settle()

        self.after(round(DISK_TIME * (0.5 + self._random())), end)
        self.kernel.at(transfer.deadline, lambda: self.run(late))

    def _end(self, transfer: TierTransfer) -> None:
        hierarchy, records, now = self.hierarchy, self._disk.records, self.now
        match transfer:
            case Find(promotion_id=promotion_id, keys=keys):
                count = next((i for i, key in enumerate(keys) if key not in records), len(keys))
                hierarchy.found(promotion_id, count, now)
            case Fetch(promotion_id=promotion_id, addresses=addresses):
                results = [self._fetched(address.key, address.offset, address.generation) for address in addresses]
                hierarchy.fetched(promotion_id, results, now)
                self._points.reach(FaultPoint.PROMOTED, sum(each.outcome is BlockOutcome.MOVED for each in results))
            case Demote(demotion_id=demotion_id, addresses=addresses, checksums=checksums):
                kept = []
                for address, checksum in zip(addresses, checksums, strict=True):
                    place = self._places[address.offset]
                    if place.generation != address.generation or place.content is None:
                        raise PromiseBroken(Promise.PUBLISHED, f"{address} is pinned for the disk and has no bytes")
                    kept.append(self._disk.write(address.key, place.content, checksum))
                self._points.reach(FaultPoint.DISK_FULL, kept.count(False))
                hierarchy.kept(demotion_id, kept, now)
            case Confirm(confirm_id=confirm_id, keys=keys):
                hierarchy.confirmed(confirm_id, [key in records for key in keys])
            case _:
                assert_never(transfer)

    def _fetched(self, key: BlockKey, offset: int, generation: int) -> FetchResult:
        """Copy a block from the disk to its reserved place in the pool, verify its checksum, and return the outcome.

        If the checksum is wrong, remove the block's record from the disk.
        """
        if (record := self._disk.records.get(key)) is None:
            return GONE
        content, checksum = record
        place = self._places[offset]
        if place.generation != generation:
            raise PromiseBroken(
                Promise.PUBLISHED, "a record of the disk arrives in a place that belongs to another block"
            )
        place.content = content
        if google_crc32c.value(content) != checksum:
            self._points.reach(FaultPoint.DISK_CORRUPT)
            del self._disk.records[key]
            return CORRUPT
        place.readable = True
        return FetchResult(BlockOutcome.MOVED, checksum)

    # Streams of changes to watchers.

    def _accept(self, end: ConnectionEnd) -> None:
        self._watchers.append(end)
        end.ended = lambda: self._watchers.remove(end)
        for number, held in enumerate(self.machine.held()):
            end.send(_store_changed(held, reset=not number))

    # End of the process.

    def count_points(self) -> None:
        """Count the fault points that follow from the counters of the store's machine. Call this once, at the process's end."""
        stats = self.machine.stats()
        self._points.reach(FaultPoint.STORE_LEASE_EXPIRED, stats.expired)
        self._points.reach(FaultPoint.EVICTED, stats.evicted)

    def kill(self) -> None:
        if self.calls:
            self._points.reach(FaultPoint.STORE_KILLED)
        self.count_points()
        super().kill()
        self._network.ended(self)

    def flip_bit(self, pick: int) -> bool:
        """Flip one bit of a readable block in the pool, chosen by `pick`. Return False if the pool has no readable block."""
        readable = [place for place in self._places.values() if place.readable and place.content is not None]
        if not readable:
            return False
        place = readable[pick % len(readable)]
        assert place.content is not None
        place.content = bytes([place.content[0] ^ 1]) + place.content[1:]
        return True

    def leftovers(self) -> Sequence[str]:
        """Return a description of each kind of thing that is left although nobody uses the store, such as leases or transfers."""
        self.machine.check()
        self.hierarchy.check()
        stats = self.machine.stats()
        held = {"leases": stats.leases, "write reservations": stats.reservations, "pinned blocks": stats.pinned}
        left = [f"the store holds {count} {what}" for what, count in held.items() if count]
        return left if self.hierarchy.is_idle else [*left, "the store's hierarchy has transfers under way"]


def _store_changed(changes: BlockChanges, *, reset: bool = False) -> StoreChanged:
    return StoreChanged(
        store_id=STORE_ID,
        fingerprint=changes.digest.hex(),
        tier=changes.tier,
        stored=changes.stored,
        removed=changes.removed,
        reset=reset,
    )
