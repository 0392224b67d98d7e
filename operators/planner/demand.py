"""Demand of a deployment whose routers come and go.

Rules:

1. Every router pod that lives and has an address is followed. A pod that was ready once, or has reported, must report from then on;
   a pod that starts need not.
2. A pod that is told to end is not followed any more. What it counted until then is kept.
3. As long as no router must report, there is no signal: nobody knows what is asked for.
"""

import asyncio
from collections.abc import Iterable
from typing import Never

from msgspec import Struct, structs

from fleet.planner.aggregate import DemandAggregator
from fleet.planner.demand import DemandWindow, RecentRequest
from fleet.planner.sources.routers import RouterDemandSource


class FollowedRouter(Struct, frozen=True, order=True):
    """A router pod whose demand reports are read."""

    name: str
    address: str
    """host:port of its control port."""

    ready: bool


class DeploymentDemand:
    """Implements `fleet.planner.sources.ports.DemandSource`."""

    def __init__(self, source: RouterDemandSource, aggregator: DemandAggregator) -> None:
        self._source = source
        self._aggregator = aggregator
        self._routers: tuple[FollowedRouter, ...] = ()
        self._changed = asyncio.Event()

    def routers_are(self, routers: Iterable[FollowedRouter]) -> None:
        """Take the routers that exist now."""
        found = tuple(sorted(routers))
        if found != self._routers:
            self._routers = found
            self._changed.set()

    def window(self) -> DemandWindow:
        window = self._source.window()
        if self._aggregator.sources:
            return window
        return structs.replace(window, stale=(*window.stale, "routers: none is ready or has reported yet"))

    def sample(self) -> tuple[RecentRequest, ...]:
        return self._source.sample()

    async def run(self) -> Never:
        following: dict[tuple[str, str], asyncio.Task[Never]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                wanted = {(each.name, each.address): each for each in self._routers}
                for gone in following.keys() - wanted.keys():
                    following.pop(gone).cancel()
                    self._aggregator.forget(gone[0])
                for place, router in wanted.items():
                    if place not in following:
                        following[place] = tasks.create_task(self._source.follow(*place))
                    if router.ready:
                        self._aggregator.expect(router.name)
                await self._changed.wait()
