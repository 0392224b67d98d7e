"""Port of the leader election among planners. Only the leader applies plans."""

import asyncio
from typing import Never, Protocol


class PlanElection(Protocol):
    """Port by which a planner takes part in an election, and learns whether it leads."""

    def leads(self) -> bool:
        """Return whether this planner may apply plans now."""
        ...

    async def run(self) -> Never:
        """Take part in the election until cancelled."""
        ...


class AlwaysLeads:
    """Replaces an election where none takes place: this planner always leads. Implements `PlanElection`."""

    def leads(self) -> bool:
        return True

    async def run(self) -> Never:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")
