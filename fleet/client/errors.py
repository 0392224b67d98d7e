"""Client errors, grouped by what the caller can do: correct the request, retry, or give up.

The client itself retries only with `resume_seconds` (`fleet.client.resumption`).
"""

from collections.abc import Mapping

import grpc
from google.rpc import status_pb2

from fleet.core.errors import Reason
from fleet.v1 import inference_pb2 as pb

NO_CLIENTS_PORT = "that is an address of another part of the cluster, such as a control address, and serves no clients"
NO_METHOD = "Method not found!"  # message of gRPC's own servers, which serve all ports except the port for clients

DETAILS_KEY = "grpc-status-details-bin"  # key of gRPC's metadata with a google.rpc.Status


class FleetError(Exception):
    """A call that failed.

    Attributes:
        message: One sentence for a person.
        reason: The server's machine-readable reason; None if the server gave none or was not reached.
        cause: Detailed code of a failed placement (`RejectionCause` of the router); empty for other reasons.
    """

    def __init__(self, message: str, reason: Reason | None = None):
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.cause = ""


class InvalidRequest(FleetError):
    """The request is wrong; the same request will fail again.

    Attributes:
        field: Path of the wrong field, such as ``sampling.temperature``; empty if no field is wrong.
    """

    def __init__(self, message: str, reason: Reason | None = None, *, field: str = ""):
        super().__init__(message, reason)
        self.field = field


class ModelNotFound(InvalidRequest):
    """The model is not served; `Client.models` lists those that are."""


class RequestNotFound(InvalidRequest):
    """The router does not remember a request with this id."""


class Unauthenticated(InvalidRequest):
    """The cluster has tenants, and this client has no valid API key."""


class TooLarge(InvalidRequest):
    """The message is larger than the server accepts."""


class Unavailable(FleetError):
    """The request is valid, and a retry may succeed.

    After the first delta, a retry loses the tokens that have arrived. A client with `resume_seconds` has already tried to
    continue the answer.

    Attributes:
        retry_after_seconds: Time to wait; None if the server gave none.
    """

    def __init__(self, message: str, reason: Reason | None = None, *, retry_after_seconds: float | None = None):
        super().__init__(message, reason)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(FleetError):
    """The answer was not complete in time."""


class Cancelled(FleetError):
    """The call was cancelled, normally by this side."""


class ServerError(FleetError):
    """The server has a bug, or this client does not understand it."""


# For errors without a reason, from another kind of server or because no server was reached.
_CODES: Mapping[grpc.StatusCode, type[FleetError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,  # the library's own error for a message that exceeds its limit
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


def error_of(call: grpc.RpcError) -> FleetError:
    """Translate a failed gRPC call."""
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
    """Return the server's detail; empty if there is none."""
    found = pb.ErrorDetail()
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            for detail in status_pb2.Status.FromString(value).details:
                detail.Unpack(found)  # does nothing if the detail has another type
    return found
