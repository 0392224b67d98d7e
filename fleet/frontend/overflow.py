"""Overflow reports: state of the hosted endpoints that take requests which a model's own workers cannot take."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from fleet.core.ids import ModelName, RequestId


class OverflowOutcome(StrEnum):
    """Outcome of a request that the router rejected for load and that may overflow to a hosted endpoint."""

    SERVED = "served"
    LIMIT_SPENT = "limit_spent"  # not sent: the estimated cost was more than what was left of the spending limit
    CLOSED = "closed"  # not sent: the endpoint had failed lately, or already ran as many requests as allowed
    FAILED = "failed"  # the endpoint gave no answer
    BROKEN = "broken"  # the answer broke off, the client disconnected, or the deadline passed


class OverflowRecord(Struct, frozen=True, kw_only=True):
    """Outcome and cost of one request that the router rejected."""

    model: ModelName
    url: str
    reason: str
    """Reason for which the router rejected the request."""

    message: str
    outcome: OverflowOutcome
    estimated_dollars: float
    dollars: float
    prompt_tokens: int
    """Prompt tokens as the endpoint counted them; 0 if unknown."""

    answer_tokens: int


class OverflowState(Struct, frozen=True, kw_only=True):
    """State of one hosted endpoint."""

    model: ModelName
    url: str
    running: int
    outcomes: Mapping[OverflowOutcome, int]
    """Number of requests by outcome, since the start of the process."""

    dollars: float
    """Cost of the requests that have ended since the start of the process."""

    spent_dollars: float
    """Charges in the last hour, including the estimated cost of running requests."""

    limit_dollars: float
    """Spending limit for one hour."""

    trouble: str
    """The reason why the endpoint gets no requests now; empty if it gets requests."""


class OverflowReports(Protocol):
    """Port to the reports of one router process about its hosted endpoints."""

    def explained(self, request_id: RequestId) -> OverflowRecord | None:
        """Return the outcome of a rejected request that could overflow; None for another request, or if the outcome is no longer stored."""
        ...

    def status(self) -> tuple[OverflowState, ...]:
        """Return the state of all hosted endpoints."""
        ...
