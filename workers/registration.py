"""Registration of a worker: keeps its entries in the registries, and never disturbs the work on requests.

Rules:

1. The worker registers at once, and renews its lease three times in the time for which a lease lasts. While the
   registry does not answer, the worker tries again with growing pauses.
2. A draining worker deregisters first, so that no further router finds it. Routers that have a stream to the worker
   keep the stream until it ends. So running attempts go on, and a message on the stream says that the worker takes no new
   attempts.
3. A registry that cannot be reached delays the end of the worker by at most `DEREGISTER_SECONDS`, because the lease ends
   by itself.
4. If another process is registered under the worker's id, the worker waits for the end of that process, at most
   `name_wait_seconds`. The process may be the worker's own predecessor, whose end the registry has not noticed yet. The
   worker is not ready meanwhile.
5. A worker that was replaced by another process with its id does not try again, because the two processes would replace
   each other for ever. It ends with an error, so that its supervisor acts. A registered worker also counts as replaced if
   it finds another process registered under its id.
6. A worker is ready when each of its registries has accepted it once. If a registry fails later, the worker stays ready,
   because the routers have streams to it. A worker that was replaced or has deregistered is not ready.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from msgspec import Struct

from fleet.core.clock import SECOND, Nanos
from fleet.core.ids import Incarnation, WorkerId
from fleet.core.repeats import LogDeduplicator
from fleet.membership.ports import NameHeld, RegistrationRefused, Registry, RegistryUnreachable, WorkerSuperseded

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
# Maximum pause between two tries while the registry does not answer. It is short, so that a restarted router knows its workers
# again after a short time.
LONGEST_PAUSE_SECONDS = 2.0
HELD_PAUSE_SECONDS = 0.5  # pause between two attempts to register an id under which another process is registered
DEREGISTER_SECONDS = 2.0
NAME_WAIT_SECONDS = 60.0  # default of `WorkerSettings.name_wait_seconds`


class RegistryEntry(Struct, kw_only=True):
    """Keeps one worker's entry in one registry."""

    registry: Registry
    worker_id: WorkerId
    incarnation: Incarnation
    address: str
    name_wait_seconds: float = NAME_WAIT_SECONDS
    taken: bool = False
    """True from the registry's first acceptance of the worker until the worker is replaced or deregisters."""

    async def run(self) -> str:
        """Stay registered until cancelled.

        Return earlier if another process has replaced this worker, or if another process keeps the worker's id for
        longer than `name_wait_seconds` (rules 4 and 5). The result is a text that says which of the two has happened.
        """
        pause = FIRST_PAUSE_SECONDS
        reachable: bool | None = None
        failures = LogDeduplicator()
        registered = False  # True after the registry has accepted the worker for the first time
        # Until this time the worker waits for the end of another process with its id (rule 4); None: it does not wait.
        waits_until: float | None = None
        while True:
            try:
                lease = await self.registry.register(self.worker_id, self.incarnation, self.address)
            except RegistryUnreachable as error:
                now = Nanos(round(asyncio.get_running_loop().time() * SECOND))
                if failures.is_new(self.worker_id, str(error), now):
                    _log_failure(error)
                reachable = False
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                continue
            except NameHeld as error:
                time = asyncio.get_running_loop().time()
                if registered:
                    return self._replaced(f"{self.worker_id} has been replaced: {error}")
                if waits_until is None:
                    waits_until = time + self.name_wait_seconds
                    log.warning(
                        "worker id held by another process",
                        extra={"worker": self.worker_id, "cause": str(error), "seconds": self.name_wait_seconds},
                    )
                if time >= waits_until:
                    return self._replaced(f"{error}; waited {self.name_wait_seconds:g} s for it to go")
                await asyncio.sleep(HELD_PAUSE_SECONDS)
                continue
            except WorkerSuperseded as error:
                return self._replaced(f"{self.worker_id} has been replaced: {error}")
            if not reachable:
                log.info("worker registered", extra={"worker": self.worker_id, "address": self.address})
            reachable = self.taken = registered = True
            failures.forget(self.worker_id)
            waits_until = None
            pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(lease / SECOND / 3)

    def _replaced(self, why: str) -> str:
        self.taken = False
        return why

    async def leave(self) -> None:
        """Deregister, or give up after two seconds. The caller has to cancel `run` first, which would register the worker again."""
        self.taken = False
        try:
            async with asyncio.timeout(DEREGISTER_SECONDS):
                await self.registry.deregister(self.worker_id, self.incarnation)
        except (RegistryUnreachable, TimeoutError):
            log.info("deregistration failed, lease will end", extra={"worker": self.worker_id})


def _log_failure(error: RegistryUnreachable) -> None:
    if isinstance(error, RegistrationRefused):
        log.warning("worker registration refused", extra={"cause": str(error)})
    else:
        log.warning("registry unreachable", extra={"cause": str(error)})


class WorkerMembership:
    """Keeps a worker's entries in all of its registries; a worker may have no registry."""

    def __init__(self, registrations: Sequence[RegistryEntry]) -> None:
        self.registrations = registrations
        self._leaving = asyncio.Event()
        self._left = asyncio.Event()
        self._when_replaced: Callable[[], None] = lambda: None
        self.replaced = ""
        """Text that says how another process has replaced this worker, or has kept its id for too long; empty until then."""

    @property
    def ready(self) -> bool:
        return not self._leaving.is_set() and all(each.taken for each in self.registrations)

    def when_replaced(self, tell: Callable[[], None]) -> None:
        """Call `tell` when another process replaces this worker or keeps its id for too long; at once if that has happened already."""
        self._when_replaced = tell
        if self.replaced:
            tell()

    async def leave(self) -> None:
        """Deregister from all registries, or give up after two seconds. If the deregistration has begun, only wait for its end."""
        self._leaving.set()
        await self._left.wait()

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Stay registered until the context ends or `leave` is called."""
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
                running = [tasks.create_task(self._run(each)) for each in self.registrations]
                await self._leaving.wait()
                for each in running:
                    each.cancel()
            async with asyncio.TaskGroup() as tasks:
                for registration in self.registrations:
                    tasks.create_task(registration.leave())
        finally:
            self._left.set()

    async def _run(self, registration: RegistryEntry) -> None:
        self.replaced = await registration.run()
        self._when_replaced()
