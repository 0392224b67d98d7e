"""Client errors: defines the errors that clients raise, grouped by what the caller can do: correct the request, retry, or stop.

A client sends a request again by itself only if `resume_seconds` is above 0 (`fleet.client.resumption`).
"""

from collections.abc import Mapping

import grpc
from google.rpc import status_pb2

from fleet.core.errors import Reason
from fleet.v1 import inference_pb2 as pb

NO_CLIENTS_PORT = "that is an address of another part of the cluster, such as a control address, and serves no clients"
# Message of gRPC servers for an unknown method. A client gets it from gRPC ports that are not for clients, such as a control port.
NO_METHOD = "Method not found!"

TLS_SIGNS = (
    # If only the server or only the client uses TLS, the server closes the connection, and gRPC reports one of these texts.
    *("Socket closed", "onnection reset", "roken pipe"),
    *("SSL", "Ssl", "ecurity handshake", "erification", "SETTINGS frame", "ALPN"),
)
"""Parts of gRPC's messages about connections that may have failed because of TLS."""

DETAILS_KEY = "grpc-status-details-bin"  # key of the call metadata in which gRPC sends a google.rpc.Status


class FleetError(Exception):
    """Error: a call has failed. The subclasses tell the caller how to react.

    Attributes:
        message: One sentence for a person.
        reason: The machine-readable reason, or None if the server gave none or was not reached.
        cause: Detailed code of a rejection, such as ``pin_unknown`` or ``context_length_exceeded``; empty if there is none.
        tls_cause: Result of `fleet.client.tls.tls_cause`, with which `message` begins. Empty: TLS is not the cause.
            None: no diagnosis was made.
    """

    def __init__(self, message: str, reason: Reason | None = None):
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.cause = ""
        self.tls_cause: str | None = None


class InvalidRequest(FleetError):
    """Error: the request is wrong, so the same request will fail again.

    Attributes:
        field: Path of the wrong field, such as ``sampling.temperature``; empty if the error names no field.
    """

    def __init__(self, message: str, reason: Reason | None = None, *, field: str = ""):
        super().__init__(message, reason)
        self.field = field


class ModelNotFound(InvalidRequest):
    """Error: the router serves no model with this name. `Client.models` returns the models that it serves."""


class RequestNotFound(InvalidRequest):
    """Error: the router does not know a request with this id, or does not remember it any more."""


class Unauthenticated(InvalidRequest):
    """Error: this client has no valid API key for a cluster with tenants, or client and control port do not have the same secret."""


class TooLarge(InvalidRequest):
    """Error: the message is larger than the server accepts, or prompt and answer are too long for every worker that may serve them."""


class IncompatibleRouter(FleetError):
    """Error: router and client have no protocol version in common. The message says which of them to upgrade."""


class Unavailable(FleetError):
    """Error: the request is valid, but could not be served now. A retry may succeed.

    If a part of the answer has arrived, a retry begins the answer again. If `resume_seconds` is above 0, the client has
    already tried to continue an answer whose stream broke.

    Attributes:
        retry_after_seconds: Seconds to wait before a retry; None if the server gave none.
    """

    def __init__(self, message: str, reason: Reason | None = None, *, retry_after_seconds: float | None = None):
        super().__init__(message, reason)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(FleetError):
    """Error: the answer was not complete before the deadline of the request, or a call took longer than its time limit."""


class Cancelled(FleetError):
    """Error: the call was cancelled, usually by this client."""


class ServerError(FleetError):
    """Error: the server or an engine has failed, or this client does not understand the server's answer."""


# Error classes by gRPC status code, for errors without a `Reason`: errors of gRPC itself, and of servers that are not Fleet's.
_CODES: Mapping[grpc.StatusCode, type[FleetError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: IncompatibleRouter,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,  # gRPC's own error for a message that exceeds its size limit
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}

_REASONS: Mapping[Reason, type[FleetError]] = {
    Reason.INVALID_ARGUMENT: InvalidRequest,
    Reason.MODEL_NOT_FOUND: ModelNotFound,
    Reason.REQUEST_NOT_FOUND: RequestNotFound,
    Reason.TOO_LARGE: TooLarge,
    Reason.KV_MISMATCH: InvalidRequest,
    Reason.UNAUTHENTICATED: Unauthenticated,
    Reason.NO_WORKER: Unavailable,
    Reason.QUEUE_FULL: Unavailable,
    Reason.RATE_LIMITED: Unavailable,
    Reason.DRAINING: Unavailable,
    Reason.WORKER_LOST: Unavailable,
    Reason.DEADLINE_PASSED: DeadlineExceeded,
    Reason.CANCELLED: Cancelled,
    Reason.INTERNAL: ServerError,
}


def may_be_tls(error: FleetError) -> bool:
    """Return True if an error says only that a connection failed, so that TLS may be the cause."""
    return isinstance(error, Unavailable) and error.reason is None and any(sign in error.message for sign in TLS_SIGNS)


def add_tls_cause(error: FleetError, cause: str) -> None:
    """Add the result of a TLS diagnosis to an error, and to its message unless the result is empty."""
    error.tls_cause = cause
    if cause:
        error.message = f"{cause} ({error.message})"
        error.args = (error.message,)


def error_of(call: grpc.RpcError) -> FleetError:
    """Translate the error of a failed gRPC call into a `FleetError`."""
    assert isinstance(call, (grpc.Call, grpc.aio.AioRpcError)), call
    message = call.details() or call.code().name
    if call.code() is grpc.StatusCode.UNIMPLEMENTED and message == NO_METHOD:
        message = NO_CLIENTS_PORT
    detail = _detail(call)
    reason = _REASON_VALUES.get(detail.reason)
    kind = _CODES.get(call.code(), ServerError) if reason is None else _REASONS[reason]
    error: FleetError
    if issubclass(kind, InvalidRequest):
        error = kind(message, reason, field=detail.field)
    elif issubclass(kind, Unavailable):
        seconds = detail.retry_after_ms / 1000 if detail.retry_after_ms else None
        error = kind(message, reason, retry_after_seconds=seconds)
    else:
        error = kind(message, reason)
    error.cause = detail.cause
    return error


_REASON_VALUES: Mapping[str, Reason] = {reason.value: reason for reason in Reason}


def _detail(call: "grpc.Call | grpc.aio.AioRpcError") -> pb.ErrorDetail:
    """Return the message with details that Fleet's server adds to an error; empty if the error has none."""
    found = pb.ErrorDetail()
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            for detail in status_pb2.Status.FromString(value).details:
                detail.Unpack(found)  # does nothing if the detail has another type
    return found
