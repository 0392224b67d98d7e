"""The threads that move blocks between a pool and its tiers: what a tier that hangs or fails costs, and what it does not."""

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvstore import circuit_breaker as breaker
from kvstore.clock import MILLISECOND, SECOND, Nanos
from kvstore.errors import TierFailed
from kvstore.hierarchy import promotions as loads
from kvstore.hierarchy.machine import Hierarchy
from kvstore.hierarchy.tier_states import AdmitEverything, TierRule
from kvstore.messages import BlockOutcome, FetchResult, TierStatus
from kvstore.service import transfer_executor as executor
from kvstore.service.transfer_executor import THREADS_PER_TIER, TransferExecutor
from kvstore.service.worker_threads import WorkerThreads
from kvstore.system_clock import MonotonicClock
from tests.support.kvstore.builders import MachineDriver, a_chain

MAX_WAIT = Nanos(30 * MILLISECOND)


class HeldDisk:
    """Has every block; reads wait at its gate, writes fail."""

    name = "disk"
    finds_in_memory = True

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.reading = threading.Semaphore(0)
        self.fails = False

    def find(self, keys, deadline):
        return len(keys)

    def get(self, keys, into, deadline):
        self.reading.release()
        assert self.gate.wait(30)
        if self.fails:
            raise TierFailed("it cannot be read")
        return [FetchResult(BlockOutcome.MOVED, 7) for _ in keys]

    def put(self, keys, blocks, deadline, checksums):
        raise TierFailed("it is full")

    def gone(self):
        return []

    def held(self):
        return []

    def status(self):
        return TierStatus(name=self.name)


class ZeroPool:
    def view(self, address):
        return np.zeros(address.length, np.uint8)


class ExecutorNode:
    """A machine, a hierarchy and a mover over one disk."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self.disk = HeldDisk()
        self.store = MachineDriver(blocks=64)
        self.clock = MonotonicClock()
        rule = TierRule(name=self.disk.name, admission=AdmitEverything(), finds_in_memory=True)
        self.hierarchy = Hierarchy(self.store.machine, [rule])
        self.executor = TransferExecutor(self.hierarchy, [self.disk], ZeroPool(), self.clock, tasks, self._settle)

    def prefetch(self, chain, max_wait=MAX_WAIT):
        self.hierarchy.prefetch(self.store.digest, chain, 0, max_wait, self.clock.now())
        self.executor.settle()

    def _settle(self):
        self.executor.settle()

    @property
    def reservations(self) -> int:
        return self.store.machine.stats().reservations


@asynccontextmanager
async def a_node_on_a_disk() -> AsyncIterator[ExecutorNode]:
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        node = ExecutorNode(tasks)
        try:
            yield node
        finally:
            node.executor.close()
            node.disk.gate.set()


@pytest.fixture(autouse=True)
def little_time(monkeypatch):
    monkeypatch.setattr(loads, "FETCH_AT_LEAST", MAX_WAIT)
    monkeypatch.setattr(executor, "LATE_SECONDS", 0.01)


async def test_a_disk_that_hangs_keeps_no_more_of_the_pool_than_its_threads_are_at():
    async with a_node_on_a_disk() as node:
        for of in "abcdefgh":
            node.prefetch(a_chain(4, of))
        assert node.reservations == 8
        while node.reservations > THREADS_PER_TIER:
            await asyncio.sleep(0.001)
        for _ in range(THREADS_PER_TIER):
            assert node.disk.reading.acquire(timeout=60)
        node.disk.gate.set()
        while node.reservations:
            await asyncio.sleep(0.001)

        assert node.hierarchy.is_idle
        assert not node.disk.reading.acquire(blocking=False), "what is late was never begun"


async def test_what_a_tier_says_after_the_node_has_stopped_is_nobodys_error():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with a_node_on_a_disk() as node:
        node.disk.fails = True
        node.prefetch(a_chain(4, "a"), Nanos(10 * SECOND))
        await asyncio.to_thread(node.disk.reading.acquire)
    while any(thread.name.startswith("kvstore-disk") for thread in threading.enumerate()):
        await asyncio.sleep(0.001)
    await asyncio.sleep(0)
    gc.collect()

    assert complaints == []


async def test_a_loop_that_closes_while_a_call_ends_takes_no_thread_with_it(monkeypatch):
    lanes, loop, told = WorkerThreads("lane", 1), asyncio.get_running_loop(), threading.Event()

    def closed(*_):
        told.set()
        raise RuntimeError("Event loop is closed")

    with monkeypatch.context() as closing:
        closing.setattr(loop, "call_soon_threadsafe", closed)
        lanes.call(lambda: None)
        async with asyncio.timeout(60):
            while not told.is_set():
                await asyncio.sleep(0.001)

    async with asyncio.timeout(60):
        assert await lanes.call(lambda: 7).outcome == 7
    lanes.close()


async def test_a_disk_that_is_full_and_can_be_read_fails_once_in_the_log(caplog):
    caplog.set_level(logging.INFO, logger="kvstore.service.transfer_executor")
    async with a_node_on_a_disk() as node:
        node.disk.gate.set()
        for of in "abc":
            node.store.hold(a_chain(2, of))
            node.hierarchy.offer(node.store.digest, a_chain(2, of), node.clock.now() + 9 * SECOND)  # past any pause
            node.executor.settle()
            node.prefetch(a_chain(2, of * 2))
            while not node.hierarchy.is_idle:
                await asyncio.sleep(0.001)

    assert [record.message for record in caplog.records] == ["tier fails"]


async def test_a_disk_that_cannot_be_read_fails_once_in_the_log_although_its_index_answers(caplog, monkeypatch):
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", MILLISECOND)
    caplog.set_level(logging.INFO, logger="kvstore.service.transfer_executor")
    async with a_node_on_a_disk() as node:
        node.disk.gate.set()
        node.disk.fails = True
        while node.hierarchy.counters(0).failures < 3:
            node.prefetch(a_chain(2))
            await asyncio.sleep(0.001)
        assert [record.message for record in caplog.records] == ["tier fails"]
        node.disk.fails = False
        while not node.hierarchy.counters(0).loaded:
            node.prefetch(a_chain(2))
            await asyncio.sleep(0.001)

    assert [record.message for record in caplog.records] == ["tier fails", "tier works again"]
