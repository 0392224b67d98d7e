"""HTTP/1.1 messages: request heads, bodies, response heads and malformed requests."""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from typing import Protocol

from msgspec import Struct

LARGE_CHUNK_BYTES = 4 << 10  # of a body; for larger chunks Python's overhead per object is small

MAX_CACHED_HEADS = 1024
MAX_CACHED_HEAD_BYTES = 1024  # of one head; 300 are usual, so the cache stays below a MiB
MAX_LENGTH_DIGITS = 12
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % MAX_LENGTH_DIGITS, re.IGNORECASE)

_PHRASES = {int(status): status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}


class HttpHead(Struct, kw_only=True):
    """Head of a request. One object serves all requests whose heads are equal apart from the length of the body."""

    method: str
    path: str  # without the query
    query: bytes = b""  # with its question mark; empty if there is none
    headers: Mapping[bytes, bytes]  # names in lower case
    keep_alive: bool
    chunked_answer: bool  # whether the client understands chunks; HTTP/1.0 does not
    forwarded_headers: bytes | None = None  # the headers that a relay forwards; None until it has computed them
    credentials: bytes = b""  # header lines that prove who the client is; computed together with the others


class ArrivingBody(Protocol):
    """A body that is read while it arrives; what waits to be read is bounded."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes:
        """Return the next piece.

        Raises:
            RequestRejected: The rest will not arrive, because the request is malformed or its client too slow.
        """
        ...


class HttpRequest(Struct, frozen=True):
    head: HttpHead
    body: bytes
    arriving: ArrivingBody | None = None
    """The body, or the bytes of another protocol, if they are read while they arrive; `body` is empty then."""

    @property
    def method(self) -> str:
        return self.head.method

    @property
    def path(self) -> str:
        return self.head.path

    @property
    def headers(self) -> Mapping[bytes, bytes]:
        return self.head.headers


class HeadCache:
    """Cache of parsed heads, by their exact bytes without the digits of the content length.

    Clients that keep their connections send the same head again and again, and a look-up costs a tenth of parsing. The
    cache is bounded: clients whose heads always differ only evict the others for a moment.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, HttpHead] = {}
        self._latest: tuple[bytes, bytes, HttpHead] | None = None  # last hit: bytes before and after the digits, head

    def find(self, content: bytes) -> tuple[HttpHead, int] | None:
        """Return a cached head and the content length of these bytes, up to the empty line; None if the head is unknown."""
        if self._latest is not None:
            before, behind, latest = self._latest
            if content.startswith(before) and content.endswith(behind):
                digits = content[len(before) : -len(behind)]
                if digits.isdigit() and len(digits) <= MAX_LENGTH_DIGITS:
                    return latest, int(digits)
        if not self._known or (length := _LENGTH.search(content)) is None:
            return None
        begin, end = length.span(1)
        before, behind = content[:begin], content[end:]
        if (head := self._known.get(before + behind)) is None:
            return None
        self._latest = before, behind, head
        return head, int(length[1])

    def add(self, content: bytes, head: HttpHead, body_bytes: int) -> None:
        """Add a head that the parser has accepted, with the content length that the parser found."""
        if len(content) > MAX_CACHED_HEAD_BYTES or (length := _LENGTH.search(content)) is None:
            return
        if int(length[1]) != body_bytes:
            return
        if len(self._known) >= MAX_CACHED_HEADS:
            self._known.clear()
        begin, end = length.span(1)
        self._known[content[:begin] + content[end:]] = head


class BodyBuffer:
    """Collects a body that arrives in chunks and joins it once, because each copy of a long prompt costs time.

    Small chunks are joined as they arrive, so they take no more memory than their bytes.
    """

    def __init__(self) -> None:
        self.size = 0
        self._pieces: list[bytes | bytearray | memoryview] = []

    def add(self, piece: bytes | memoryview) -> None:
        self.size += len(piece)
        pieces = self._pieces
        if len(piece) >= LARGE_CHUNK_BYTES:
            pieces.append(piece)
        elif pieces and isinstance(latest := pieces[-1], bytearray):
            latest += piece
        else:
            pieces.append(bytearray(piece))

    def whole(self) -> bytes:
        """Return the complete body."""
        return b"".join(self._pieces)


class HeldBodyBytes:
    """Counts the bytes of the bodies of all connections."""

    def __init__(self) -> None:
        self.bytes = 0


EVENT_STREAM = "text/event-stream; charset=utf-8"

BAD_REQUEST_LINE = (
    "the request line must be a method, a target without invalid characters, and the version HTTP/1.1 or HTTP/1.0"
)
"""Answer to a request line without a version, with another version, or with a target that the parser rejects.

One answer covers them: the parser reports a missing version as an invalid target if the bytes after the line came in
the same read.
"""

HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
"""Grammar of the Host field (RFC 9110, 7.2): a name or an address, and an optional port. Two fields, joined by a comma
and a space, do not match."""

_ABSOLUTE = re.compile(rb"https?://[^/]*", re.IGNORECASE)


def version_problem(version: str, headers: Mapping[bytes, bytes]) -> str | None:
    """Return what is wrong with the version of a request or with its Host field (RFC 9112, 3.2); None if both are valid.

    `headers` has names in lower case, and the values of equal names joined.
    """
    if version not in ("1.0", "1.1"):
        return BAD_REQUEST_LINE
    host = headers.get(b"host")
    if host is None:
        return None if version == "1.0" else "host: is missing; a request in HTTP/1.1 needs it once"
    if HOST.fullmatch(host) is None:
        return "host: must be one name or address, with a port or without"
    return None


def split_target(target: bytes) -> tuple[str, bytes]:
    """Return the path of a request target without a slash at its end, and its query.

    A target may be a whole URL (RFC 9112, 3.2.2).
    """
    path, mark, query = target.partition(b"?")
    if not path.startswith(b"/") and (authority := _ABSOLUTE.match(path)) is not None:
        path = path[authority.end() :] or b"/"
    if path.endswith(b"/") and path != b"/":
        path = path[:-1]
    return path.decode("latin-1"), mark + query


class MalformedRequest(Struct, frozen=True):
    """Error that answers bytes which are not a valid request."""

    status: HTTPStatus
    message: str
    retry_after_seconds: int = 0
    """The time after which the client may try again; 0 omits the hint."""

    def answer(self, content: bytes) -> bytes:
        """Return the complete answer with a body that explains the error."""
        headers = [("retry-after", str(self.retry_after_seconds))] if self.retry_after_seconds else []
        return response_head(self.status, "application/json", len(content), close=True, headers=headers) + content


class ClientDisconnected(Exception):
    """The client closed the connection, or was disconnected because it does not read."""


def response_head(
    status: HTTPStatus | int,
    content_type: str,
    content_length: int | None,
    *,
    close: bool,
    chunked: bool = False,
    headers: Sequence[tuple[str, str]] = (),
) -> bytes:
    """Return the status line and the headers of an answer."""
    lines = [f"HTTP/1.1 {int(status)} {_PHRASES[status]}", f"content-type: {content_type}"]
    if content_length is not None:
        lines.append(f"content-length: {content_length}")
    if chunked:
        lines.append("transfer-encoding: chunked")
    if close:
        lines.append("connection: close")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def sse_event(content: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + content + b"\n\n"
