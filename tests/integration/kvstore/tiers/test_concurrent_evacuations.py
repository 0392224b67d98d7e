"""Tests of concurrent evacuations of one node; the tier answers when the test says so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from kvstore.circuit_breaker import LONGEST_PAUSE
from kvstore.clock import SECOND, Nanos
from kvstore.hierarchy.machine import BATCH_BYTES, Hierarchy
from kvstore.hierarchy.tier_states import TierRule
from kvstore.hierarchy.transfers import Confirm, Demote
from kvstore.messages import BlockKey
from kvstore.service.evacuation import Evacuations
from tests.support.kvstore.builders import BLOCK_BYTES, MachineDriver, ManualClock, a_chain
from tests.support.waiting import turns, until

pytestmark = pytest.mark.integration

BLOCKS = 6
DEADLINE = 20 * SECOND
SECONDS = 10


class EvacuatingNode:
    """A pool and one shared tier with a write budget."""

    def __init__(self, budget: int = 1 << 20, *, batch_bytes: int = BATCH_BYTES, forgets: bool = True) -> None:
        self.store = MachineDriver(blocks=BLOCKS)
        self.names = a_chain(BLOCKS)
        self.store.hold(self.names)
        self.clock = ManualClock()
        rule = TierRule(name="redis", admission=None, finds_in_memory=not forgets)
        self.hierarchy = Hierarchy(self.store.machine, [rule], batch_bytes)
        self.asked: list[Demote | Confirm] = []
        self.held: set[bytes] = set()  # blocks that the tier really holds
        self.budget = budget
        self.failures = 0  # failures that the tier counts itself
        tier = SimpleNamespace(name="redis", status=lambda: SimpleNamespace(failures=self.failures))
        backing = SimpleNamespace(
            tiers=[tier],
            evacuation_tier=lambda leaving, is_given_up: 0,
            begin_evacuation=lambda tier: None,
            may_write=lambda *_: self._spend(),
        )
        settle = lambda: self.asked.extend(self.hierarchy.commands())  # noqa: E731 - all that a node does
        self.evacuations = Evacuations(self.store.machine, self.hierarchy, backing, settle, self.clock)

    async def evacuate(self, names=None):
        return await self.evacuations.evacuate(
            self.store.digest, names or self.names, leaving=False, deadline=Nanos(DEADLINE)
        )

    @asynccontextmanager
    async def evacuating(self) -> AsyncIterator[asyncio.Task]:
        """Run an evacuation, which has ended on exit."""
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
            yield tasks.create_task(self.evacuate())

    async def is_asked(self) -> None:
        """Wait until the tier has a command."""
        await until(lambda: self.asked, SECONDS, between_seconds=0)

    @property
    def keys(self) -> list[BlockKey]:
        return [BlockKey(self.store.digest, name) for name in self.names]

    def had(self, *names) -> None:
        """Write these blocks to the tier, and then lose all that are not in `held`."""
        self.hierarchy.demote_now(0, [BlockKey(self.store.digest, name) for name in names], self.clock.now())
        (copy,) = self.hierarchy.commands()
        self.hierarchy.kept(copy.demotion_id, [True] * len(names), self.clock.now())

    def answer(self, refused=()) -> None:
        """Let the tier keep all blocks except `refused`, and answer truthfully."""
        while self.asked:
            self.answer_one(refused)

    def answer_one(self, refused=()) -> None:
        match self.asked.pop(0):
            case Confirm(confirm_id=confirm_id, keys=keys):
                self.hierarchy.confirmed(confirm_id, [key.name in self.held for key in keys])
            case Demote(demotion_id=demotion_id, addresses=addresses):
                kept = [address.key.name not in refused for address in addresses]
                self.held |= {a.key.name for a, is_kept in zip(addresses, kept, strict=True) if is_kept}
                self.hierarchy.kept(demotion_id, kept, self.clock.now())
        self.asked += self.hierarchy.commands()

    def fail(self) -> None:
        """Let the tier fail; it may be tried again."""
        self.hierarchy.failed(self.asked.pop(0), self.clock.now(), self.clock.now())
        self.clock.move(LONGEST_PAUSE)
        self.hierarchy.tick(self.clock.now())
        self.asked += self.hierarchy.commands()

    def _spend(self) -> bool:
        self.budget -= 1
        return self.budget >= 0


async def have_begun(*tasks: asyncio.Task) -> None:
    await turns(2 * len(tasks))
    assert not any(task.done() for task in tasks)


async def test_concurrent_evacuations_write_a_block_once_for_both():
    node = EvacuatingNode()
    async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
        both = [tasks.create_task(node.evacuate()), tasks.create_task(node.evacuate())]
        await have_begun(*both)
        assert [len(copy.addresses) for copy in node.asked] == [BLOCKS]
        node.answer()

    assert [(one.result().done, one.result().moved, one.result().refused) for one in both] == [(BLOCKS, BLOCKS, 0)] * 2


async def test_block_present_at_the_deadline_is_not_open():
    node = EvacuatingNode()
    async with node.evacuating() as one:
        await have_begun(one)
        first = node.asked.pop()
        node.hierarchy.demote_now(0, [address.key for address in first.addresses], node.clock.now())
        node.hierarchy.kept(first.demotion_id, [True] * BLOCKS, node.clock.now())
        node.clock.move(DEADLINE)

    assert (one.result().done, one.result().moved, one.result().refused) == (BLOCKS, BLOCKS, 0)


async def test_write_budget_is_charged_once_for_a_repeated_block():
    node = EvacuatingNode(budget=BLOCKS)
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


async def test_block_without_room_by_the_deadline_is_not_charged():
    node = EvacuatingNode()
    rule = TierRule(name="redis", admission=None, queue_blocks=2)
    node.hierarchy = node.evacuations.hierarchy = Hierarchy(node.store.machine, [rule])
    node.clock.move(DEADLINE)

    assert (await node.evacuate()).done == 0
    assert node.budget == (1 << 20) - 2


# Blocks that the tier got before


async def test_possibly_evicted_block_is_checked_and_rewritten():
    node = EvacuatingNode()
    node.had(*node.names[:4])
    node.held = {node.names[0], node.names[3]}
    async with node.evacuating() as one:
        await node.is_asked()
        (question,) = node.asked
        assert question.keys == tuple(node.keys[:4]), "less valuable blocks wait for this answer"
        while not one.done():
            node.answer()
            await turns()

    assert (one.result().there, one.result().moved, one.result().done) == (2, 4, BLOCKS)
    assert node.held == set(node.names)
    assert node.budget == (1 << 20) - 4, "blocks that are present cost no write"


async def test_tier_that_reports_evictions_is_not_asked():
    node = EvacuatingNode(forgets=False)
    node.had(*node.names)

    evacuated = await node.evacuate()

    assert (evacuated.there, evacuated.done, node.asked) == (BLOCKS, BLOCKS, [])


async def test_block_of_unknown_presence_is_written_again():
    node = EvacuatingNode()
    node.had(*node.names)
    async with node.evacuating() as one:
        await node.is_asked()
        node.fail()
        await node.is_asked()
        assert [type(transfer) for transfer in node.asked] == [Demote]
        node.answer()

    assert (one.result().moved, one.result().failed, one.result().done) == (BLOCKS, 1, BLOCKS)


async def test_never_written_blocks_go_first_while_tier_is_silent():
    node = EvacuatingNode()
    node.had(*node.names[:2])
    node.hierarchy.confirm(0, node.keys[:1], node.clock.now())
    node.hierarchy.failed(*node.hierarchy.commands(), node.clock.now() - SECOND, node.clock.now())  # fenced for a while
    node.had(node.names[0])
    async with node.evacuating() as one:
        await node.is_asked()
        node.answer()
        await turns()
        node.clock.move(DEADLINE)

    assert (one.result().moved, one.result().there, one.result().done) == (BLOCKS - 2, 0, 0)


# Failures


async def test_failed_batch_is_retried_but_refused_blocks_are_not():
    node = EvacuatingNode()
    async with node.evacuating() as one:
        await node.is_asked()
        node.fail()
        await node.is_asked()
        node.answer(refused=node.names[2:3])

    assert (one.result().failed, one.result().moved, one.result().refused) == (1, BLOCKS - 1, 1)
    assert one.result().done == BLOCKS


async def test_blocks_skipped_by_a_short_call_are_offered_again():
    node = EvacuatingNode()
    async with node.evacuating() as one:
        await node.is_asked()
        node.failures += 1  # the tier counted a failure and answered with a part
        node.answer(refused=node.names[2:])
        await node.is_asked()
        node.answer()

    assert (one.result().moved, one.result().refused) == (BLOCKS, 0)


async def test_failing_block_is_left_out_and_stops_no_other():
    node = EvacuatingNode(batch_bytes=BLOCK_BYTES)
    bad = node.keys[0]
    async with node.evacuating() as one:
        while not one.done():
            node.asked.sort(key=lambda copy: copy.addresses[0].key != bad)
            if node.asked and node.asked[0].addresses[0].key == bad:
                node.fail()
            elif node.asked:
                node.answer_one()
            await turns()

    assert (one.result().moved, one.result().refused, one.result().done) == (BLOCKS - 1, 1, BLOCKS)


async def test_unreachable_tier_keeps_its_blocks_until_the_deadline():
    node = EvacuatingNode(budget=BLOCKS)
    async with node.evacuating() as one:
        while not one.done():
            if node.asked:
                node.fail()
            await turns()

    assert (one.result().moved, one.result().refused, one.result().done) == (0, 0, 0), "each block was charged once"
    assert one.result().failed > 10
