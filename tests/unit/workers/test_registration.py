"""Registration of a worker."""

import asyncio

from msgspec import structs

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.ports import NameHeld, RegistrationRefused, RegistryUnreachable, WorkerSuperseded
from tests.support.waiting import turns
from workers import registration
from workers.registration import RegistryEntry, WorkerMembership


class Answers:
    """A registry that first raises the given errors, and then accepts the worker with a long lease."""

    def __init__(self, *failures: Exception, lease: Nanos = Nanos(3600 * SECOND)):  # noqa: B008 - a number
        self.failures = list(failures)
        self.then: Exception | None = None  # set once it has accepted the worker
        self.lease = lease
        self.asked = 0
        self.taken = asyncio.Event()
        self.left = 0

    async def register(self, worker_id: WorkerId, incarnation: Incarnation, address: str) -> Nanos:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        if self.then is not None and self.taken.is_set():
            raise self.then
        self.taken.set()
        return self.lease

    async def deregister(self, worker_id: WorkerId, incarnation: Incarnation) -> None:
        self.left += 1


def a_registration(registry: Answers) -> RegistryEntry:
    return RegistryEntry(
        registry=registry, worker_id=WorkerId("w1"), incarnation=Incarnation("one"), address="unix:/somewhere"
    )


async def test_unreachable_registry_is_tried_again():
    registry = Answers(RegistryUnreachable("away"))
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(a_registration(registry).run())
        await registry.taken.wait()
        running.cancel()

    assert registry.asked == 2


async def test_a_failure_is_logged_when_its_cause_changes(monkeypatch, caplog):
    monkeypatch.setattr(registration, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(registration, "LONGEST_PAUSE_SECONDS", 0.001)
    refused = RegistrationRefused("the proof is not of this port's secret")
    registry = Answers(RegistryUnreachable("away"), RegistryUnreachable("away"), refused, refused, refused)
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(a_registration(registry).run())
        await registry.taken.wait()
        running.cancel()

    warnings = [(each.message, each.cause) for each in caplog.records if each.levelname == "WARNING"]
    assert warnings == [("registry unreachable", "away"), ("worker registration refused", str(refused))]


async def test_replaced_worker_does_not_register_again():
    registry = Answers(WorkerSuperseded("w1 is held by a newer process"))

    async with asyncio.timeout(60):
        await a_registration(registry).run()

    assert registry.asked == 1


async def test_worker_waits_for_an_id_held_by_another_process(monkeypatch):
    monkeypatch.setattr(registration, "HELD_PAUSE_SECONDS", 0.001)
    registry = Answers(NameHeld("w1 is held by the process at x"), NameHeld("w1 is held by the process at x"))
    presence = WorkerMembership([a_registration(registry)])
    async with asyncio.timeout(60), presence.kept():
        assert not presence.ready
        await registry.taken.wait()

    assert (registry.asked, presence.replaced) == (3, "")


async def test_worker_that_waited_too_long_for_its_id_says_so(monkeypatch):
    monkeypatch.setattr(registration, "HELD_PAUSE_SECONDS", 0.001)
    registry = Answers(*[NameHeld("w1 is held by the process at x")] * 10_000)
    presence = WorkerMembership([structs.replace(a_registration(registry), name_wait_seconds=0.01)])
    told = asyncio.Event()
    presence.when_replaced(told.set)
    async with asyncio.timeout(60), presence.kept():
        await told.wait()

    assert "held by the process at x; waited 0.01 s" in presence.replaced


async def test_registered_worker_whose_id_is_taken_is_replaced():
    registry = Answers(lease=Nanos(0))
    registry.then = NameHeld("w1 is held by the process at x")

    async with asyncio.timeout(60):
        why = await a_registration(registry).run()

    assert why == "w1 has been replaced: w1 is held by the process at x"


async def test_worker_is_ready_from_registration_until_it_leaves():
    near, far = Answers(), Answers(RegistryUnreachable("away"))
    presence = WorkerMembership([a_registration(near), a_registration(far)])
    async with asyncio.timeout(60), presence.kept():
        await near.taken.wait()
        assert not presence.ready
        await far.taken.wait()
        await turns()
        assert presence.ready

        await presence.leave()
        await presence.leave()

        assert (presence.ready, near.left, far.left) == (False, 1, 1)
    assert (near.left, far.left) == (1, 1)


async def test_replaced_worker_is_not_ready():
    registry = Answers()
    presence = WorkerMembership([a_registration(registry)])
    async with asyncio.timeout(60), presence.kept():
        await registry.taken.wait()
        registry.failures = [WorkerSuperseded("w1 is held by a newer process")]
        await presence.registrations[0].run()

        assert not presence.ready


async def test_a_worker_without_registries_is_ready():
    presence = WorkerMembership([])
    async with presence.kept():
        assert presence.ready
