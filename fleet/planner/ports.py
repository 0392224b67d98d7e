"""Ports of the planner: defines the connector to the orchestrator, which starts and ends replicas, and the rehearsal.

`fleet.planner.connectors` and `operators.plan_connector` implement the connector, and `fleet.app.rehearsal` the
rehearsal.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from fleet.planner.demand import RecentRequest
from fleet.planner.messages import Observation, Plan, PoolName

CALL_SECONDS = 10.0


class PlanConnector(Protocol):
    """Port to an orchestrator: reads the state of the pools, and writes plans.

    Each connector writes in the name of one kind of writer (`fleet.planner.messages.PlanWriter`): the planner or a
    person. Each call ends within `CALL_SECONDS`.
    """

    async def observe(self) -> Observation:
        """Return the present state of the pools.

        Raises:
            ConnectorUnreachable: The orchestrator does not answer, or its records cannot be read. The caller may try again;
                until then, the last observation may still be true.
            OrchestratorGone: The program that carries out the plans has ended without reporting it.
        """
        ...

    async def apply(self, plan: Plan, seen: Observation) -> None:
        """Write a plan that was made from the observation `seen`, without waiting for its replicas.

        All pools are checked before the first one is written. Pools that shrink are written first. So even if only a
        part of the plan was written, the sum of all requested replicas is at most the larger one of two sums: the sum
        before the plan, and the sum of the whole plan. A second call with the same plan writes the numbers that the
        first call has not written.

        Raises:
            PlanConflict: Somebody has written a number after the observation, so the caller has to observe and plan
                again. Nothing is written, except if the number was written during this call: then a part of the plan
                may be written.
            PlanRefused: A pool does not exist, is pinned, or must not be changed. Nothing or a part of the plan is
                written.
            ConnectorUnreachable: The orchestrator does not answer; a part of the plan may be written.
            OrchestratorGone: The program that carries out the plans has ended without reporting it.
        """
        ...


@runtime_checkable
class PoolReleaser(Protocol):
    """Port of a connector that can give pinned pools back to the planner."""

    async def release(self, pools: Sequence[PoolName]) -> None:
        """Give pools back to the planner: they keep their numbers, and the planner may change them again.

        Raises:
            PlanConflict: Another writer changed a pool during each of several attempts.
            PlanRefused: A pool does not exist, or no planner may change it; nothing is written.
            ConnectorUnreachable: The orchestrator does not answer; the pools may be released or not.
            OrchestratorGone: The program that carries out the plans has ended without reporting it.
        """
        ...


class ConnectorError(Exception):
    """A call to the orchestrator failed: the plan was perhaps not written, or the pools could not be observed.

    The message is one line.
    """


class ConnectorUnreachable(ConnectorError):
    """The orchestrator does not answer, or its plan or report cannot be read now. A later call may succeed."""


class OrchestratorGone(ConnectorError):
    """The orchestrator was killed or has ended without a report, so its last report is out of date."""


class PlanConflict(ConnectorError):
    """A pool has changed after it was observed, so the caller has to observe and plan again."""

    def __init__(self, pool: PoolName) -> None:
        super().__init__(f"{pool}: somebody else has changed it meanwhile; look again")
        self.pool = pool


class PlanRefused(ConnectorError):
    """The plan cannot be carried out until somebody changes a setting or the pool."""

    def __init__(self, pool: PoolName, cause: str) -> None:
        super().__init__(f"{pool}: {cause}")
        self.pool = pool


class PoolsPrediction(Struct, frozen=True, kw_only=True):
    """Holds the latencies and costs that a rehearsal predicts if certain numbers of replicas serve the recent requests."""

    ttft_seconds: float
    """Predicted TTFT in seconds of the answered requests, at the percentile of the goals."""

    tpot_seconds: float
    attainment: float
    """Share of requests that keep both latency goals, from 0 to 1. Refused requests keep none."""

    gpu_hours: float
    """GPU-hours that the pools use in one hour."""

    dollars: float
    """Dollars that the replicas cost in one hour."""

    refused: float = 0.0
    """Share of requests that the router refuses because they would wait too long, from 0 to 1."""


class RehearsalResult(Struct, frozen=True, kw_only=True):
    """Holds the predictions of a rehearsal, for the present and for the planned numbers of replicas."""

    present: PoolsPrediction
    planned: PoolsPrediction
    requests: int
    """Number of sampled requests that were simulated."""

    seconds: float
    """Duration of the rehearsal in seconds of real time."""


class RehearsalSkipped(Exception):
    """A rehearsal made no prediction; the message states the reason."""


class Rehearsal(Protocol):
    """Port that tries a plan before it is applied, for example in the simulator."""

    async def rehearse(
        self,
        sample: Sequence[RecentRequest],
        rate: float,
        present: Mapping[PoolName, int],
        planned: Mapping[PoolName, int],
    ) -> RehearsalResult:
        """Predict latencies and cost for the present replicas and for the planned ones.

        The caller has to limit the time of the call.

        Args:
            sample: Recent requests in the order of their arrival.
            rate: Requests per second that the pools must serve.
            present: Number of replicas of each pool now.
            planned: Number of replicas of each pool after the plan.

        Raises:
            RehearsalSkipped: The rehearsal failed, the sample has too few requests, or `rate` is 0.
        """
        ...
