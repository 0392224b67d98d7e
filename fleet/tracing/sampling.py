"""Sampling: decides which requests are traced.

Rules:

1. Head sampling happens at the arrival of a request. If the client sends a header `traceparent` and
   `TracingSettings.follow_clients` is on, the header decides. Otherwise `TracingSettings.sample_ratio` decides: it is
   compared with the last 8 bytes of the trace id, as OpenTelemetry's TraceIdRatioBased does. So all services with the same
   ratio make the same decision for a trace.
2. Tail sampling happens at the end of a request: the trace of a request that has failed or was slow is kept although it
   was not sampled. This is possible because this process has noted all facts of the request, and because workers keep
   their facts for a while.
3. A request that was refused by a rule (`REFUSALS`) before its answer had begun does not count as failed. Clients can
   send any number of such requests. The trace of such a request is therefore kept only if the request was slow or sampled.
   All these traces may fill only the share `REFUSED_SHARE` of the queue for the collector, at the router and at the
   workers. So a flood of refused requests displaces no trace of a failure.
4. A request whose deadline passed before its first token has failed, but its client has chosen the deadline, which may
   be a millisecond. Its trace is therefore kept, but gets only `REFUSED_SHARE` of the queue too, unless it was slow.
"""

from enum import StrEnum

from fleet.core.clock import SECOND, Nanos
from fleet.core.errors import Reason
from fleet.core.requests import Finish
from kvstore.tracing.settings import TracingSettings

REFUSALS = frozenset(
    {
        *(Reason.INVALID_ARGUMENT, Reason.MODEL_NOT_FOUND, Reason.REQUEST_NOT_FOUND, Reason.TOO_LARGE),
        *(Reason.UNAUTHENTICATED, Reason.RATE_LIMITED, Reason.QUEUE_FULL, Reason.DRAINING, Reason.CANCELLED),
    }
)
"""Reasons of requests that ended because of their client or of a rule of the router, and not by a failure of the cluster."""

REFUSED_SHARE = 0.5  # share of the export queue that requests of rules 3 and 4 may fill, so that a flood leaves room


class KeepReason(StrEnum):
    """The reason why the spans of a request are exported."""

    SAMPLED = "sampled"
    ERROR = "error"
    SLOW = "slow"


def is_sampled(trace_id: bytes, ratio: float) -> bool:
    """Return whether the trace with this id is sampled (rule 1). `ratio` is the share of all traces that are sampled, 0 to 1."""
    return int.from_bytes(trace_id[8:]) < round(ratio * (1 << 64))


def is_refusal(outcome: Finish | Reason | None, *, has_begun: bool) -> bool:
    """Return whether a request was refused by a rule or cancelled, and so does not count as failed (rule 3).

    After the answer has begun, only a cancellation by the client is no failure. If a rule ends an answer that has begun,
    for example because the router drains, the request has failed.
    """
    return outcome is Reason.CANCELLED if has_begun else outcome in REFUSALS


def keep_at_end(
    settings: TracingSettings, outcome: Finish | Reason | None, first_token_after: Nanos | None, ended_after: Nanos
) -> KeepReason | None:
    """Return why the trace of a request that was not sampled is kept; None if it is not kept (rules 2 and 3).

    Args:
        settings: The tracing settings, with the limits for slow requests.
        outcome: How the request ended; None if an external server has answered.
        first_token_after: Time from the request's arrival to its first token; None if there was no token.
        ended_after: Time from the request's arrival to its end.
    """
    refused = is_refusal(outcome, has_begun=first_token_after is not None)
    if settings.keep_errors and isinstance(outcome, Reason) and not refused:
        return KeepReason.ERROR
    return KeepReason.SLOW if _is_slow(settings, first_token_after, ended_after) else None


def export_share(
    settings: TracingSettings, outcome: Finish | Reason | None, first_token_after: Nanos | None, ended_after: Nanos
) -> float:
    """Return the share of the export queue that a request may use (rules 3 and 4). The arguments are those of `keep_at_end`."""
    has_begun = first_token_after is not None
    if is_refusal(outcome, has_begun=has_begun):
        return REFUSED_SHARE
    if outcome is Reason.DEADLINE_PASSED and not has_begun and not _is_slow(settings, None, ended_after):
        return REFUSED_SHARE
    return 1.0


def _is_slow(settings: TracingSettings, first_token_after: Nanos | None, ended_after: Nanos) -> bool:
    waited = ended_after if first_token_after is None else first_token_after
    return bool(
        (settings.slow_first_token_seconds and waited > settings.slow_first_token_seconds * SECOND)
        or (settings.slow_seconds and ended_after > settings.slow_seconds * SECOND)
    )
