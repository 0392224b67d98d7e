"""Several evacuations of one node at a time, by hand: a tier answers when the test says so."""

import asyncio
from types import SimpleNamespace

import pytest

from kvstore.clock import SECOND, Nanos
from kvstore.evacuation import Evacuations
from kvstore.hierarchy import Hierarchy, TierRule
from kvstore.movement import Keep
from tests.kv_builders import HandClock, Store, a_chain

pytestmark = pytest.mark.integration

BLOCKS = 6
DEADLINE = 2 * SECOND
SECONDS = 10


class Node:
    """A pool and one tier that all nodes read, with a budget of so many blocks."""

    def __init__(self, budget: int = 1 << 20) -> None:
        self.store = Store(blocks=BLOCKS)
        self.names = a_chain(BLOCKS)
        self.store.hold(self.names)
        self.clock = HandClock()
        self.hierarchy = Hierarchy(self.store.machine, [TierRule(name="redis", admission=None)])
        self.asked: list[Keep] = []
        self.budget = budget
        backing = SimpleNamespace(
            tiers=[SimpleNamespace(name="redis")], refuge=lambda leaving: 0, may_write=lambda *_: self._spend()
        )
        settle = lambda: self.asked.extend(self.hierarchy.commands())  # noqa: E731 - all that a node does
        self._evacuations = Evacuations(self.store.machine, self.hierarchy, backing, settle, self.clock)

    async def evacuate(self, names=None):
        return await self._evacuations.evacuate(
            self.store.digest, names or self.names, leaving=False, deadline=Nanos(DEADLINE)
        )

    def answer(self) -> None:
        """All that the tier was asked to keep, it has."""
        while self.asked:
            copy = self.asked.pop()
            self.hierarchy.kept(copy.copy_id, [True] * len(copy.addresses), self.clock.now())
            self.asked += self.hierarchy.commands()

    def _spend(self) -> bool:
        self.budget -= 1
        return self.budget >= 0


async def have_begun(*tasks: asyncio.Task) -> None:
    for _ in range(2 * len(tasks)):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


async def test_what_two_workers_bring_away_at_once_is_written_once_and_counts_for_both():
    node = Node()
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(node.evacuate()), tasks.create_task(node.evacuate())]
        await have_begun(*both)
        assert [len(copy.addresses) for copy in node.asked] == [BLOCKS]
        node.answer()

    assert [(one.result().done, one.result().moved, one.result().refused) for one in both] == [(BLOCKS, BLOCKS, 0)] * 2


async def test_what_is_there_at_the_deadline_is_not_open_though_it_is_under_way_once_more():
    node = Node()
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        one = tasks.create_task(node.evacuate())
        await have_begun(one)
        first = node.asked.pop()
        node.hierarchy.hand_down(0, [address.key for address in first.addresses], node.clock.now())
        node.hierarchy.kept(first.copy_id, [True] * BLOCKS, node.clock.now())
        node.clock.move(DEADLINE)

    assert (one.result().done, one.result().moved, one.result().refused) == (BLOCKS, BLOCKS, 0)


async def test_a_budget_of_writes_is_charged_once_for_what_is_asked_for_again_while_it_is_under_way():
    node = Node(budget=BLOCKS)
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(node.evacuate())
        await have_begun(first)
        node.clock.move(DEADLINE)
    assert first.result().done == 0
    node.clock.move(-DEADLINE)
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        again = tasks.create_task(node.evacuate())
        await have_begun(again)
        node.answer()

    assert (again.result().moved, again.result().refused) == (BLOCKS, 0)
    assert node.budget == 0


async def test_what_finds_no_room_by_the_deadline_is_not_charged():
    node = Node()
    rule = TierRule(name="redis", admission=None, queue_blocks=2)
    node.hierarchy = node._evacuations._hierarchy = Hierarchy(node.store.machine, [rule])
    node.clock.move(DEADLINE)

    assert (await node.evacuate()).done == 0
    assert node.budget == (1 << 20) - 2
