"""Errors: define the reasons why a request is not served, grouped by what the caller can do.

A `Reason` is the error code in gRPC and HTTP answers, the outcome label in metrics, and the code in a worker's rejections.
Only `fleet.net.status_codes` converts reasons to the status codes that clients get.
"""

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec.inspect import Type

    from fleet.core.requests import RateLimitStatus

CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder that contains the package `fleet`. It has a Makefile only if Fleet runs from a checkout of the
repository."""

INVALID_VALUE = "Invalid enum value"  # beginning of msgspec's message about a wrong enumeration value

_INVALID_TAG = "Invalid value "  # beginning of msgspec's message about a wrong tag of a union
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`")

_STEP = re.compile(r"\.([^.\[]+)|\[([^\]]*)\]")


class Reason(StrEnum):
    """Public and stable codes for the reasons why a request was not served."""

    # The request is wrong, so sending it again cannot help:
    INVALID_ARGUMENT = "invalid_argument"
    MODEL_NOT_FOUND = "model_not_found"
    REQUEST_NOT_FOUND = "request_not_found"  # a call names a request that the router does not know
    TOO_LARGE = "too_large"
    # A decode worker cannot use the blocks of a prefill worker, or the client demands a pair or a KV path that no two workers have.
    KV_MISMATCH = "kv_mismatch"
    UNAUTHENTICATED = "unauthenticated"  # the API key is missing or unknown
    # Nothing is wrong with the request, and a retry may succeed:
    NO_WORKER = "no_worker"  # no worker that may serve the request is available now
    # Too many requests wait: the queue is full, the predicted wait is too long, or the queue removed this request to take another one.
    QUEUE_FULL = "queue_full"
    RATE_LIMITED = "rate_limited"  # the tenant has used up its requests or tokens per minute
    DRAINING = "draining"  # this process is stopping; another one can serve the request
    # The worker was lost while it ran the request, and the router could not continue the request on another worker.
    WORKER_LOST = "worker_lost"
    # The client does not wait for the answer any more:
    DEADLINE_PASSED = "deadline_passed"
    CANCELLED = "cancelled"
    # Fleet or an engine has failed, and the log has the details:
    INTERNAL = "internal"


CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
"""Value of `RequestRejected.cause` if the prompt and the answer together are longer than the model's context. The OpenAI API uses the same
code for this error."""


class RequestRejected(Exception):
    """Error: a request was not served, or not completely.

    Attributes:
        reason: The public code, from which the caller knows how to react.
        message: One sentence for a person. It states what to do next, if anything can be done.
        field: Path of the wrong field, such as ``sampling.temperature``, in the names of the gRPC API. Frontends with other names translate
            it (`fleet.net.status_codes.rename_field`). Empty if no field is wrong.
        retry_after_ms: Milliseconds after which a retry may succeed, or 0 if this is unknown or a retry cannot succeed.
        cause: Detailed code: the router's `RejectionCause` if placement found no worker for the request, or `CONTEXT_LENGTH_EXCEEDED`;
            empty for other rejections.
        allowance: What is left of the tenant's rate limits; None if the limits were not checked, or the tenant has no
            limits.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        retry_after_ms: int = 0,
        cause: str = "",
        allowance: "RateLimitStatus | None" = None,
    ):
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_after_ms = retry_after_ms
        self.cause = cause
        self.allowance = allowance

    def with_allowance(self, allowance: "RateLimitStatus | None") -> "RequestRejected":
        """Return the same rejection with what is left of the tenant's rate limits; an allowance that the rejection already has is kept."""
        return RequestRejected(
            self.reason,
            self.message,
            field=self.field,
            retry_after_ms=self.retry_after_ms,
            cause=self.cause,
            allowance=self.allowance or allowance,
        )


def invalid(field: str, message: str, *, cause: str = "") -> RequestRejected:
    """Return the rejection of a request whose `field` is wrong."""
    return RequestRejected(Reason.INVALID_ARGUMENT, f"{field}: {message}", field=field, cause=cause)


def internal_error() -> RequestRejected:
    """Return the rejection of a request that fails because of an unexpected exception in Fleet; the caller logs the exception."""
    return RequestRejected(Reason.INTERNAL, "internal error; the router's log has the details")


def draining_rejection() -> RequestRejected:
    """Return the rejection of a request by a router that is stopping and takes no more requests."""
    return RequestRejected(Reason.DRAINING, "this router is shutting down", retry_after_ms=1000)


def split_validation_error(error: Exception) -> tuple[str, str]:
    """Split a `msgspec.ValidationError` into its cause and the path of the wrong value.

    The path looks like ``.pools[0].gpu``. It is empty if the whole value is wrong. If a key of an object is wrong, the
    path is that of the object, and the cause begins with "its keys: ".
    """
    cause, _, where = str(error).partition(" - at `")
    of_key = where.removeprefix("key` in `")  # msgspec writes this if the wrong value is a key
    return cause if of_key == where else f"its keys: {cause}", of_key.removesuffix("`").removeprefix("$")


def path_with_keys(error: Exception, raw: Any, kind: Any) -> str:
    """Return the path of `split_validation_error`, with the keys of tables in place of msgspec's ``[...]``.

    msgspec does not say which key of a table has the wrong value. So each table is converted again with one key at a time, until the same
    error comes. If none gives it, ``[...]`` stays.

    Args:
        error: The `msgspec.ValidationError`.
        raw: The value that was converted, of dictionaries and lists.
        kind: The type to which it was converted.
    """
    _, path = split_validation_error(error)
    shown, here = "", list[str | int]()
    for step in _STEP.finditer(path):
        name, index = step.groups()
        if name is None and index == "...":
            found = next((each for each in _with_single_keys(raw, here) if _fails(each[1], kind, str(error))), None)
            if found is None:
                return shown + path[step.start() :]
            name, raw = found
        shown += f".{name}" if name is not None else f"[{index}]"
        here.append(name if name is not None else int(index))
    return shown


def _with_single_keys(raw: Any, here: list[str | int]) -> Iterator[tuple[str, Any]]:
    """Yield each key of the table at a place in `raw`, with a copy of `raw` whose table has only this key."""
    if here:
        first, *rest = here
        for key, inner in _with_single_keys(raw[first], rest):
            copied: Any = dict(raw) if isinstance(raw, dict) else list(raw)
            copied[first] = inner
            yield key, copied
    elif isinstance(raw, dict):
        yield from ((str(key), {key: value}) for key, value in raw.items())


def _fails(raw: Any, kind: Any, message: str) -> bool:
    import msgspec  # noqa: PLC0415 - imported here, because the help of commands must load no library

    try:
        msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        return str(error) == message
    except ValueError:
        return False
    return False


def with_allowed_values(cause: str, kind: Any, path: str) -> str:
    """Return the cause of a validation error; if an enumeration value or a tag is wrong or missing, add the allowed values.

    A tag is the field that selects one Struct of a union, such as `kind`.

    Args:
        cause: The cause that `split_validation_error` returned.
        kind: The type that was decoded.
        path: The path of the wrong value in that type, such as ``.pools[0].role``.
    """
    if missing := _MISSING_FIELD.fullmatch(cause):
        path = f"{path}.{missing[1]}"
    elif not cause.startswith((INVALID_VALUE, _INVALID_TAG)):
        return cause
    allowed = allowed_values(kind, path)
    return f"{cause}; use {_in_words(allowed)}" if allowed else cause


def allowed_values(kind: Any, path: str) -> list[str]:
    """Return the values that an enumeration at `path` in a type allows; empty if there is no enumeration."""
    values = [str(value) for place in _places(kind, path) for value in _values(place)]
    return list(dict.fromkeys(values))


def known_fields(kind: Any, path: str) -> list[str]:
    """Return the names of the fields that an object at `path` in a type may have; empty if there is no object."""
    return list(dict.fromkeys(name for place in _places(kind, path) for name in _field_names(place)))


def _places(kind: Any, path: str) -> "list[Type]":
    """Return all types that the value at `path` in a type may have."""
    from msgspec import inspect  # noqa: PLC0415 - imported here, because the help of commands must load no library

    places = [inspect.type_info(kind)]
    for name, _ in _STEP.findall(path):
        places = [inner for place in places for inner in _inside(place, name)]
    return places


def _field_names(place: "Type") -> Iterator[str]:
    from msgspec import inspect  # noqa: PLC0415 - imported here, because the help of commands must load no library

    match place:
        case inspect.StructType(fields=fields):
            yield from (field.encode_name for field in fields)
        case inspect.UnionType(types=types):
            for each in types:
                yield from _field_names(each)
        case inspect.Metadata(type=inner):
            yield from _field_names(inner)
        case _:
            pass


def _inside(place: "Type", name: str) -> "Iterator[Type]":
    """Yield the types of the field `name` of an object; if `name` is empty, those of the elements of a list or the values of a dictionary."""
    from msgspec import inspect  # noqa: PLC0415 - imported here, because the help of commands must load no library

    match place:
        case inspect.StructType(tag_field=tag_field, tag=tag) if name and name == tag_field:
            yield inspect.LiteralType(values=(tag,))
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
    from msgspec import inspect  # noqa: PLC0415 - imported here, because the help of commands must load no library

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


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a question that proposes the known word most similar to `word`, or an empty text if none is similar."""
    return question(nearest(word, known))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most similar to `word`, or an empty text if none is similar."""
    from difflib import get_close_matches  # noqa: PLC0415 - imported here, because only errors need it

    return next(iter(get_close_matches(word, sorted(known), n=1)), "")


def question(proposed: str) -> str:
    """Return the text "; did you mean …?" for the end of an error message, or an empty text for an empty word."""
    return f"; did you mean {proposed!r}?" if proposed else ""


class ConfigurationRefused(Exception):
    """Error: a configuration cannot be used. The message names the wrong setting and the cause; commands exit with status 3."""


def missing_package(field: str, package: str, extra: str) -> ConfigurationRefused:
    """Return the error for a setting whose optional package is not installed; `extra` is the pip extra that installs it."""
    return ConfigurationRefused(f"{field}: needs the package {package}: pip install 'fleet-serving[{extra}]'")


def install_command(extra: str) -> str:
    """Return the command that installs a pip extra of Fleet: ``make install`` in a checkout, and otherwise pip."""
    return "make install" if (CHECKOUT / "Makefile").is_file() else f"pip install 'fleet-serving[{extra}]'"
