"""Keeps a worker registered, and lets nothing that happens to the registry disturb serving.

Rules:

1. Register at once, then three times a lease; while the registry does not answer, try again with growing pauses.
2. A worker that is to drain deregisters first, so that nobody finds it who does not know it yet. Routers that have a stream to it
   keep that until it ends: work that runs there goes on, and the stream says that it takes no more.
3. A registry that cannot be reached on the way out is no reason to stay: the lease ends by itself.
4. Whoever was replaced by a newer process of the same id does not try again, or the two would take turns. Its streams
   go on; nobody new will come.
5. A worker is ready when every registry that it was told of has taken it once. One that is away later changes nothing about
   that: the routers have their streams. Who was replaced, or has left, is not ready.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from msgspec import Struct

from fleet.clock import SECOND
from fleet.ids import Incarnation, WorkerId
from workers.ports import Registry, RegistryUnreachable, Superseded

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0  # a router that comes back is whole again within this
GOODBYE_SECONDS = 2.0


class Registration(Struct, kw_only=True):
    """One worker's entry in one registry."""

    registry: Registry
    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    taken: bool = False
    """Whether the registry has it, as far as is known."""

    async def run(self) -> None:
        """Stay registered; until cancelled, or replaced."""
        pause = FIRST_PAUSE_SECONDS
        reachable: bool | None = None
        while True:
            try:
                lease = await self.registry.register(self.worker_id, self.incarnation, self.address)
            except RegistryUnreachable as error:
                if reachable is not False:
                    log.warning("registry unreachable, serving goes on", extra={"cause": str(error)})
                reachable = False
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            except Superseded as error:
                log.error("registered no more", extra={"worker": self.worker_id, "cause": str(error)})  # noqa: TRY400 - nothing broke
                self.taken = False
                return
            if not reachable:
                log.info("registered", extra={"worker": self.worker_id, "address": self.address})
            reachable = self.taken = True
            pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(lease / SECOND / 3)

    async def leave(self) -> None:
        """Deregister; gives up after two seconds. Call it after `run` has been cancelled."""
        self.taken = False
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self.registry.deregister(self.worker_id, self.incarnation)
        except (RegistryUnreachable, TimeoutError):
            log.info("left without a goodbye, the lease will end", extra={"worker": self.worker_id})


class Presence:
    """A worker's entries in all registries that it was told of; there may be none."""

    def __init__(self, registrations: Sequence[Registration]) -> None:
        self._registrations = registrations
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()

    @property
    def ready(self) -> bool:
        return not self._leaving.is_set() and all(each.taken for each in self._registrations)

    async def leave(self) -> None:
        """Deregister everywhere, within two seconds; once, however often it is asked."""
        self._leaving.set()
        await self._left.wait()

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Stay registered while the context is open, or until told to `leave`."""
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(self._keep())
            try:
                yield
            finally:
                self._leaving.set()
                await asyncio.wait([keeping])

    async def _keep(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(each.run()) for each in self._registrations]
                await self._leaving.wait()
                for each in running:
                    each.cancel()
            async with asyncio.TaskGroup() as tasks:
                for registration in self._registrations:
                    tasks.create_task(registration.leave())
        finally:
            self._left.set()
