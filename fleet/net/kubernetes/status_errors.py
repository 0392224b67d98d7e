"""Status errors: what an API server's error status means, and which part of its text may be repeated.

Rules:

1. Servers quote the values that they refuse, and a value may be a password in an environment variable. Therefore only
   parts of a message are passed on: the field and its requirement.
2. The text of messages of admission control is passed on, up to `MOST_CHARACTERS`. A quota, a limit range, a policy or
   a webhook writes this text for the user whose object is refused.
3. A server-side apply with a field of a wrong name or type is answered with 500 and without a reason, because the server
   does not translate the errors of structured-merge-diff. Such an answer is a refusal, and not a failure of the server.
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
MOST_CHARACTERS = 600
"""Length in characters at which messages of admission control are cut."""

# Matches the requirement that follows a refused value, unless the requirement quotes something, which may be secret.
REQUIREMENT = re.compile(r": ((?:must|may|should|cannot|can not|is|field is|supported values)\b[^\"'{}\[\]]*)$")
# Matches messages of admission control or of authorization, which contain no field's value.
FORBIDDEN = re.compile(r" is forbidden: (.+)$", re.DOTALL)
DENIED = re.compile(
    r"((?:ValidatingAdmissionPolicy '|admission webhook \")[^'\"]+['\"].* denied (?:the )?request.*)$", re.DOTALL
)
RIGHT = re.compile(r'User "[^"]*" cannot ')

# An error about an object that cannot be decoded has no causes: this matches the first named field and its required type.
FIELD = re.compile(
    r"(?<![\w.])\.?((?:spec|metadata)(?:\.\w+|\[\d+\]|\[name=\"[-a-z0-9]+\"\])+): "
    r"(?:.*?(expected [a-z ()]+, got [a-z]+|must be of type [a-z]+))?"
)


# Matches the error of a server-side apply whose object does not fit the schema (`sigs.k8s.io/structured-merge-diff`).
UNTYPED = re.compile(
    r"failed to (?:create typed patch object|convert new (?:typed )?object) \(.*?, Kind=\w+\)[^:]*: (.*)", re.DOTALL
)
_TEXT = r'"(?:[^"\\]|\\.)*"'
_VALUE = rf"(?:{_TEXT}|-?[0-9.]+|true|false)"
_KEYS = rf"\[\w+={_VALUE}(?:,\w+={_VALUE})*\]"
MISFIT = re.compile(
    rf"\s*(?P<path>(?:\.[-\w/]+|\[\d+\]|\[={_VALUE}\]|{_KEYS})+): "
    r"(?P<text>field not declared in schema|expected [a-z]+(?: \([a-z ]+\))?|duplicate entries for key|element \d+)"
    rf"(?P<key> {_KEYS}|: associative list with keys has an element that omits key field \"\w+\")?"
)
QUANTITY = re.compile(
    r"quantities must match the regular expression|unable to parse (?:numeric part of quantity|quantity's suffix)"
)
BAD_QUANTITY = "a quantity must be a number with a suffix such as m, k, M, Gi"
BAD_VALUE = "a field has a wrong name or type"
"""The message that is passed on if the server does not name the field."""

# Matches one key and its value in a path that `MISFIT` has found; a path names an element of a list by such keys.
KEY = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|[^,\]]+)')
# Matches a `KEY` whose value may be passed on, because it can only be a name, a number or a path.
PLAIN_KEY = re.compile(r'name="[A-Za-z_][-.\w]{0,252}"|mountPath="/[-./\w]*"|protocol="[A-Z]{1,8}"|\w+=-?\d+')


class StatusCause(Struct, frozen=True):
    field: str = ""
    reason: str = ""
    message: str = ""


class StatusDetails(Struct, frozen=True):
    causes: list[StatusCause] | None = None


class ApiStatus(Struct, frozen=True):
    """Error status in an API server's answer."""

    reason: str = ""
    message: str = ""
    code: int = 0
    details: StatusDetails | None = None


def refuse(status: ApiStatus, after_seconds: float | None = None) -> NoReturn:
    """Raise the exception that corresponds to an error status.

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
        case 500 if UNTYPED.match(status.message):
            raise RequestDenied("Invalid", public_message(status))
    raise ApiServerUnreachable(f"status {status.code} {status.reason}".strip())


def lacks_right(message: str) -> bool:
    """Return whether a result of `public_message`, or a text that contains it, says that a caller lacks a right."""
    return RIGHT.search(message) is not None


def public_message(status: ApiStatus) -> str:
    """Return the parts of an error that may be shown: fields with their requirements, or admission control's message."""
    if untyped := UNTYPED.match(status.message):
        return _misfits(untyped[1])
    if denied := DENIED.search(status.message):
        return _cut(denied[1])
    said = []
    for cause in (status.details.causes if status.details else None) or ():
        requirement = REQUIREMENT.search(" ".join(cause.message.split()))
        said.append(f"{cause.field or 'object'}: {requirement[1] if requirement else cause.reason}")
    if said:
        return "; ".join(said[:MOST_CAUSES])
    if words := admission_words(status.message):
        return words
    if field := FIELD.search(" ".join(status.message.split())):
        return f"{field[1]}: {field[2] or status.reason}"
    return status.reason


def admission_words(message: str) -> str:
    """Return the message of admission control within an error's message; empty: the error has another cause."""
    found = DENIED.search(message) or FORBIDDEN.search(message)
    return _cut(found[1]) if found else ""


def _misfits(text: str) -> str:
    """Return the fields that do not fit the schema, each with the expected type."""
    if QUANTITY.search(text):
        return BAD_QUANTITY
    said = []
    for line in text.removeprefix("errors:").splitlines():
        if (found := MISFIT.match(line)) is not None:
            path, key = (KEY.sub(_plain, each or "") for each in (found["path"], found["key"]))
            said.append(f"{path.removeprefix('.')}: {found['text']}{key}")
    return "; ".join(said[:MOST_CAUSES]) or BAD_VALUE


def _plain(key: re.Match[str]) -> str:
    return key[0] if PLAIN_KEY.fullmatch(key[0]) else f"{key[1]}=..."


def _cut(words: str) -> str:
    return " ".join(words.split())[:MOST_CHARACTERS]
