"""Errors of calls, told apart by what the caller can do: correct the request, try again, or give up."""

from collections.abc import Mapping

import grpc
from google.rpc import status_pb2

from fleet.core.errors import Reason
from fleet.v1 import inference_pb2 as pb

NO_CLIENTS_PORT = "that is an address of another part of the cluster, such as a control address, and serves no clients"
NO_METHOD = "Method not found!"  # gRPC's own servers, which all parts but the clients' port use

DETAILS_KEY = "grpc-status-details-bin"  # where gRPC carries a google.rpc.Status


class FleetError(Exception):
    """A call that failed.

    Attributes:
        message: One sentence for a person.
        reason: The server's machine-readable reason; None when the server did not say, or was not reached.
        cause: Why no worker could be chosen, finer than the reason (`fleet.router.placement.rejection.RejectionCause`); empty if that is not why.
    """

    def __init__(self, message: str, reason: Reason | None = None):
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.cause = ""


class InvalidRequest(FleetError):
    """The request is wrong; the same request will fail again.

    Attributes:
        field: Path of what is wrong, as in ``sampling.temperature``; empty if no field is at fault.
    """

    def __init__(self, message: str, reason: Reason | None = None, *, field: str = ""):
        super().__init__(message, reason)
        self.field = field


class ModelNotFound(InvalidRequest):
    """No such model is served; `Client.models` lists those that are."""


class RequestNotFound(InvalidRequest):
    """Nothing is remembered of a request with this id."""


class Unauthenticated(InvalidRequest):
    """The cluster knows its tenants by API keys, and this client has shown none that it knows."""


class TooLarge(InvalidRequest):
    """The message is larger than the server takes."""


class Unavailable(FleetError):
    """Nothing is wrong with the request. Before its first delta, trying again is safe; after it, tokens are lost.

    Attributes:
        retry_after_seconds: When to try again; None when the server did not say.
    """

    def __init__(self, message: str, reason: Reason | None = None, *, retry_after_seconds: float | None = None):
        super().__init__(message, reason)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(FleetError):
    """The answer was not complete in time."""


class Cancelled(FleetError):
    """The call was cancelled, by this side as a rule."""


class ServerError(FleetError):
    """A bug of the server, or a server that this client does not understand."""


_CODES: Mapping[
    grpc.StatusCode, type[FleetError]
] = {  # where the server gave no reason: it is another, or was not reached
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,  # of the library: a message beyond its limit
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
    """The error that a failed call of gRPC stands for."""
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
    """The server's own detail; an empty one if there is none."""
    found = pb.ErrorDetail()
    for key, value in call.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            for detail in status_pb2.Status.FromString(value).details:
                detail.Unpack(found)  # does nothing for other types
    return found
