"""Port of demand: where a planner learns what clients ask for."""

from typing import Never, Protocol

from fleet.planner.demand import DemandWindow, RecentRequest


class DemandSource(Protocol):
    """Source of the demand windows of one model."""

    async def run(self) -> Never:
        """Collect demand until cancelled."""
        ...

    def window(self) -> DemandWindow:
        """Return the demand since the last window."""
        ...

    def sample(self) -> tuple[RecentRequest, ...]:
        """Return recent requests in the order of their arrival; empty if the source has none."""
        ...
