"""Port of the frontends to tracing; `fleet.tracing.request_traces` implements it, for routers that trace."""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from fleet.core.clock import Nanos
from fleet.core.errors import Reason
from fleet.core.ids import RequestId
from fleet.core.requests import Finish, GenerateRequest, Sampling, Usage
from fleet.core.telemetry import operation_of
from kvstore.tracing.context import TraceContext

TRACE_HEADERS = frozenset({"traceparent", "tracestate", "baggage"})
"""The headers of W3C's trace context and baggage."""


class TracedRequest(Struct, frozen=True, kw_only=True):
    """The attributes of a request that its span shows. They contain nothing of the prompt."""

    id: RequestId
    operation: str  # value of the span's attribute `gen_ai.operation.name`
    model: str
    stream: bool
    context: TraceContext | None = None  # None: the frontend has read no trace headers
    tenant: str = ""
    session: str = ""
    sampling: Sampling | None = None  # None: the sampling parameters are not known
    unset: frozenset[str] = frozenset()  # fields of `sampling` that the client has left out (`GenerateRequest.unset`)


def traced_request(request: GenerateRequest) -> TracedRequest:
    """Return the attributes of a request for its span."""
    return TracedRequest(
        id=request.id,
        operation=operation_of(request),
        model=request.model,
        stream=not request.whole,
        context=request.trace,
        tenant=request.tenant,
        session=request.session,
        sampling=request.sampling,
        unset=request.unset,
    )


class RequestEnd(Struct, frozen=True, kw_only=True):
    """The end of a traced request: its outcome, its token counts, and the instant of its first token."""

    outcome: Finish | Reason | None  # None: an external server has answered
    usage: Usage | None = None  # None: the request was not admitted, or it was for an external server
    # Instant of the first token, or of the first byte of a relayed answer; None: there was none.
    first_token: Nanos | None = None


class RequestTrace(Protocol):
    """Port to the trace of one request, which notes what happens to the request."""

    @property
    def trace_id(self) -> str:
        """Return the trace id in hexadecimal."""
        ...

    def follow(self, request: TracedRequest) -> None:
        """Note the final id and tenant of the request. Call this before the request is submitted to the router."""
        ...

    def ended(self, end: RequestEnd) -> None:
        """Note the end of the request, and export its spans if it was sampled, slow, or has failed."""
        ...


class RequestTracing(Protocol):
    """Port to tracing: begins the traces of the requests of one router process."""

    def read(self, headers: Mapping[bytes, bytes]) -> TraceContext:
        """Return the trace context of a request: the one of its client, or a new one.

        Args:
            headers: The headers, or the metadata of a gRPC call, by names in lower case.
        """
        ...

    def begin(self, request: TracedRequest, began: Nanos) -> RequestTrace:
        """Begin the trace of a request that arrived at the instant `began`."""
        ...
