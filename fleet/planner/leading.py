"""Leader connector: lets a planner observe and write only while it leads.

Rules:

1. Each call first checks that the planner leads. A planner may have been suspended for longer than its election lease, so
   the check is made again before each attempt of a write, and it compares the present instant with the end of the lease.
2. A planner can also be suspended between this check and its write. If the next leader has written the pool meanwhile, or
   has adopted the pool's unfinished plan under another id (`adopted_id`), the write ends with a conflict
   (`fleet.planner.execution.to_write`). Otherwise this one write succeeds late. If the pool is not settled then, the leader
   adopts the late plan, because it did not write the plan itself (`fleet.planner.loop`).
"""

import re

from fleet.planner.election.ports import PlanElection
from fleet.planner.messages import Observation, Plan, PlanId
from fleet.planner.ports import PlanConnector


class LeadershipLost(Exception):
    """The planner does not lead any more, so it must not carry out its plan any further."""


class LeaderConnector:
    """Passes calls to a connector while this planner leads. Implements `fleet.planner.ports.PlanConnector`.

    Each call raises `LeadershipLost` if this planner does not lead.
    """

    def __init__(self, connector: PlanConnector, election: PlanElection) -> None:
        self._connector = connector
        self._election = election

    async def observe(self) -> Observation:
        self._check()
        return await self._connector.observe()

    async def apply(self, plan: Plan, seen: Observation) -> None:
        self._check()
        await self._connector.apply(plan, seen)

    def _check(self) -> None:
        if not self._election.leads():
            raise LeadershipLost("another planner leads")


def adopted_id(plan: PlanId, wall_ms: int) -> PlanId:
    """Return the id under which a new leader writes the plan of an earlier leader at an instant.

    The earlier leader does not know this id. So if it still runs, it neither rolls the plan back nor changes its numbers.
    """
    return PlanId(f"{recorded_id(plan)}-adopted-{wall_ms}")


def recorded_id(plan: PlanId) -> PlanId:
    """Return the id under which a plan is recorded: the id from before its first adoption."""
    return PlanId(re.sub("-adopted-[0-9]+", "", plan))
