"""Ports of the planner: the connector to the orchestrator that starts and ends replicas, and the rehearsal of plans.

`fleet.planner.connectors` and `operators.plan_connector` implement the connector, and `fleet.app.rehearsal` the rehearsal.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from fleet.planner.demand import RecentRequest
from fleet.planner.messages import Observation, Plan, PoolName

CALL_SECONDS = 10.0


class PlanConnector(Protocol):
    """Connector to the pools for one writer (`fleet.planner.messages.PlanWriter`). Each call ends within `CALL_SECONDS`."""

    async def observe(self) -> Observation:
        """Return the present state of the pools.

        Raises:
            ConnectorUnreachable: Nothing is known; observe again later. The last observation may still be true.
            OrchestratorGone: The program that carries out the plans has ended without reporting it.
        """
        ...

    async def apply(self, plan: Plan, seen: Observation) -> None:
        """Write a plan that was made on an observation, without waiting for its replicas.

        All pools are checked before any is written. Pools that shrink are written first, so that a plan that is written in part wants no
        more replicas than before or after it. A second call with the same plan writes the rest.

        Raises:
            PlanConflict: Somebody has written since; observe again. Nothing is written, or a part if it happened meanwhile.
            PlanRefused: A pool does not exist, is pinned, or may not be written. Nothing, or a part, is written.
            ConnectorUnreachable: A part may be written.
            OrchestratorGone: The program that carries out the plans has ended without reporting it.
        """
        ...


@runtime_checkable
class PoolReleaser(Protocol):
    """A connector, opened for the planner, that can give pools back to it."""

    async def release(self, pools: Sequence[PoolName]) -> None:
        """Give pools back to the planner: they keep their numbers, and the planner may change them again.

        Raises:
            PlanConflict: Others write all the time.
            PlanRefused: A pool does not exist, or no planner may change it; nothing is written.
            ConnectorUnreachable: The pools may be released.
        """
        ...


class ConnectorError(Exception):
    """A plan was possibly not written, or the pools could not be observed. The message is one line."""


class ConnectorUnreachable(ConnectorError):
    """The orchestrator does not answer; try again later."""


class OrchestratorGone(ConnectorError):
    """The orchestrator has ended; what it reported before is out of date."""


class PlanConflict(ConnectorError):
    """The pool changed since it was observed: observe and plan again."""

    def __init__(self, pool: PoolName) -> None:
        super().__init__(f"{pool}: somebody else has changed it meanwhile; look again")
        self.pool = pool


class PlanRefused(ConnectorError):
    """The plan cannot be executed until something else is changed."""

    def __init__(self, pool: PoolName, cause: str) -> None:
        super().__init__(f"{pool}: {cause}")
        self.pool = pool


class PoolsPrediction(Struct, frozen=True, kw_only=True):
    """Prediction for some numbers of replicas and the recent requests."""

    ttft_seconds: float
    """TTFT at the percentile of the goals."""

    tpot_seconds: float
    attainment: float
    """Share of requests that keep both goals."""

    gpu_hours: float
    """GPU-hours that the pools use in one hour."""

    dollars: float
    """Price of one hour."""


class RehearsalResult(Struct, frozen=True, kw_only=True):
    """Predictions for the present pools and for the planned pools."""

    present: PoolsPrediction
    planned: PoolsPrediction
    requests: int
    """Requests of the sample that were simulated."""

    seconds: float
    """Duration of the rehearsal."""


class RehearsalSkipped(Exception):
    """There is no prediction; the message says why."""


class Rehearsal(Protocol):
    """Tries plans elsewhere than in production."""

    async def rehearse(
        self,
        sample: Sequence[RecentRequest],
        rate: float,
        present: Mapping[PoolName, int],
        planned: Mapping[PoolName, int],
    ) -> RehearsalResult:
        """Predict what two sets of replicas give.

        Args:
            sample: Recent requests in the order of their arrival.
            rate: Requests per second that the pools must serve.
            present: Replicas as they are.
            planned: Replicas as planned.

        Raises:
            RehearsalSkipped: It took too long, or failed, or there are too few requests.
        """
        ...
