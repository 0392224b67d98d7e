"""Staying registered."""

import asyncio

from fleet.clock import SECOND, Nanos
from fleet.ids import Incarnation, WorkerId
from workers.ports import RegistryUnreachable, Superseded
from workers.registration import Registration


class Answers:
    """A registry that answers as it is told, and at last takes the worker for a long time."""

    def __init__(self, *failures: Exception):
        self.failures = list(failures)
        self.asked = 0
        self.taken = asyncio.Event()

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        self.taken.set()
        return Nanos(3600 * SECOND)

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None: ...


def a_registration(registry: Answers) -> Registration:
    return Registration(
        registry=registry, worker_id=WorkerId("w1"), incarnation=Incarnation("one"), address="unix:/somewhere"
    )


async def test_a_registry_that_is_away_is_asked_again():
    registry = Answers(RegistryUnreachable("away"))
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(a_registration(registry).run())
        await registry.taken.wait()
        running.cancel()

    assert registry.asked == 2


async def test_whoever_was_replaced_does_not_ask_again():
    registry = Answers(Superseded("w1 is held by a newer process"))

    async with asyncio.timeout(10):
        await a_registration(registry).run()

    assert registry.asked == 1
