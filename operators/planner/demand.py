"""Demand of a deployment: collects the reports of its router pods, which start and end while the planner runs.

Rules:

1. The planner reads the reports of every router pod that has an address, has not ended and is not being deleted. A pod
   has to report as soon as it has been ready or has reported once. If such a pod stops reporting, the demand is
   incomplete. A pod that is still starting does not have to report.
2. When a pod has ended or is being deleted, its reports are not read any more. Its last report still counts in the
   next demand window.
3. As long as no pod has to report, the demand is unknown, and the field `stale` of the demand window says so.
"""

import asyncio
from collections.abc import Iterable
from typing import Never

from msgspec import Struct, structs

from fleet.planner.aggregate import DemandAggregator
from fleet.planner.demand import DemandWindow, RecentRequest
from fleet.planner.sources.routers import RouterDemandSource


class FollowedRouter(Struct, frozen=True, order=True):
    """Names a router pod whose demand reports are read."""

    name: str
    address: str
    """Address of the pod's control port, as host:port."""

    ready: bool


class DeploymentDemand:
    """Collects the demand of a deployment from all its routers.

    Implements `fleet.planner.sources.ports.DemandSource`.
    """

    def __init__(self, source: RouterDemandSource, aggregator: DemandAggregator) -> None:
        self._source = source
        self._aggregator = aggregator
        self._routers: tuple[FollowedRouter, ...] = ()
        self._changed = asyncio.Event()

    def routers_are(self, routers: Iterable[FollowedRouter]) -> None:
        """Replace the list of routers whose reports are read."""
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
