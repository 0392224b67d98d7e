"""Port of demand sources, from which a planner gets the demand of a model."""

from typing import Never, Protocol

from fleet.planner.demand import DemandWindow, RecentRequest


class DemandSource(Protocol):
    """Port of a source that collects the demand of one model."""

    async def run(self) -> Never:
        """Collect demand until cancelled."""
        ...

    def window(self) -> DemandWindow:
        """Return the demand since the previous call, and begin the next window."""
        ...

    def sample(self) -> tuple[RecentRequest, ...]:
        """Return recent requests in the order of their arrival; empty if the source has none."""
        ...
