"""Contract suite of worker directories: the promises on which routers and workers rely, for every kind of directory.

The importing module provides the fixture `a_world`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import pytest

from fleet.core.clock import Nanos
from fleet.core.ids import Incarnation, WorkerId
from fleet.membership.discovery.open import OpenDirectory
from fleet.membership.ports import RegistryUnreachable, WorkerSuperseded
from fleet.membership.server import RegistryServer
from fleet.membership.settings import MembershipSettings
from tests.support.kvstore.builders import ManualClock
from tests.support.waiting import until, until_answered

SECONDS = 60
WORKER, OTHER = WorkerId("decode-0"), WorkerId("decode-1")
OLD, NEW = Incarnation("old"), Incarnation("new")
ADDRESS, ELSEWHERE = "10.0.0.1:50060", "10.0.0.2:50060"


class DirectorySetup(Protocol):
    """A directory from which clients can be cut off."""

    lease: Nanos

    def open(self) -> AbstractAsyncContextManager[OpenDirectory]:
        """Open the directory over a path that is never cut."""
        ...

    def open_far(self) -> AbstractAsyncContextManager[OpenDirectory]:
        """Open the directory over the path that `cut` cuts."""
        ...

    async def cut(self) -> None: ...

    async def mend(self) -> None: ...

    async def lose(self, worker_id: WorkerId) -> None:
        """Remove the record without a deregistration."""
        ...

    async def half_a_lease(self, *clocks: ManualClock) -> None:
        """Let half a lease pass, for the directory and for these clocks."""
        ...

    async def shows(self, addresses: set[str]) -> None:
        """Wait until clients that do not read the directory, but a Service, see exactly these addresses.

        Return at once if this kind of directory has no such clients.
        """
        ...


class DirectoryReader:
    """One router's view of a directory. Its clock changes only when the test moves it."""

    def __init__(self, world: DirectorySetup) -> None:
        self.world = world
        self.clock = ManualClock()
        self.registry = RegistryServer(MembershipSettings(), self.clock)

    def addresses(self) -> dict[str, str]:
        self.registry.tick()
        return {worker_id: member.address for worker_id, member in self.registry.members.items()}

    def lease_end(self, worker_id: WorkerId) -> int:
        return self.registry.machine.lease_end(worker_id)

    async def until(self, condition) -> None:
        await until(lambda: condition(self.addresses()))

    async def has(self, **addresses: str) -> None:
        await self.until(lambda found: found == {name.replace("_", "-"): value for name, value in addresses.items()})
        await self.world.shows(set(addresses.values()))


@asynccontextmanager
async def a_router(world: DirectorySetup, *, far: bool = False) -> AsyncIterator[DirectoryReader]:
    """Open a router's view of the directory.

    Args:
        world: The directory.
        far: True: read over the path that `cut` cuts.
    """
    router = DirectoryReader(world)
    async with world.open_far() if far else world.open() as opened, asyncio.TaskGroup() as tasks:
        following = tasks.create_task(router.registry.follow(opened))
        yield router
        following.cancel()


async def registered(worker: OpenDirectory) -> None:
    """Register a worker, and try again until the path to the directory, which was just mended, works."""

    async def accepted() -> bool:
        try:
            await worker.register(WORKER, OLD, ADDRESS)
        except RegistryUnreachable:
            return False
        return True

    await until_answered(accepted, SECONDS)


async def test_watching_router_sees_registered_workers(a_world):
    async with a_router(a_world) as router, a_world.open() as worker:
        lease = await worker.register(WORKER, OLD, ADDRESS)

        await router.has(decode_0=ADDRESS)
        assert lease == a_world.lease


async def test_cold_router_finds_all_workers(a_world):
    async with a_world.open() as worker, a_world.open() as other:
        await worker.register(WORKER, OLD, ADDRESS)
        await other.register(OTHER, OLD, ELSEWHERE)

        async with a_router(a_world) as router, a_router(a_world) as another:
            for each in (router, another):
                await each.has(decode_0=ADDRESS, decode_1=ELSEWHERE)


async def test_deregistered_worker_is_gone_before_its_lease_ends(a_world):
    async with a_router(a_world) as router, a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)

        await worker.deregister(WORKER, OLD)

        await router.has()


async def test_renewed_lease_does_not_end(a_world):
    async with a_router(a_world) as router, a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        for _ in range(3):
            router.clock.move(a_world.lease // 2)
            await worker.register(WORKER, OLD, ADDRESS)
            renewed = router.clock.now() + a_world.lease
            await router.until(lambda found, renewed=renewed: found and router.lease_end(WORKER) == renewed)


async def test_unrenewed_lease_ends(a_world):
    async with a_router(a_world) as router:
        async with a_world.open() as worker:
            await worker.register(WORKER, OLD, ADDRESS)
            await router.has(decode_0=ADDRESS)
        for _ in range(2):
            await a_world.half_a_lease(router.clock)

        await router.has()


async def test_worker_cut_off_beyond_its_lease_returns_on_renewal(a_world):
    async with a_router(a_world) as router, a_world.open_far() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        await a_world.cut()
        for _ in range(2):
            await a_world.half_a_lease(router.clock)
        await router.has()

        await a_world.mend()
        await registered(worker)

        await router.has(decode_0=ADDRESS)


async def test_a_new_address_of_a_worker_is_announced(a_world):
    async with a_router(a_world) as router, a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)

        async with a_world.open() as restarted:
            await restarted.register(WORKER, NEW, ELSEWHERE)

            await router.has(decode_0=ELSEWHERE)


async def test_old_incarnation_cannot_remove_its_successor(a_world):
    async with a_router(a_world) as router, a_world.open() as dead, a_world.open() as successor:
        await dead.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        await successor.register(WORKER, NEW, ELSEWHERE)
        await router.has(decode_0=ELSEWHERE)

        await dead.deregister(WORKER, OLD)
        async with a_router(a_world) as cold:
            await cold.has(decode_0=ELSEWHERE)
        for _ in range(2):
            await a_world.half_a_lease(router.clock)
            await successor.register(WORKER, NEW, ELSEWHERE)
            renewed = router.clock.now() + a_world.lease
            await router.until(lambda found, renewed=renewed: found and router.lease_end(WORKER) == renewed)

        await router.has(decode_0=ELSEWHERE)


async def test_superseded_worker_learns_it_on_renewal(a_world):
    async with a_router(a_world) as router, a_world.open() as replaced, a_world.open() as successor:
        await replaced.register(WORKER, OLD, ADDRESS)
        await successor.register(WORKER, NEW, ELSEWHERE)

        with pytest.raises(WorkerSuperseded, match="an id of its own"):
            await replaced.register(WORKER, OLD, ADDRESS)

        await replaced.deregister(WORKER, OLD)
        await router.has(decode_0=ELSEWHERE)


async def test_cut_off_router_keeps_workers_until_leases_end(a_world):
    async with a_router(a_world, far=True) as router, a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        await a_world.cut()
        await worker.register(WORKER, OLD, ADDRESS)  # the router cannot see this
        await router.until(lambda _: router.registry.directory_reachable is False)

        router.clock.move(a_world.lease - 1)
        assert router.addresses() == {WORKER: ADDRESS}
        router.clock.move(1)
        assert router.addresses() == {}

        await a_world.mend()
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        assert router.registry.directory_reachable


async def test_cut_off_router_catches_up(a_world):
    async with (
        a_router(a_world, far=True) as router,
        a_world.open() as leaving,
        a_world.open() as staying,
        a_world.open() as coming,
    ):
        await leaving.register(WORKER, OLD, ADDRESS)
        await staying.register(OTHER, OLD, ELSEWHERE)
        await router.has(decode_0=ADDRESS, decode_1=ELSEWHERE)

        await a_world.cut()
        await leaving.deregister(WORKER, OLD)
        await coming.register(WorkerId("decode-2"), OLD, ADDRESS)
        await a_world.mend()

        await router.has(decode_1=ELSEWHERE, decode_2=ADDRESS)


async def test_cut_off_worker_learns_it_and_registers_again(a_world):
    async with a_router(a_world) as router, a_world.open_far() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await a_world.cut()
        with pytest.raises(RegistryUnreachable):
            await worker.register(WORKER, OLD, ADDRESS)

        await a_world.mend()
        await registered(worker)
        await router.has(decode_0=ADDRESS)


async def test_lost_record_returns_on_renewal(a_world):
    async with a_router(a_world) as router, a_world.open() as worker:
        await worker.register(WORKER, OLD, ADDRESS)
        await router.has(decode_0=ADDRESS)
        await a_world.lose(WORKER)
        await router.has()

        await worker.register(WORKER, OLD, ADDRESS)

        await router.has(decode_0=ADDRESS)
        await worker.deregister(WORKER, OLD)
        await router.has()


@pytest.mark.parametrize("name", ["a/b c.d", "..", ".hidden", "Ä" * 128, "x" * 128], ids=repr)
async def test_any_worker_name_can_be_stored(a_world, name):
    async with a_router(a_world) as router, a_world.open() as worker:
        await worker.register(WorkerId(name), OLD, ADDRESS)
        await router.until(lambda found: found == {name: ADDRESS})

        await worker.deregister(WorkerId(name), OLD)
        await router.has()
