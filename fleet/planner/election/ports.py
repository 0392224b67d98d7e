"""Port of the election: one of several planners leads."""

import asyncio
from typing import Never, Protocol


class PlanElection(Protocol):
    """A planner as a candidate in an election."""

    def leads(self) -> bool:
        """Return whether this planner may apply plans now."""
        ...

    async def run(self) -> Never:
        """Take part in the election until cancelled."""
        ...


class AlwaysLeads:
    """An election with one candidate, which always leads. Implements `PlanElection`."""

    def leads(self) -> bool:
        return True

    async def run(self) -> Never:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets the event")
