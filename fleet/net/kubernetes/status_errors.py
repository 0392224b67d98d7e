"""Status errors: what an API server's error status means, and which part of its text may be repeated. Pure.

Servers quote the values that they refuse, and a value may be a password in an environment variable. So only parts of a
message are passed on: the field, its requirement, and for a forbidden request the quota or the missing right.
"""

import re
from typing import NoReturn

from msgspec import Struct

from fleet.net.kubernetes.ports import (
    ApiServerBusy,
    ApiServerUnreachable,
    ObjectConflict,
    ObjectMissing,
    RequestDenied,
    VersionExpired,
)

MOST_CAUSES = 8
# The requirement after a refused value, without any quotation.
REQUIREMENT = re.compile(r": ((?:must|may|should|cannot|can not|is|field is|supported values)\b[^\"'{}\[\]]*)$")
# The server's own words for a forbidden request, which contain no field's value.
FORBIDDEN = re.compile(r"(exceeded quota: .*|User \"[^\"]*\" cannot .*)$")

# An object that could not be decoded has no causes: take the first named field, and its required type.
FIELD = re.compile(
    r"(?<![\w.])\.?((?:spec|metadata)(?:\.\w+|\[\d+\]|\[name=\"[-a-z0-9]+\"\])+): "
    r"(?:.*?(expected [a-z ()]+, got [a-z]+|must be of type [a-z]+))?"
)


class StatusCause(Struct, frozen=True):
    field: str = ""
    reason: str = ""
    message: str = ""


class StatusDetails(Struct, frozen=True):
    causes: list[StatusCause] | None = None


class ApiStatus(Struct, frozen=True):
    """The error status of an API server."""

    reason: str = ""
    message: str = ""
    code: int = 0
    details: StatusDetails | None = None


def refuse(status: ApiStatus, after_seconds: float | None = None) -> NoReturn:
    """Raise the error that a status means for the caller.

    Raises:
        KubernetesError: Always; its subclass depends on the status.
    """
    match status.code:
        case 404:
            raise ObjectMissing(status.reason or "NotFound")
        case 409 if status.reason != "AlreadyExists":
            raise ObjectConflict(status.reason or "Conflict")
        case 410:
            raise VersionExpired(status.reason or "Expired")
        case 429:
            raise ApiServerBusy("too many requests", after_seconds)
        case 400 | 403 | 405 | 409 | 413 | 415 | 422:
            raise RequestDenied(status.reason or str(status.code), public_message(status))
        case 503 if after_seconds is not None:
            raise ApiServerBusy("the server is not ready", after_seconds)
    raise ApiServerUnreachable(f"status {status.code} {status.reason}".strip())


def public_message(status: ApiStatus) -> str:
    """Return what may be repeated of an error: the fields, their requirements, and the missing quota or right."""
    said = []
    for cause in (status.details.causes if status.details else None) or ():
        requirement = REQUIREMENT.search(" ".join(cause.message.split()))
        said.append(f"{cause.field or 'object'}: {requirement[1] if requirement else cause.reason}")
    if said:
        return "; ".join(said[:MOST_CAUSES])
    if forbidden := FORBIDDEN.search(" ".join(status.message.split())):
        return forbidden[1]
    if field := FIELD.search(" ".join(status.message.split())):
        return f"{field[1]}: {field[2] or status.reason}"
    return status.reason
