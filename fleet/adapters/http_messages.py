"""What passes over an HTTP connection, and its limits."""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated

from msgspec import Meta, Struct

PositiveInt = Annotated[int, Meta(ge=1)]
PositiveSeconds = Annotated[float, Meta(gt=0)]

ORDINARY_BODY_BYTES = 64 << 10

MAX_KNOWN_HEADS = 1024
MAX_KNOWN_BYTES = 1024  # of one: some 300 are usual; more than a MiB is never held

_PHRASES = {int(status): status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}


class HttpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_connections: PositiveInt = 4096
    """More are answered with 503 and closed; each costs about 20 KiB."""

    max_head_bytes: PositiveInt = 32 << 10
    """Request line and headers."""

    max_body_bytes: PositiveInt = 8 << 20
    """Of a request: two million tokens as ids."""

    max_held_bytes: PositiveInt = 1 << 30
    """Of the bodies of all connections together, from the first byte to the end of the answer. Beyond that long ones are answered
    with 503; ordinary ones, up to `ORDINARY_BODY_BYTES`, are always taken."""

    head_timeout_seconds: PositiveSeconds = 10.0
    """From the first byte of a request to the end of its headers."""

    body_timeout_seconds: PositiveSeconds = 30.0
    """From the end of the headers to the end of the body."""

    idle_timeout_seconds: PositiveSeconds = 75.0
    """Between two requests of a connection (as nginx has it, so that proxies reuse connections)."""

    write_timeout_seconds: PositiveSeconds = 30.0
    """A client that reads nothing for so long, while there is something to read, is cut off."""


class HttpHead(Struct, kw_only=True):
    """What comes before a body. One object serves all requests whose heads are the same bytes."""

    method: str
    path: str  # without the query
    headers: Mapping[bytes, bytes]  # names in lower case
    keep_alive: bool
    chunked_answer: bool  # whether the client understands chunks; HTTP/1.0 does not
    passed_on: bytes | None = None  # what a relay makes of the headers, once it has


class HttpRequest(Struct, frozen=True):
    head: HttpHead
    body: bytes

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        return self.head.headers


class KnownHeads:
    """Heads that were parsed before, with the length of the body, by their exact bytes.

    Clients that keep their connections send the same head again and again, and finding it costs a tenth of parsing it.
    Bounded: a few clients whose heads are never the same push the others out for a moment, and nothing else.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[HttpHead, int]] = {}
        self.get = self._known.get

    def add(self, content: bytes, head: HttpHead, body_bytes: int) -> None:
        if len(content) > MAX_KNOWN_BYTES:
            return
        if len(self._known) >= MAX_KNOWN_HEADS:
            self._known.clear()
        self._known[content] = (head, body_bytes)


class HeldBodies:
    """What the bodies of all connections take together."""

    def __init__(self) -> None:
        self.bytes = 0


class Malformed(Struct, frozen=True):
    """What came instead of a request."""

    status: HTTPStatus
    message: str


class ClientGone(Exception):
    """The connection is closed, or was cut because its client does not read."""


def response_head(
    status: HTTPStatus | int,
    content_type: str,
    content_length: int | None,
    *,
    close: bool,
    chunked: bool = False,
    headers: Sequence[tuple[str, str]] = (),
) -> bytes:
    """Status line and headers of an answer."""
    lines = [f"HTTP/1.1 {int(status)} {_PHRASES[status]}", f"content-type: {content_type}"]
    if content_length is not None:
        lines.append(f"content-length: {content_length}")
    if chunked:
        lines.append("transfer-encoding: chunked")
    if close:
        lines.append("connection: close")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")
