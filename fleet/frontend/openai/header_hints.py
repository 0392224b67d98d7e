"""Hints in headers: what clients without the object ``fleet`` say about a request, under Fleet's and other projects' names.

Rules:

1. A field of the object ``fleet`` counts before a header, and of several headers the first one in `HINT_HEADERS`.
2. A value that cannot be used is refused with the name of its header. An unusable `x-request-id` is ignored, because proxies send it.
3. Higher priorities run earlier. In vLLM's header lower ones do.
"""

import uuid
from collections.abc import Callable, Mapping

from msgspec import Struct, structs

from fleet.core.errors import RequestRejected, invalid
from fleet.core.ids import RequestId
from fleet.core.validation import MAX_EXPECTED_TOKENS, MAX_HINT_CHARACTERS, MAX_PRIORITY, REQUEST_ID
from fleet.frontend.openai.bodies import FleetOptions
from fleet.frontend.openai.resumable_stream import LAST_EVENT_ID

MAX_TIMEOUT_MS = 2**32 - 1


class HintHeader(Struct, frozen=True):
    """A header that stands for a field of `FleetOptions`."""

    field: str
    project: str  # that its name comes from
    sign: int = 1  # of a number
    least: int | None = None  # of a number; None: the value is a text
    most: int = 0


HINT_HEADERS: Mapping[bytes, HintHeader] = {
    b"x-fleet-session": HintHeader("session", "Fleet"),
    b"x-session-id": HintHeader("session", "vLLM, llm-d, Ray Serve"),
    b"x-dynamo-session-id": HintHeader("session", "Dynamo"),
    b"x-smg-routing-key": HintHeader("session", "SGLang Model Gateway"),
    b"x-session-affinity": HintHeader("session", "agents"),
    b"x-fleet-priority": HintHeader("priority", "Fleet", 1, -MAX_PRIORITY, MAX_PRIORITY),
    b"x-vllm-priority": HintHeader("priority", "vLLM", -1, -MAX_PRIORITY, MAX_PRIORITY),
    b"x-fleet-timeout-ms": HintHeader("timeout_ms", "Fleet", 1, 1, MAX_TIMEOUT_MS),
    b"x-envoy-expected-rq-timeout-ms": HintHeader("timeout_ms", "Envoy", 1, 1, MAX_TIMEOUT_MS),
    b"x-fleet-expected-tokens": HintHeader("expected_tokens", "Fleet", 1, 0, MAX_EXPECTED_TOKENS),
    b"x-fleet-tenant": HintHeader("tenant", "Fleet"),
    b"x-fleet-resumable": HintHeader("resumable", "Fleet", 1, 0, 1),
}
"""Headers by name in lower case; where two stand for one field, the first one counts."""

NAMES = frozenset(HINT_HEADERS) | {LAST_EVENT_ID}
_DEFAULTS = FleetOptions()
REQUEST_ID_HEADER = b"x-request-id"


def header_hints(headers: Mapping[bytes, bytes], options: FleetOptions | None) -> FleetOptions:
    """Return the options of a request, completed by headers.

    Call it only if one of `NAMES` is among the headers.

    Args:
        headers: By name in lower case.
        options: The object ``fleet`` of the body; None: there is none.

    Raises:
        RequestRejected: INVALID_ARGUMENT, with the header's name.
    """
    given = options or _DEFAULTS
    found = {field: _read(name, HINT_HEADERS[name], headers[name]) for field, name in _used(headers, given).items()}
    return structs.replace(given, **found) if found else given


def hint_names(headers: Mapping[bytes, bytes], options: FleetOptions | None) -> dict[str, str]:
    """Return the names of the headers that `header_hints` uses, by their fields in the public protocol."""
    return {field: name.decode() for field, name in _used(headers, options or _DEFAULTS).items()}


def _used(headers: Mapping[bytes, bytes], given: FleetOptions) -> dict[str, bytes]:
    used: dict[str, bytes] = {}
    for name, hint in HINT_HEADERS.items():
        if headers.get(name) and getattr(given, hint.field) == getattr(_DEFAULTS, hint.field):
            used.setdefault(hint.field, name)
    return used


def new_request_id(headers: Mapping[bytes, bytes], is_running: Callable[[RequestId], bool]) -> RequestId:
    """Return the client's id of a request, or a new one if there is none that can be used.

    The id of a running request is not used again, because proxies repeat requests.
    """
    if REQUEST_ID_HEADER in headers:
        chosen = RequestId(headers[REQUEST_ID_HEADER].decode("latin-1"))
        if REQUEST_ID.fullmatch(chosen) and not is_running(chosen):
            return chosen
    return RequestId(uuid.uuid4().hex)


def _read(name: bytes, hint: HintHeader, value: bytes) -> object:
    if hint.least is None:
        try:
            text = value.decode()
        except UnicodeDecodeError as error:
            raise _refused(name, "is not UTF-8") from error
        if len(text) > MAX_HINT_CHARACTERS:
            raise _refused(name, f"has {len(text)} characters, and {MAX_HINT_CHARACTERS} are allowed")
        return text
    try:
        number = int(value) if len(value) <= 20 else hint.most + 1
    except ValueError as error:
        raise _refused(name, "must be a whole number") from error
    if not hint.least <= number <= hint.most:
        raise _refused(name, f"must be from {hint.least} to {hint.most}")
    return hint.sign * number


def _refused(name: bytes, message: str) -> RequestRejected:
    return invalid(name.decode(), message)
