"""Table of status codes: the gRPC status, the HTTP status and the OpenAI error type of each `Reason`."""

from collections.abc import Mapping

from grpc import StatusCode
from msgspec import Struct

from fleet.core.errors import Reason, RequestRejected


class ReasonStatus(Struct, frozen=True):
    """Status codes by which the protocols report one reason."""

    grpc: StatusCode
    http: int
    openai: str


REASON_STATUSES: Mapping[Reason, ReasonStatus] = {
    Reason.INVALID_ARGUMENT: ReasonStatus(StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error"),
    Reason.MODEL_NOT_FOUND: ReasonStatus(StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    Reason.REQUEST_NOT_FOUND: ReasonStatus(StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    Reason.TOO_LARGE: ReasonStatus(StatusCode.RESOURCE_EXHAUSTED, 413, "invalid_request_error"),
    Reason.KV_MISMATCH: ReasonStatus(StatusCode.FAILED_PRECONDITION, 400, "invalid_request_error"),
    Reason.UNAUTHENTICATED: ReasonStatus(StatusCode.UNAUTHENTICATED, 401, "authentication_error"),
    Reason.NO_WORKER: ReasonStatus(StatusCode.UNAVAILABLE, 503, "overloaded_error"),
    Reason.QUEUE_FULL: ReasonStatus(StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    Reason.RATE_LIMITED: ReasonStatus(StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    Reason.DRAINING: ReasonStatus(StatusCode.UNAVAILABLE, 503, "overloaded_error"),
    Reason.WORKER_LOST: ReasonStatus(StatusCode.UNAVAILABLE, 503, "server_error"),
    Reason.DEADLINE_PASSED: ReasonStatus(StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    # The status 499 is that of nginx for a client that has disconnected.
    Reason.CANCELLED: ReasonStatus(StatusCode.CANCELLED, 499, "cancelled"),
    Reason.INTERNAL: ReasonStatus(StatusCode.INTERNAL, 500, "server_error"),
}


def rename_field(refused: RequestRejected, names: Mapping[str, str]) -> RequestRejected:
    """Return the same rejection with the field under the name that the client used.

    The result is always a new exception, because callers raise it `from refused`. An exception that is its own cause would
    stay in memory, with the whole request, until Python's cyclic garbage collection runs.

    `names` maps field paths of the public protocol, without indices. The rest of a path is kept: with
    ``{"chat.messages": "messages"}`` the field ``chat.messages[1].role`` becomes ``messages[1].role``.
    """
    path = field = refused.field
    message = refused.message
    known = path if path in names else path.partition("[")[0]
    if known in names:
        field = names[known] + path[len(known) :]
    if message.startswith(f"{path}: "):
        message = field + message[len(path) :]
    return RequestRejected(
        refused.reason,
        message,
        field=field,
        retry_after_ms=refused.retry_after_ms,
        cause=refused.cause,
        allowance=refused.allowance,
    )
