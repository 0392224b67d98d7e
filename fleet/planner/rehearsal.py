"""Rehearsal: the port by which a plan is tried before it is applied, and what it predicts."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from fleet.planner.demand import RecentRequest
from fleet.planner.messages import PoolName


class PoolsPrediction(Struct, frozen=True, kw_only=True):
    """Prediction for some numbers of replicas and the recent requests."""

    ttft_seconds: float
    """Percentile of the goals."""

    tpot_seconds: float
    attainment: float
    """Share of requests that keep both goals."""

    gpu_hours: float
    """GPU-hours of one hour."""

    dollars: float
    """Price of one hour."""


class RehearsalResult(Struct, frozen=True, kw_only=True):
    """Predictions for the pools as they are, and as planned."""

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
