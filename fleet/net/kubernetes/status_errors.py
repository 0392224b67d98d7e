"""What an API server's no means, and what of it may be repeated. Pure.

Servers quote what they refuse, and that may be a password in an environment variable. So nothing of a message is passed on but the field, what is
required of it, and, of what is forbidden, the quota or the right that was not enough.
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
# What a server may say after the value that it refuses: requirements, without a quotation.
REQUIREMENT = re.compile(r": ((?:must|may|should|cannot|can not|is|field is|supported values)\b[^\"'{}\[\]]*)$")
# What it forbids in its own words, which name no field's value.
FORBIDDEN = re.compile(r"(exceeded quota: .*|User \"[^\"]*\" cannot .*)$")

# What could not be read at all has no causes: the first field that is named, and of which type it has to be.
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
    """How a server says no."""

    reason: str = ""
    message: str = ""
    code: int = 0
    details: StatusDetails | None = None


def refuse(status: ApiStatus, after_seconds: float | None = None) -> NoReturn:
    """Say what a status means for whoever asked.

    Raises:
        ClusterError: That.
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
    """What may be repeated of a refusal: the fields, what is required of them, and which quota or right was not enough."""
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
