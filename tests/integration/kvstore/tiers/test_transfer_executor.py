"""Tests of the transfer executor, whose threads move blocks between a pool and its tiers: effects of a tier that hangs or fails."""

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
from kvstore.system_clock import MonotonicClock
from kvstore.tiers.daemon_threads import DaemonThreads
from tests.support.kvstore.builders import MachineDriver, a_chain
from tests.support.waiting import turns, until

MAX_WAIT = Nanos(30 * MILLISECOND)


class HeldDisk:
    """Tier that has every block; reads wait at its gate, and writes fail."""

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
    """A machine, a hierarchy and a transfer executor over one disk."""

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


async def test_hung_disk_holds_only_the_blocks_in_its_threads():
    async with a_node_on_a_disk() as node:
        for of in "abcdefgh":
            node.prefetch(a_chain(4, of))
        assert node.reservations == 8
        await until(lambda: node.reservations <= THREADS_PER_TIER)
        for _ in range(THREADS_PER_TIER):
            assert node.disk.reading.acquire(timeout=60)
        node.disk.gate.set()
        await until(lambda: not node.reservations)

        assert node.hierarchy.is_idle
        assert not node.disk.reading.acquire(blocking=False), "a late read was started"


async def test_tier_answer_after_the_node_stopped_is_ignored():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with a_node_on_a_disk() as node:
        node.disk.fails = True
        node.prefetch(a_chain(4, "a"), Nanos(10 * SECOND))
        await asyncio.to_thread(node.disk.reading.acquire)
    await until(lambda: not any(thread.name.startswith("kvstore-disk") for thread in threading.enumerate()))
    await turns()
    gc.collect()

    assert complaints == []


async def test_loop_closed_during_a_call_keeps_the_thread(monkeypatch):
    threads, loop, told = DaemonThreads("lane", 1), asyncio.get_running_loop(), threading.Event()

    def closed(*_):
        told.set()
        raise RuntimeError("Event loop is closed")

    with monkeypatch.context() as closing:
        closing.setattr(loop, "call_soon_threadsafe", closed)
        asyncio.wrap_future(threads.submit(lambda: None))
        await until(told.is_set)

    async with asyncio.timeout(60):
        assert await asyncio.wrap_future(threads.submit(lambda: 7)) == 7
    threads.close()


async def test_full_but_readable_disk_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="kvstore.service.transfer_executor")
    async with a_node_on_a_disk() as node:
        node.disk.gate.set()
        for of in "abc":
            node.store.hold(a_chain(2, of))
            node.hierarchy.offer(node.store.digest, a_chain(2, of), node.clock.now() + 9 * SECOND)  # after any pause
            node.executor.settle()
            node.prefetch(a_chain(2, of * 2))
            await until(lambda: node.hierarchy.is_idle)

    assert [record.message for record in caplog.records] == ["tier fails"]


async def test_unreadable_disk_is_logged_once_despite_its_index(caplog, monkeypatch):
    monkeypatch.setattr(breaker, "LONGEST_PAUSE", MILLISECOND)
    caplog.set_level(logging.INFO, logger="kvstore.service.transfer_executor")
    async with a_node_on_a_disk() as node:
        node.disk.gate.set()
        node.disk.fails = True
        await until(lambda: node.prefetch(a_chain(2)) or node.hierarchy.counters(0).failures >= 3)
        assert [record.message for record in caplog.records] == ["tier fails"]
        node.disk.fails = False
        await until(lambda: node.prefetch(a_chain(2)) or node.hierarchy.counters(0).loaded)

    assert [record.message for record in caplog.records] == ["tier fails", "tier works again"]
