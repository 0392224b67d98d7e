"""Errors: the reasons why a request is not served, grouped by what the caller can do.

A `Reason` is the error code in gRPC and HTTP answers, the outcome label in metrics, and the code in a worker's rejections.
Only `fleet.net.status_codes` translates it for clients.
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec.inspect import Type

CHECKOUT = Path(__file__).resolve().parents[2]
"""Folder of the package; it has a Makefile if Fleet runs from a checkout."""

INVALID_VALUE = "Invalid enum value"  # beginning of msgspec's message about a wrong enumeration value

_STEP = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")


class Reason(StrEnum):
    """Public and stable code that says why a request was not served."""

    # The request is wrong; sending it again cannot help.
    INVALID_ARGUMENT = "invalid_argument"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_NOT_FOUND = "request_not_found"  # the request that a call asks about is unknown
    TOO_LARGE = "too_large"
    KV_MISMATCH = "kv_mismatch"  # the prefill and the decode worker do not agree on the KV layout
    UNAUTHENTICATED = "unauthenticated"  # the API key is missing or unknown
    # Nothing is wrong with the request; a retry may succeed.
    NO_WORKER = "no_worker"  # no worker serves the model now
    QUEUE_FULL = "queue_full"  # the request never entered the queue, or made room for another one
    RATE_LIMITED = "rate_limited"  # the tenant has used up its requests or tokens per minute
    DRAINING = "draining"  # this process is stopping; another one can serve the request
    WORKER_LOST = "worker_lost"  # the worker died while the request ran; the router retries while that is safe
    # The client does not wait for the answer any more.
    DEADLINE_PASSED = "deadline_passed"
    CANCELLED = "cancelled"
    # A bug; the log has the details.
    INTERNAL = "internal"


class RequestRejected(Exception):
    """A request that was not served, or not completely.

    Attributes:
        reason: The public code, which says what the caller can do.
        message: One sentence for a person. It says what to do next, if anything can be done.
        field: Path of the wrong field as the client wrote it, such as ``sampling.temperature``; empty if no field is
            wrong.
        retry_after_ms: Time after which a retry may succeed; 0 when unknown or pointless.
        cause: Detailed code of a failed placement (`RejectionCause` of the router); empty for other reasons.
    """

    def __init__(self, reason: Reason, message: str, *, field: str = "", retry_after_ms: int = 0, cause: str = ""):
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.cause = cause


def invalid(field: str, message: str) -> RequestRejected:
    """Return the rejection of a request whose `field` is wrong."""
    return RequestRejected(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field)


def internal_error() -> RequestRejected:
    """Return the rejection for a bug of Fleet; the log has the details."""
    return RequestRejected(Reason.INTERNAL, "internal error; the router's log has the details")


def draining_rejection() -> RequestRejected:
    """Return the rejection of a router that takes no more requests."""
    return RequestRejected(Reason.DRAINING, "this router is shutting down", retry_after_ms=1000)


def split_validation_error(error: Exception) -> tuple[str, str]:
    """Split a `msgspec.ValidationError` into its cause and the path of the wrong value.

    The path looks like ``.pools[0].gpu``. It is empty if the whole value is wrong.
    """
    cause, _, where = str(error).partition(" - at `")
    of_key = where.removeprefix("key` in `")  # a dictionary key is wrong, not the value under it
    return cause if of_key == where else f"its keys: {cause}", of_key.removesuffix("`").removeprefix("$")


def with_allowed_values(cause: str, kind: Any, path: str) -> str:
    """Return the cause of a validation error; for a wrong enumeration value, the allowed values are added.

    Args:
        cause: The cause that `split_validation_error` returned.
        kind: The type that was decoded.
        path: The path of the wrong value in that type, such as ``.pools[0].role``.
    """
    if not cause.startswith(INVALID_VALUE):
        return cause
    allowed = allowed_values(kind, path)
    return f"{cause}; use {_in_words(allowed)}" if allowed else cause


def allowed_values(kind: Any, path: str) -> list[str]:
    """Return the values of the enumerations at a path of a type; empty if there are none."""
    from msgspec import inspect  # noqa: PLC0415 - lazy, because the help of commands must load no library

    places = [inspect.type_info(kind)]
    for name, _ in _STEP.findall(path):
        places = [inner for place in places for inner in _inside(place, name)]
    values = [str(value) for place in places for value in _values(place)]
    return list(dict.fromkeys(values))


def _inside(place: "Type", name: str) -> "Iterator[Type]":
    """Yield the types of the field `name`, or the types of the elements if `name` is empty."""
    from msgspec import inspect  # noqa: PLC0415 - lazy, because the help of commands must load no library

    match place:
        case inspect.StructType(fields=fields) if name:
            yield from (field.type for field in fields if field.encode_name == name)
        case inspect.UnionType(types=types):
            for each in types:
                yield from _inside(each, name)
        case inspect.Metadata(type=inner):
            yield from _inside(inner, name)
        case inspect.DictType(value_type=inner):
            yield inner
        case (
            inspect.ListType(item_type=inner)
            | inspect.VarTupleType(item_type=inner)
            | inspect.SetType(item_type=inner)
            | inspect.FrozenSetType(item_type=inner)
        ):
            yield inner
        case inspect.TupleType(item_types=types):
            yield from types
        case _:
            pass


def _values(place: "Type") -> Iterator[object]:
    from msgspec import inspect  # noqa: PLC0415 - lazy, because the help of commands must load no library

    match place:
        case inspect.EnumType(cls=kind):
            yield from (each.value for each in kind)
        case inspect.LiteralType(values=values):
            yield from values
        case inspect.UnionType(types=types):
            for each in types:
                yield from _values(each)
        case inspect.Metadata(type=inner):
            yield from _values(inner)
        case _:
            pass


def _in_words(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


class ConfigurationRefused(Exception):
    """A configuration that cannot be used. The message names file, path and cause; commands exit with status 3."""


def missing_package(field: str, package: str, extra: str) -> ConfigurationRefused:
    """Return the refusal of a setting that needs an optional package."""
    return ConfigurationRefused(f"{field}: needs the package {package}: pip install 'fleet-serving[{extra}]'")


def install_command(extra: str) -> str:
    """Return the command that installs an extra: ``make install`` in a checkout, and pip elsewhere."""
    return "make install" if (CHECKOUT / "Makefile").is_file() else f"pip install 'fleet-serving[{extra}]'"
