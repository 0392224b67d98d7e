"""Tests of NIXL itself: the properties that the transport relies on, and the process that holds the node's agent."""

import asyncio
import importlib.util
import os
import signal
import time

import numpy as np
import psutil
import pytest

from kvstore.buffers import crc32c
from kvstore.messages import Address, BlockKey, BlockOutcome, Slot
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.shared_memory import SharedMemoryTier
from kvstore.transports.nixl import NixlTransport
from kvstore.transports.nixl_node import NixlNode
from tests.support.kvstore.builders import a_block, deadline_in
from tests.support.stopwatch import at_most
from tests.support.waiting import eventually, pace, stays, until, until_answered

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
]

CLOCK = MonotonicClock()
BLOCK_BYTES = 4 << 20


class NixlTestPool:
    """One block in a pool with an agent."""

    def __init__(self):
        self.tier = SharedMemoryTier(2 * BLOCK_BYTES)
        self.node = NixlNode(self.tier)
        self.block = a_block(1, BLOCK_BYTES)
        address = Address(key=BlockKey(b"d" * 16, b"n" * 16), offset=0, length=BLOCK_BYTES, generation=5)
        self.tier.claim(address)
        self.tier.write(address, self.block)
        self.slot = Slot(0, 5, crc32c([self.block]))

    async def open(self) -> NixlTransport:
        return await asyncio.to_thread(
            NixlTransport, self.node.offer, BLOCK_BYTES, CLOCK, deadline_in(), lambda _: self.node.offer
        )


@pytest.fixture
async def pool():
    pool = NixlTestPool()
    await pool.node.start()
    yield pool
    await pool.node.stop()
    pool.tier.close()


def read(transport: NixlTransport, slot: Slot, seconds: float = 30) -> BlockOutcome:
    (outcome,) = transport.get([slot], [np.zeros(BLOCK_BYTES, np.uint8)], deadline_in(seconds))
    return outcome


async def test_dead_agent_is_replaced_and_found_again(pool):
    transport = await pool.open()
    assert await asyncio.to_thread(read, transport, pool.slot) is BlockOutcome.MOVED
    watching = asyncio.create_task(pool.node.run())
    former = pool.node.pid
    os.kill(former, signal.SIGKILL)

    async def replaced() -> bool:
        assert await asyncio.to_thread(read, transport, pool.slot, 0.5) in (BlockOutcome.MOVED, BlockOutcome.GONE)
        return pool.node.pid not in (former, None)

    async def readable() -> bool:
        return await asyncio.to_thread(read, transport, pool.slot, 5) is BlockOutcome.MOVED

    await until_answered(replaced)
    await until_answered(readable)
    watching.cancel()
    transport.close()


async def test_hung_node_is_a_miss_and_writes_nothing_later(pool, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")  # then the node's processor moves the bytes, as over a network
    await pool.node.stop()
    await pool.node.start()
    transport = await pool.open()
    into = np.zeros(BLOCK_BYTES, np.uint8)
    os.kill(pool.node.pid, signal.SIGSTOP)

    with at_most(20):
        outcome = await asyncio.to_thread(transport.get, [pool.slot], [into], deadline_in(1))

    os.kill(pool.node.pid, signal.SIGCONT)
    assert outcome == [BlockOutcome.GONE]
    before = into.copy()
    await stays(lambda: np.array_equal(into, before), 0.3, "the node goes on, and a late write would arrive now")
    transport.close()


async def test_agent_process_ends_with_the_node_and_uses_no_cpu(pool):
    process = psutil.Process(pool.node.pid)
    before, began = process.cpu_times(), time.monotonic()
    await pace(1, "the time of which the processor's share is measured")
    after, took = process.cpu_times(), time.monotonic() - began

    assert after.user + after.system - before.user - before.system < 0.15 * took

    pool.node.process.stdin.close()  # like the kernel when the node is killed
    await asyncio.to_thread(eventually, lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


async def test_closing_frees_all_descriptors(pool):
    (await pool.open()).close()  # the library has allocated what it never frees
    descriptors = psutil.Process().num_fds()

    for _ in range(2):
        transport = await pool.open()
        assert await asyncio.to_thread(read, transport, pool.slot) is BlockOutcome.MOVED
        transport.close()

    await until(lambda: psutil.Process().num_fds() <= descriptors)
