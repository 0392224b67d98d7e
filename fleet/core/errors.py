"""Every way a request can fail to be served, told apart by what the caller can do about it.

A `Reason` is at once the error code in gRPC and HTTP answers, the outcome in metrics, and what workers answer to the
router; the edges translate it (`fleet.net.status_codes`) and nothing else does.
"""

from enum import StrEnum


class Reason(StrEnum):
    """Why a request was not served. The value is public and stable."""

    # The request is wrong; sending it again cannot help.
    INVALID_ARGUMENT = "invalid_argument"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_NOT_FOUND = "request_not_found"  # that was asked about
    TOO_LARGE = "too_large"
    KV_MISMATCH = "kv_mismatch"  # prefill and decode side do not agree on the KV layout
    UNAUTHENTICATED = "unauthenticated"  # no API key, or one that is not known
    # Nothing is wrong with the request; a retry may succeed.
    NO_WORKER = "no_worker"  # nobody serves the model now
    QUEUE_FULL = "queue_full"  # never entered the queue, or had to make room there
    RATE_LIMITED = "rate_limited"  # the tenant has used up what it may have a minute
    DRAINING = "draining"  # this process is going away; another will serve it
    WORKER_LOST = "worker_lost"  # was running; retried by the router while that is safe
    # Nobody waits for the answer any more.
    DEADLINE_PASSED = "deadline_passed"
    CANCELLED = "cancelled"
    # A bug; the log has the details.
    INTERNAL = "internal"


class RequestRejected(Exception):
    """A request that was not, or not completely, served.

    Attributes:
        reason: What the caller can do about it.
        message: One sentence for a person, saying what to do next where something can be done.
        field: Path of the offending field as the client wrote it, as in ``sampling.temperature``; empty if none is.
        retry_after_ms: When a retry may succeed; 0 when unknown or pointless.
        cause: Why no worker could be chosen, finer than the reason: a `fleet.router.placement.rejection.RejectionCause`; empty if that is not why.
    """

    def __init__(self, reason: Reason, message: str, *, field: str = "", retry_after_ms: int = 0, cause: str = ""):
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.cause = cause


def invalid(field: str, message: str) -> RequestRejected:
    """The refusal of a request whose `field` is wrong."""
    return RequestRejected(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)


def internal_error() -> RequestRejected:
    """A bug of ours, which the log has."""
    return RequestRejected(Reason.INTERNAL, "internal error; the router's log has the details")


def draining_rejection() -> RequestRejected:
    """Of a router that takes no more requests."""
    return RequestRejected(Reason.DRAINING, "this router is shutting down", retry_after_ms=1000)


def split_validation_error(error: Exception) -> tuple[str, str]:
    """A `msgspec.ValidationError` in two parts: its cause, and the path at which its message ends.

    The path is as in ``.pools[0].gpu``, and empty where the whole value is wrong.
    """
    cause, _, where = str(error).partition(" - at `")
    of_key = where.removeprefix("key` in `")  # of a key in a dictionary, and not of what is under it
    return cause if of_key == where else f"its keys: {cause}", of_key.removesuffix("`").removeprefix("$")


class ConfigurationRefused(Exception):
    """A configuration that cannot be obeyed; the message names file, path and cause. The command exits 3."""
