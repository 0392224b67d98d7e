"""Keeps a worker registered, and lets nothing that happens to the registry disturb serving.

Rules:

1. Register at once, then three times a lease; while the registry does not answer, try again with growing pauses.
2. A worker that drains stays registered until its last request has ended (routers already know from its streams that
   it takes no more), and then deregisters at once instead of letting the lease end.
3. A registry that cannot be reached on the way out is no reason to stay: the lease ends by itself.
4. Whoever was replaced by a newer process of the same id does not try again, or the two would take turns. Its streams
   go on; nobody new will come.
"""

import asyncio
import logging

from msgspec import Struct

from fleet.clock import SECOND
from fleet.ids import Incarnation, WorkerId
from workers.ports import Registry, RegistryUnreachable, Superseded

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 2.0  # a router that comes back is whole again within this
GOODBYE_SECONDS = 2.0


class Registration(Struct, frozen=True, kw_only=True):
    """One worker's entry in one registry."""

    registry: Registry
    worker_id: WorkerId
    incarnation: Incarnation
    address: str

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
                return
            if not reachable:
                log.info("registered", extra={"worker": self.worker_id, "address": self.address})
            reachable = True
            pause = FIRST_PAUSE_SECONDS
            await asyncio.sleep(lease / SECOND / 3)

    async def leave(self) -> None:
        """Deregister; gives up after two seconds. Call it after `run` has been cancelled."""
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self.registry.deregister(self.worker_id, self.incarnation)
        except (RegistryUnreachable, TimeoutError):
            log.info("left without a goodbye, the lease will end", extra={"worker": self.worker_id})
