"""Overflow reports: what operators see of hosted endpoints that take the requests which a model's own workers cannot."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from fleet.core.ids import ModelName, RequestId


class OverflowOutcome(StrEnum):
    """Outcome of a refused request that may overflow."""

    SERVED = "served"
    LIMIT_SPENT = "limit_spent"  # the spending limit had no room for it
    CLOSED = "closed"  # the endpoint has failed lately, or as many requests as allowed run there
    FAILED = "failed"  # the endpoint gave no answer
    BROKEN = "broken"  # the answer broke off, the client left, or its deadline passed


class OverflowRecord(Struct, frozen=True, kw_only=True):
    """Outcome and cost of one request."""

    model: ModelName
    url: str
    reason: str
    """Reason of the router's refusal."""

    message: str
    outcome: OverflowOutcome
    estimated_dollars: float
    dollars: float
    prompt_tokens: int
    """Count of the endpoint; 0: unknown."""

    answer_tokens: int


class OverflowState(Struct, frozen=True, kw_only=True):
    """State of one endpoint."""

    model: ModelName
    url: str
    running: int
    outcomes: Mapping[OverflowOutcome, int]
    """Requests since the start of the process."""

    dollars: float
    """Cost of the requests that have ended since the start of the process."""

    spent_dollars: float
    """Charges of the last hour, including estimates of requests that run."""

    limit_dollars: float
    """The most that an hour may cost."""

    trouble: str
    """Why it gets no requests now; empty if it does."""


class OverflowReports(Protocol):
    """The endpoints of one router process, as operators see them."""

    def explained(self, request_id: RequestId) -> OverflowRecord | None:
        """Return what became of a request; None if it was never refused, or too long ago."""
        ...

    def status(self) -> tuple[OverflowState, ...]:
        """Return the state of all endpoints."""
        ...
