"""The NIXL transport with fake agents that copy within one process, hang or fail."""

import ctypes
import threading

import numpy as np
import pytest

from kvstore.buffers import crc32c
from kvstore.clock import MILLISECOND
from kvstore.errors import StoreUnreachable
from kvstore.messages import BlockOutcome, Slot
from kvstore.pool.extents import PAGE_BYTES
from kvstore.system_clock import MonotonicClock
from kvstore.transports import nixl
from kvstore.transports.nixl import NixlOffer, NixlTransport
from kvstore.transports.nixl_agent import NixlAgentFailed, NixlMemoryKind, TransferDirection, joined, spans
from tests.support.kvstore.builders import BLOCK_BYTES, a_block, deadline_in, empty_buffers
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually

CLOCK = MonotonicClock()
BLOCKS = 8


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


class Pool:
    """The node's pool; block i has the slot generation 100 + i."""

    def __init__(self):
        self.bytes = np.concatenate([a_block(index) for index in range(BLOCKS)])
        self.stamps = np.zeros(BLOCKS * BLOCK_BYTES // PAGE_BYTES, np.uint64)
        for index in range(BLOCKS):
            self.stamps[index * BLOCK_BYTES // PAGE_BYTES] = 100 + index
        self.offer = NixlOffer(b"pool", address_of(self.bytes), address_of(self.stamps))

    def slot(self, index: int) -> Slot:
        place = self.bytes[index * BLOCK_BYTES :][:BLOCK_BYTES]
        return Slot(index * BLOCK_BYTES, 100 + index, crc32c([place]))


class CopyingAgent:
    """A NIXL agent that copies all bytes when a transfer starts, and checks its arguments."""

    def __init__(self, name: str = "client"):
        self.registered: dict[int, list[tuple[int, int]]] = {}
        self.is_open = True
        self.nudges = 0

    def register(self, table, memory=NixlMemoryKind.DRAM) -> int:
        self.registered[number := len(self.registered)] = [(row[0], row[0] + row[1]) for row in table.tolist()]
        return number

    def deregister(self, registered: int) -> None:
        del self.registered[registered]

    def add_peer(self, metadata: bytes) -> str:
        if metadata != b"pool":
            raise NixlAgentFailed("unknown metadata")
        return "node"

    def start(self, direction, local, remote, peer, memory=NixlMemoryKind.DRAM) -> int:
        assert self.is_open
        assert local[:, 1].tolist() == remote[:, 1].tolist()
        mine = [span for each in self.registered.values() for span in each]
        for (here, length, _), (there, _, _) in zip(local.tolist(), remote.tolist(), strict=True):
            assert any(begin <= here and here + length <= end for begin, end in mine), "not registered"
            self.move(direction, here, there, length)
        return 0

    def move(self, direction, here: int, there: int, length: int) -> None:
        ctypes.memmove(*((here, there) if direction is TransferDirection.READ else (there, here)), length)

    def is_done(self, transfer: int) -> bool:
        return True

    def nudge(self, peer: str) -> None:
        self.nudges += 1

    def close(self) -> None:
        self.is_open = False


@pytest.fixture
def pool():
    return Pool()


def a_transport(pool: Pool, *agents, renew=lambda deadline: None) -> NixlTransport:
    made = iter(agents)
    return NixlTransport(pool.offer, BLOCK_BYTES, CLOCK, deadline_in(), renew, lambda name: next(made))


@pytest.mark.parametrize(("chunk_bytes", "batch"), [(8 << 20, 1024), (3 * BLOCK_BYTES, 5), (1, 1)])
def test_chunk_and_batch_sizes_do_not_change_the_bytes(pool, monkeypatch, chunk_bytes, batch):
    monkeypatch.setattr(nixl, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(nixl, "BATCH", batch)
    agent = CopyingAgent()
    transport = a_transport(pool, agent)
    into = [[bytearray(1), np.zeros(4000, np.uint8), bytearray(BLOCK_BYTES - 4001)], *empty_buffers(BLOCKS - 1)]

    order = [3, 0, 7, 1, 2, 6, 5, 4]
    assert transport.get([pool.slot(index) for index in order], into, deadline_in()) == [BlockOutcome.MOVED] * BLOCKS

    assert b"".join(bytes(part) for part in into[0]) == bytes(a_block(3))
    assert all(np.array_equal(copy, a_block(index)) for copy, index in zip(into[1:], order[1:], strict=True))
    assert list(agent.registered) == [0], "only its own memory stays registered"


def test_blocks_are_written_only_where_the_stamp_matches(pool):
    transport = a_transport(pool, CopyingAgent())
    old, new = a_block(1), a_block(99)
    slots = [pool.slot(0), Slot(BLOCK_BYTES, 7, 0), pool.slot(2)]

    assert transport.put(slots, [new] * 3, deadline_in()) == [BlockOutcome.MOVED, BlockOutcome.GONE, BlockOutcome.MOVED]

    assert np.array_equal(pool.bytes[:BLOCK_BYTES], new)
    assert np.array_equal(pool.bytes[BLOCK_BYTES : 2 * BLOCK_BYTES], old)


def test_stamp_is_checked_after_the_bytes_have_moved(pool):
    """Change the stamps while a block is read: the block is a miss, although its checksum matches."""

    class TakenOverMeanwhile(CopyingAgent):
        def move(self, direction, here, there, length):
            super().move(direction, here, there, length)
            if length == BLOCK_BYTES:
                pool.stamps[:] = 999

    transport = a_transport(pool, TakenOverMeanwhile())

    assert transport.get([pool.slot(1)], empty_buffers(1), deadline_in()) == [BlockOutcome.GONE]
    pool.stamps[2] = 101
    assert transport.put([pool.slot(1)], [a_block(5)], deadline_in()) == [BlockOutcome.GONE]


class Stuck(CopyingAgent):
    """An agent that completes only its first transfer, which is the connection test."""

    transfers = 0

    def start(self, *arguments):
        self.transfers += 1
        return super().start(*arguments) if self.transfers == 1 else 1

    def is_done(self, transfer):
        return transfer == 0


@pytest.mark.parametrize("seconds", [0.4, 0.02])
def test_late_block_is_gone_and_its_agent_closed(pool, seconds):
    agent = Stuck()
    transport = a_transport(pool, agent)

    with at_most(20):
        assert transport.get([pool.slot(0)], empty_buffers(1), deadline_in(seconds)) == [BlockOutcome.GONE]

    assert not agent.is_open, "it could still write to the destination"
    with at_most(10):  # the next call does not wait for the closed agent
        assert transport.get([pool.slot(0)], empty_buffers(1), deadline_in(100)) == [BlockOutcome.GONE]


def test_slow_peer_is_nudged_once(pool):
    agent = Stuck()
    transport = a_transport(pool, agent)

    transport.put([pool.slot(0)], [a_block(1)], deadline_in(0.5))

    assert agent.nudges == 1


def test_earlier_batches_stay_moved_when_the_agent_fails(pool, monkeypatch):
    monkeypatch.setattr(nixl, "BATCH", 2)

    class FailsLater(CopyingAgent):
        moved = 0

        def move(self, direction, here, there, length):
            self.moved += length == BLOCK_BYTES
            if self.moved > 2:
                raise NixlAgentFailed("REMOTE_DISCONNECT")
            super().move(direction, here, there, length)

    agent = FailsLater()
    transport = a_transport(pool, agent)

    assert transport.get([pool.slot(index) for index in range(4)], empty_buffers(4), deadline_in()) == [
        *[BlockOutcome.MOVED] * 2,
        *[BlockOutcome.GONE] * 2,
    ]
    assert not agent.is_open


def test_unexpected_exception_closes_the_agent(pool):
    class Interrupted(CopyingAgent):
        def move(self, direction, here, there, length):
            if length == BLOCK_BYTES:
                raise KeyboardInterrupt
            super().move(direction, here, there, length)

    agent = Interrupted()
    transport = a_transport(pool, agent)

    with pytest.raises(KeyboardInterrupt):
        transport.get([pool.slot(0)], empty_buffers(1), deadline_in())
    assert not agent.is_open


def test_new_agent_uses_the_renewed_offer_after_a_failure(pool):
    first, second = Stuck(), CopyingAgent()
    asked = []

    def renew(deadline):
        asked.append(threading.current_thread())
        return pool.offer if len(asked) > 1 else None  # the first time, the node has no offer

    transport = a_transport(pool, first, second, renew=renew)
    assert transport.get([pool.slot(0)], empty_buffers(1), deadline_in(0.01)) == [BlockOutcome.GONE]

    eventually(lambda: transport.get([pool.slot(0)], empty_buffers(1), deadline_in()) == [BlockOutcome.MOVED])

    assert len(asked) == 2
    assert threading.current_thread() not in asked, "a new thread asks for the offer"
    transport.close()
    assert not second.is_open


def test_unreachable_node_is_reported_when_connecting(pool):
    agents = [CopyingAgent(), Stuck()]
    agents[1].transfers = 1

    with pytest.raises(StoreUnreachable, match="unknown metadata"):
        NixlTransport(NixlOffer(b"?", 0, 0), BLOCK_BYTES, CLOCK, deadline_in(), lambda _: None, lambda _: agents[0])
    with pytest.raises(StoreUnreachable, match="deadline"):
        NixlTransport(pool.offer, BLOCK_BYTES, CLOCK, deadline_in(0.05), lambda _: None, lambda _: agents[1])
    assert not any(agent.is_open for agent in agents)


def test_failed_call_leaves_time_to_close_the_agent():
    assert nixl.CLOSING >= 200 * MILLISECOND, "closing an agent takes that long"


def test_touching_and_overlapping_spans_are_merged():
    table = spans([(100, 10), (200, 5), (110, 20), (120, 5), (205, 1), (300, 1)])

    assert joined(table).tolist() == [[100, 30, 0], [200, 6, 0], [300, 1, 0]]
