"""Contract tests of all transports between a client's buffers and a node's slots."""

import asyncio
import importlib.util
import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from kvstore.buffers import crc32c, pieces
from kvstore.clock import Nanos
from kvstore.errors import NamespaceUnknown, StoreUnreachable
from kvstore.messages import GONE, BlockOutcome, Claim, FetchResult, Slot
from kvstore.net.unix_sockets import listen
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.shared_memory import SharedMemoryTier
from kvstore.transports.nixl import NixlOffer, NixlTransport
from kvstore.transports.nixl_node import NixlNode
from kvstore.transports.shared_memory import MemoryHandout, SharedMemoryTransport
from kvstore.transports.tcp import TcpTransport
from kvstore.transports.tcp_frames import WINDOW
from kvstore.transports.tcp_server import DataPlaneServer
from tests.support.kvstore.builders import (
    BLOCK_BYTES,
    LEASE,
    MachineDriver,
    a_block,
    a_chain,
    a_short_folder,
    deadline_in,
    empty_buffers,
)
from tests.support.stopwatch import at_most

BLOCKS = 2 * WINDOW + 5
CLOCK = MonotonicClock()

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


class Loop:
    """An event loop in its own thread."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def do(self, act: Callable[..., Any], *args: Any) -> Any:
        """Run a function or coroutine function on the event loop, wait for its end, and return its result."""

        async def run() -> Any:
            result = act(*args)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class NixlPool:
    """A pool with a NIXL agent. The tests share it, because NIXL starts slowly on a busy machine."""

    def __init__(self):
        self.tier = SharedMemoryTier(BLOCKS * BLOCK_BYTES)
        self.node = NixlNode(self.tier)
        self.loop = Loop()

    def empty(self) -> None:
        self.tier.mapping.stamps[:] = 0
        if self.node.pid is None:
            self.loop.do(self.node.start)

    def kill(self) -> None:
        os.kill(self.node.pid, signal.SIGKILL)
        self.loop.do(self.node.stop)

    def close(self) -> None:
        self.loop.do(self.node.stop)
        self.loop.close()
        self.tier.close()


class Node:
    """The node's side of a transport; only the thread of its event loop uses the block machine."""

    def __init__(self, kind: str, folder, nixl: Callable[[], NixlPool]):
        self.kind = kind
        self.store = MachineDriver(blocks=BLOCKS)
        self.digest = self.store.digest
        self.path = f"{folder}/m"
        self.loop = Loop()
        if kind == "nixl":
            self.nixl = nixl()
            self.nixl.empty()
            self.tier = self.nixl.tier
        else:
            self.tier = SharedMemoryTier(BLOCKS * BLOCK_BYTES)
        self.do(self._start)

    async def _start(self) -> None:
        if self.kind == "shared memory":
            self.listener = listen("shm_socket", self.path)
            handout = MemoryHandout(self.listener, self.tier, lambda digest: digest == self.digest)
            self.handout = asyncio.get_running_loop().create_task(handout.run())
        if self.kind == "tcp":
            self.plane = DataPlaneServer(self.store.machine, self.tier, CLOCK)
            self.address = await self.plane.listen("127.0.0.1", 0)

    def do(self, act: Callable[..., Any], *args: Any) -> Any:
        """Run a function or coroutine function on the node's thread; then let the tier perform the machine's commands."""

        async def run() -> Any:
            result = act(*args)
            if asyncio.iscoroutine(result):
                result = await result
            for command in self.store.machine.commands():
                (self.tier.claim if isinstance(command, Claim) else self.tier.discard)(command.address)
            return result

        return self.loop.do(run)

    def open(self, digest: bytes | None = None):
        digest = digest or self.digest
        match self.kind:
            case "shared memory":
                return SharedMemoryTransport(self.path, digest, BLOCK_BYTES, CLOCK, deadline_in())
            case "tcp":
                return TcpTransport(self.address, digest, BLOCK_BYTES, CLOCK, deadline_in())
            case "nixl":
                offer = self.offer(digest)
                return NixlTransport(offer, BLOCK_BYTES, CLOCK, deadline_in(30), lambda _: self.offer(digest))

    def offer(self, digest: bytes) -> NixlOffer:
        """Return the NIXL offer that the control plane's handshake would make."""
        self.store.machine.namespace(digest)
        offer = self.nixl.node.offer
        if offer is None:
            raise StoreUnreachable("not offered")
        return offer

    def reserve(self, chain) -> tuple[int, list[Slot]]:
        reservation = self.do(self.store.reserve, chain)
        return reservation.reservation_id, [reserved.slot for reserved in reservation.reserved]

    def publish(self, reservation_id: int, slots) -> None:
        checksums = {index: slot.crc32c for index, slot in enumerate(slots)}
        self.do(lambda: self.store.machine.publish(reservation_id, checksums, owner="w", now=Nanos(0)))

    def flip_a_byte(self, slot: Slot) -> None:
        self.tier.mapping.bytes[slot.offset + 1234] ^= 0x10

    def cut(self) -> None:
        """End the node's side of the transport, as if the node had died."""
        if self.kind == "shared memory":
            self.do(self._end_handout)
        if self.kind == "tcp":
            self.do(self.plane.close)
        if self.kind == "nixl":
            self.nixl.kill()

    async def _end_handout(self) -> None:
        self.handout.cancel()
        await asyncio.wait([self.handout])
        self.listener.close()

    def close(self) -> None:
        if self.kind == "nixl":
            self.loop.close()
            return
        self.cut()
        self.loop.close()
        self.tier.close()


@pytest.fixture(scope="module")
def nixl():
    pools: list[NixlPool] = []

    def pool() -> NixlPool:
        if not pools:
            pools.append(NixlPool())
        return pools[0]

    yield pool
    for each in pools:
        each.close()


@pytest.fixture(params=["shared memory", "tcp", pytest.param("nixl", marks=needs_nixl)])
def node(request, nixl):
    with a_short_folder() as folder:
        node = Node(request.param, folder, nixl)
        yield node
        node.close()


@pytest.fixture
def transport(node):
    transport = node.open()
    yield transport
    transport.close()


def summed(slots, blocks) -> list[Slot]:
    return [
        Slot(slot.offset, slot.generation, crc32c(pieces(block))) for slot, block in zip(slots, blocks, strict=True)
    ]


def put_and_publish(node, transport, chain, blocks) -> list[Slot]:
    reservation_id, slots = node.reserve(chain)
    slots = summed(slots, blocks)
    assert transport.put(slots, blocks, deadline_in()) == [BlockOutcome.MOVED] * len(blocks)
    node.publish(reservation_id, slots)
    return slots


@pytest.mark.parametrize("count", [1, WINDOW, BLOCKS])
def test_the_same_bytes_come_back(node, transport, count):
    blocks = [a_block(seed) for seed in range(count)]
    slots = put_and_publish(node, transport, a_chain(count), blocks)

    into = empty_buffers(count)
    outcomes = transport.get(slots, into, deadline_in())

    assert outcomes == [BlockOutcome.MOVED] * count
    assert all(np.array_equal(one, other) for one, other in zip(blocks, into, strict=True))


def test_blocks_are_gathered_from_pieces_and_scattered_to_pieces(node, transport):
    block = a_block(1)
    in_pieces = [block[:4096], bytes(block[4096:5000]), block[5000:].reshape(4, -1)]
    (slot,) = put_and_publish(node, transport, a_chain(1), [in_pieces])

    pieces_back = [bytearray(1), np.zeros((BLOCK_BYTES - 1) // 8191 * 8191, np.uint8)]
    outcomes = transport.get([slot], [pieces_back], deadline_in())

    assert outcomes == [BlockOutcome.MOVED]
    assert bytes(pieces_back[0]) + bytes(pieces_back[1]) == bytes(block)


def test_missing_checksums_are_computed_in_transfer(node, transport):
    blocks = [a_block(1), [a_block(2)[:100], a_block(2)[100:]], a_block(3)]
    reservation_id, slots = node.reserve(a_chain(3))
    wrong = Slot(slots[1].offset, slots[1].generation + 1000)

    answers = transport.put_summing([slots[0], wrong, slots[2]], blocks, deadline_in())

    sums = [crc32c(pieces(block)) for block in blocks]
    assert answers == [FetchResult(BlockOutcome.MOVED, sums[0]), GONE, FetchResult(BlockOutcome.MOVED, sums[2])]
    slots = summed(slots, blocks)
    node.publish(reservation_id, slots)
    assert transport.get([slots[0], slots[2]], empty_buffers(2), deadline_in()) == [BlockOutcome.MOVED] * 2


def test_a_slot_of_another_generation_is_a_miss(node, transport):
    slots = put_and_publish(node, transport, a_chain(3), [a_block(seed) for seed in range(3)])
    slots[1] = Slot(slots[1].offset, slots[1].generation + 1000, slots[1].crc32c)

    outcomes = transport.get(slots, empty_buffers(3), deadline_in())

    assert outcomes == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.MOVED]


def test_slot_of_another_block_is_a_miss(node, transport):
    (slot,) = put_and_publish(node, transport, a_chain(1, "old"), [a_block(1)])
    others = a_chain(BLOCKS, "new")
    put_and_publish(node, transport, others, [a_block(seed) for seed in range(BLOCKS)])

    assert transport.get([slot], empty_buffers(1), deadline_in()) == [BlockOutcome.GONE]


def test_one_flipped_byte_is_never_returned_as_good(node, transport):
    slots = put_and_publish(node, transport, a_chain(3), [a_block(seed) for seed in range(3)])
    node.flip_a_byte(slots[1])

    outcomes = transport.get(slots, empty_buffers(3), deadline_in())

    assert outcomes == [BlockOutcome.MOVED, BlockOutcome.CORRUPT, BlockOutcome.MOVED]


def test_bytes_with_wrong_checksum_are_never_returned(node, transport):
    reservation_id, (slot,) = node.reserve(a_chain(1))
    lie = Slot(slot.offset, slot.generation, 1234)

    put = transport.put([lie], [a_block(1)], deadline_in())
    node.publish(reservation_id, [lie])

    assert put in ([BlockOutcome.MOVED], [BlockOutcome.CORRUPT])
    assert transport.get([lie], empty_buffers(1), deadline_in()) == [BlockOutcome.CORRUPT]


def test_a_reservation_that_has_ended_cannot_be_written(node, transport):
    (present,) = put_and_publish(node, transport, a_chain(1, "present"), [a_block(1)])
    _, slots = node.reserve(a_chain(2, "late"))
    node.do(lambda: node.store.machine.expire(LEASE))

    outcomes = transport.put(summed(slots, [a_block(2)] * 2), [a_block(2)] * 2, deadline_in())

    assert outcomes == [BlockOutcome.GONE] * 2
    assert transport.get([present], empty_buffers(1), deadline_in()) == [BlockOutcome.MOVED]


def test_former_writer_cannot_touch_the_next_block(node, transport):
    _, (late,) = node.reserve(a_chain(1, "late"))
    node.do(lambda: node.store.machine.expire(LEASE))
    blocks = [a_block(seed) for seed in range(BLOCKS)]
    slots = put_and_publish(node, transport, a_chain(BLOCKS, "new"), blocks)
    assert late.offset in {slot.offset for slot in slots}

    assert transport.put(summed([late], [a_block(99)]), [a_block(99)], deadline_in()) == [BlockOutcome.GONE]

    assert transport.get(slots, empty_buffers(BLOCKS), deadline_in()) == [BlockOutcome.MOVED] * BLOCKS


def test_unknown_namespace_is_rejected_before_any_byte_moves(node):
    with pytest.raises(NamespaceUnknown):
        node.open(b"?" * 16)


def test_no_bytes_move_after_the_deadline(node, transport):
    slots = put_and_publish(node, transport, a_chain(2), [a_block(1), a_block(2)])

    assert transport.get(slots, empty_buffers(2), CLOCK.now()) == [BlockOutcome.GONE] * 2
    assert transport.get(slots, empty_buffers(2), deadline_in()) == [BlockOutcome.MOVED] * 2


def test_cut_transport_is_a_miss_within_the_deadline(node, transport):
    blocks = [a_block(seed) for seed in range(3)]
    slots = put_and_publish(node, transport, a_chain(3), blocks)
    node.cut()

    into = empty_buffers(3)
    with at_most(20):
        outcomes = transport.get(slots, into, deadline_in(1))

    for outcome, block, copy in zip(outcomes, blocks, into, strict=True):
        assert outcome is BlockOutcome.GONE or (outcome is BlockOutcome.MOVED and np.array_equal(block, copy))
    if node.kind in ("tcp", "nixl"):
        assert outcomes == [BlockOutcome.GONE] * 3
    with pytest.raises(StoreUnreachable):
        node.open()


def test_threads_get_only_their_own_blocks(node, transport):
    blocks = [a_block(seed) for seed in range(40)]
    slots = put_and_publish(node, transport, a_chain(40), blocks)

    def read(mine: range) -> bool:
        for _ in range(20):
            into = empty_buffers(len(mine))
            outcomes = transport.get([slots[i] for i in mine], into, deadline_in())
            assert outcomes == [BlockOutcome.MOVED] * len(mine)
            assert all(np.array_equal(blocks[i], copy) for i, copy in zip(mine, into, strict=True))
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, [range(start, start + 10) for start in range(0, 40, 10)]))


def test_two_clients_work_independently(node, transport):
    blocks = [a_block(seed) for seed in range(40)]
    slots = put_and_publish(node, transport, a_chain(40), blocks)
    other = node.open()
    _, to_write = node.reserve(a_chain(40, "b"))
    theirs = [a_block(seed) for seed in range(100, 140)]
    to_write = summed(to_write, theirs)

    def write() -> list[BlockOutcome]:
        return [outcome for _ in range(10) for outcome in other.put(to_write, theirs, deadline_in())]

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        for _ in range(10):
            into = empty_buffers(40)
            assert transport.get(slots, into, deadline_in()) == [BlockOutcome.MOVED] * 40
            assert all(np.array_equal(one, copy) for one, copy in zip(blocks, into, strict=True))
        assert set(writing.result()) == {BlockOutcome.MOVED}
    other.close()


def test_reader_gets_its_block_or_a_miss_while_slots_change(node, transport):
    """Read blocks while their slots are given to other blocks as fast as possible."""
    over = threading.Event()
    names = itertools.count()

    def churn() -> None:
        while not over.is_set():
            blocks = [a_block(next(names)) for _ in range(4)]
            reservation_id, slots = node.reserve(a_chain(4, f"c{next(names)}"))
            for slot, block in zip(slots, blocks, strict=True):
                node.tier.mapping.block(slot.offset, BLOCK_BYTES)[:] = block
            slots = summed(slots, blocks)
            node.publish(reservation_id, slots)
            published.append((slots, blocks))

    published: list[tuple[list[Slot], list[np.ndarray]]] = []
    counts = dict.fromkeys(BlockOutcome, 0)
    with ThreadPoolExecutor(1) as threads:
        churning = threads.submit(churn)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and (counts[BlockOutcome.MOVED] < 20 or counts[BlockOutcome.GONE] < 20):
            for age in (1, BLOCKS // 4):  # new blocks are mostly present, and old ones are about to be evicted
                if len(published) < age:
                    continue
                slots, blocks = published[-age]
                into = empty_buffers(len(slots))
                for outcome, block, copy in zip(transport.get(slots, into, deadline_in()), blocks, into, strict=True):
                    assert outcome is not BlockOutcome.MOVED or np.array_equal(block, copy)
                    counts[outcome] += 1
        over.set()
        churning.result()

    assert counts[BlockOutcome.MOVED] >= 20
    assert counts[BlockOutcome.GONE] + counts[BlockOutcome.CORRUPT] >= 20


def test_closed_transport_gives_misses(node, transport):
    if node.kind == "shared memory":
        return  # this transport can still read after `close`, because it keeps its mapping
    (slot,) = put_and_publish(node, transport, a_chain(1), [a_block(1)])
    transport.close()

    assert transport.get([slot], empty_buffers(1), deadline_in()) == [BlockOutcome.GONE]


def test_silent_listener_is_unreachable_within_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as mute, a_short_folder() as folder:
        unix = listen("shm_socket", f"{folder}/m")
        with at_most(20), pytest.raises(StoreUnreachable):
            TcpTransport(f"127.0.0.1:{mute.getsockname()[1]}", b"d" * 16, BLOCK_BYTES, CLOCK, deadline_in(0.2))
        with at_most(20), pytest.raises(StoreUnreachable):
            SharedMemoryTransport(f"{folder}/m", b"d" * 16, BLOCK_BYTES, CLOCK, deadline_in(0.2))
        unix.close()
