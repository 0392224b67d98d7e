"""What routers say of their workers, asked for again and again: more often while something is not as it should be."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Never

from msgspec import Struct

from operators.children import control_service
from operators.keys import Key, key_of
from operators.observe import conditions_of
from operators.ports import Routers
from operators.registrations import Registration
from operators.resources import RoleType
from operators.views import Custom

MISSED_ANSWERS = 3
"""Of a router, until what it said before is not believed any more."""

CALM = 6
"""Rounds after which those are asked that are as they should be."""


class Told(Struct, frozen=True):
    """What a router said, and how often it has not answered since."""

    workers: tuple[Registration, ...] | None = None
    missed: int = 0


class Hearsay:
    def __init__(self, routers: Routers, seconds: float, at_once: int, heard: Callable[[Key], None]) -> None:
        """`seconds` pass between two rounds; `heard` is told whose workers are others than before."""
        self._routers = routers
        self._seconds = seconds
        self._asking = asyncio.Semaphore(at_once)
        self._heard = heard
        self._told: dict[Key, Told] = {}

    def of(self, key: Key) -> tuple[Registration, ...] | None:
        """None where the router has not said anything, or not for a while."""
        return self._told.get(key, Told()).workers

    async def run(self, deployments: Callable[[], Iterable[Custom]]) -> Never:
        """Ask the routers of all there are at the moment; until cancelled."""
        rounds = 0
        while True:
            async with asyncio.TaskGroup() as tasks:
                for custom in deployments():
                    if rounds % CALM == 0 or not _is_ready(custom):
                        tasks.create_task(self._ask(custom))
            rounds += 1
            await asyncio.sleep(self._seconds)

    def forget(self, key: Key) -> None:
        self._told.pop(key, None)

    async def _ask(self, custom: Custom) -> None:
        key = key_of(custom.metadata.namespace, custom.metadata.name)
        async with self._asking:
            workers = await self._routers.workers(key.namespace, control_service(key.name, _router_role(custom)))
        before = self._told.get(key, Told())
        missed = 0 if workers is not None else before.missed + 1
        kept = workers if workers is not None or missed >= MISSED_ANSWERS else before.workers
        self._told[key] = Told(kept, missed)
        if _names(kept) != _names(before.workers):
            self._heard(key)


def _router_role(custom: Custom) -> str:
    roles = custom.spec.get("roles", [])
    return next((str(role.get("name")) for role in roles if role.get("type") == RoleType.ROUTER), "router")


def _is_ready(custom: Custom) -> bool:
    return any(each.type == "Ready" and each.status == "True" for each in conditions_of(custom))


def _names(workers: tuple[Registration, ...] | None) -> frozenset[str] | None:
    return None if workers is None else frozenset(each.pod for each in workers)
