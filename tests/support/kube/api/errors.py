"""Errors of the API server for tests, with the texts and the structure of kube-apiserver's `Status` objects."""

from typing import Literal

import msgspec

from tests.support.kube.api.values import Json, Object


class ErrorCause(msgspec.Struct, frozen=True):
    """Describes one problem of an object that the server refuses."""

    reason: str
    message: str
    field: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def invalid_value(field: str, value: Json, text: str) -> ErrorCause:
    return ErrorCause("FieldValueInvalid", f"Invalid value: {brief(value)}: {text}", field)


def required(field: str, text: str = "") -> ErrorCause:
    return ErrorCause("FieldValueRequired", "Required value" + (f": {text}" if text else ""), field)


def not_supported(field: str, value: Json, allowed: list[Json]) -> ErrorCause:
    listed = ", ".join(brief(each) for each in allowed)
    return ErrorCause("FieldValueNotSupported", f"Unsupported value: {brief(value)}: supported values: {listed}", field)


def duplicate(field: str, value: Json) -> ErrorCause:
    return ErrorCause("FieldValueDuplicate", f"Duplicate value: {brief(value)}", field)


def forbidden_field(field: str, text: str) -> ErrorCause:
    return ErrorCause("FieldValueForbidden", f"Forbidden: {text}", field)


def too_long(field: str, limit: int) -> ErrorCause:
    return ErrorCause("FieldValueTooLong", f"Too long: may not be more than {limit} bytes", field)


def too_many(field: str, count: int, limit: int) -> ErrorCause:
    return ErrorCause("FieldValueTooMany", f"Too many: {count}: must have at most {limit} items", field)


def brief(value: Json) -> str:
    return msgspec.json.encode(value).decode()


Reason = Literal[
    "AlreadyExists",
    "BadRequest",
    "Conflict",
    "Expired",
    "Forbidden",
    "InternalError",
    "Invalid",
    "MethodNotAllowed",
    "NotAcceptable",
    "NotFound",
    "TooManyRequests",
    "Unauthorized",
    "UnsupportedMediaType",
    "",
]
"""The reasons of a `Status`; empty for errors for which kube-apiserver gives no reason."""

CODES: dict[Reason, int] = {
    "AlreadyExists": 409,
    "BadRequest": 400,
    "Conflict": 409,
    "Expired": 410,
    "Forbidden": 403,
    "InternalError": 500,
    "Invalid": 422,
    "MethodNotAllowed": 405,
    "NotAcceptable": 406,
    "NotFound": 404,
    "TooManyRequests": 429,
    "Unauthorized": 401,
    "UnsupportedMediaType": 415,
    "": 500,
}


class ApiError(Exception):
    """The server refuses a request, and answers with a `Status` that has an error code."""

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        code: int | None = None,
        details: Object | None = None,
        retry_after_seconds: int | None = None,
    ):
        super().__init__(message)
        self.reason = reason
        self.code = CODES[reason] if code is None else code
        self.details = dict(details or {})
        self.retry_after_seconds = retry_after_seconds
        if retry_after_seconds is not None:
            self.details["retryAfterSeconds"] = retry_after_seconds

    def status(self) -> Object:
        answer: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
        }
        if self.reason:
            answer["reason"] = self.reason
        if self.details:
            answer["details"] = self.details
        return answer | {"code": self.code}


def not_found(group: str, plural: str, name: str) -> ApiError:
    where = f"{plural}.{group}" if group else plural
    return ApiError("NotFound", f'{where} "{name}" not found', details=_details(group, plural, name))


def already_exists(group: str, plural: str, name: str) -> ApiError:
    where = f"{plural}.{group}" if group else plural
    return ApiError("AlreadyExists", f'{where} "{name}" already exists', details=_details(group, plural, name))


def conflict(group: str, plural: str, name: str, why: str) -> ApiError:
    where = f"{plural}.{group}" if group else plural
    message = f'Operation cannot be fulfilled on {where} "{name}": {why}'
    return ApiError("Conflict", message, details=_details(group, plural, name))


def stale(group: str, plural: str, name: str) -> ApiError:
    return conflict(
        group,
        plural,
        name,
        "the object has been modified; please apply your changes to the latest version and try again",
    )


def forbidden(group: str, plural: str, name: str, why: str) -> ApiError:
    where = f"{plural}.{group}" if group else plural
    named = f'{where} "{name}"' if name else where
    return ApiError("Forbidden", f"{named} is forbidden: {why}", details=_details(group, plural, name))


def denied(group: str, plural: str, name: str, words: str) -> ApiError:
    """Return the error of a ValidatingAdmissionPolicy. As in Kubernetes, its text says "forbidden", but its reason is Invalid."""
    where = f"{plural}.{group}" if group else plural
    details = _details(group, plural, name) | {"causes": [{"message": words}]}
    return ApiError("Invalid", f'{where} "{name}" is forbidden: {words}', details=details)


def invalid(group: str, kind: str, name: str, causes: list[ErrorCause]) -> ApiError:
    where = f"{kind}.{group}" if group else kind
    text = str(causes[0]) if len(causes) == 1 else "[" + ", ".join(str(each) for each in causes) + "]"
    details = _details(group, kind, name) | {"causes": [msgspec.to_builtins(each) for each in causes]}
    return ApiError("Invalid", f'{where} "{name}" is invalid: {text}', details=details)


def no_such_path() -> ApiError:
    return ApiError("NotFound", "the server could not find the requested resource", details={})


def expired(asked: int, oldest: int) -> ApiError:
    return ApiError("Expired", f"too old resource version: {asked} ({oldest})")


def _details(group: str, kind: str, name: str) -> Object:
    return {"name": name, **({"group": group} if group else {}), "kind": kind}
