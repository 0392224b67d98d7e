"""One HTTP/1.1 exchange: the parts of a request, the head of an answer, and the exchange itself.

An answer is given as a whole (`Exchange.respond`), in chunks (`Exchange.send`), relayed as bytes from another
connection (`Exchange.relay`), or passed on piece by piece (`Exchange.pass_on`). In each case `Exchange.finish` is called once.
"""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

from msgspec import Struct

from fleet.core.requests import RateLimitStatus, RemainingLimit
from fleet.core.system_clock import unix_seconds
from fleet.core.validation import REQUEST_ID

# Chunks of a body from this size (bytes) on are kept as they are; smaller ones are joined to save memory.
LARGE_CHUNK_BYTES = 4 << 10

REQUEST_ID_HEADER = b"x-request-id"
ANTHROPIC_PATHS = "/v1/messages"  # this path and all paths below it belong to the Messages API
ANTHROPIC_VERSION = b"anthropic-version"  # Anthropic's clients send this header with each request

MAX_CACHED_HEADS = 1024
# Maximum size of a head that is cached; heads usually have 300 bytes, so the cache stays below a MiB.
MAX_CACHED_HEAD_BYTES = 1024
MAX_LENGTH_DIGITS = 12
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,%d})\r\n" % MAX_LENGTH_DIGITS, re.IGNORECASE)

_PHRASES = {int(status): status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}


class HttpHead(Struct, kw_only=True):
    """The parsed head of a request. Requests whose heads differ only in the length of the body share one object."""

    method: str
    path: str  # path of the target, without the query
    query: bytes = b""  # query of the target, with its question mark; empty if there is none
    headers: Mapping[bytes, bytes]  # values by the header's name in lower case
    keep_alive: bool
    chunked_answer: bool  # True if the answer may have chunked coding, which HTTP/1.0 does not have
    forwarded_headers: bytes | None = None  # header lines that a relay forwards; None until the relay has computed them
    credentials: bytes = b""  # header lines with the client's credentials; computed together with `forwarded_headers`


class ArrivingBody(Protocol):
    """Port to a body that is read while it arrives. The number of bytes that wait to be read is limited."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    async def __anext__(self) -> bytes:
        """Return the next piece.

        Raises:
            RequestRejected: No more bytes will arrive, because the request is malformed or its client too slow.
        """
        ...


class HttpRequest(Struct, frozen=True):
    head: HttpHead
    body: bytes
    arriving: ArrivingBody | None = None
    """The body, or the bytes of another protocol, if they are read while they arrive; `body` is empty then."""

    unread: bool = False
    """True if the body is empty because the server takes no bodies from this client. The connection then closes after the answer."""

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
    """Caches parsed heads by their exact bytes, without the digits of the content length.

    Clients that keep their connections send the same head again and again, and a look-up costs a tenth of parsing. Only
    heads with a content length are cached. A full cache is emptied. So a client that sends a different head each time
    can only cause the heads of other clients to be parsed again.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, HttpHead] = {}
        # The head that was found last: its bytes before and after the digits of the content length, and the parsed head.
        self._latest: tuple[bytes, bytes, HttpHead] | None = None

    def find(self, content: bytes) -> tuple[HttpHead, int] | None:
        """Return the cached head for these bytes, and the content length in them; None if the head is unknown.

        `content` is a whole head with the empty line at its end.
        """
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
        """Add a head that the parser has accepted, unless it is too long or does not state the content length `body_bytes`."""
        if len(content) > MAX_CACHED_HEAD_BYTES or (length := _LENGTH.search(content)) is None:
            return
        if int(length[1]) != body_bytes:
            return
        if len(self._known) >= MAX_CACHED_HEADS:
            self._known.clear()
        begin, end = length.span(1)
        self._known[content[:begin] + content[end:]] = head


class BodyBuffer:
    """Collects a body that arrives in chunks.

    Large chunks are joined only once, because each copy of a long prompt takes time.

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
    """Counts the bytes of request bodies that all connections of a port have in memory (`HttpSettings.max_held_bytes`)."""

    def __init__(self) -> None:
        self.bytes = 0


KEPT_ALIVE = ("connection", "keep-alive")
"""The header that tells a client of HTTP/1.0 that the connection stays open after the answer. HTTP/1.1 does not need it
(RFC 9112, 9.3)."""

EVENT_STREAM = "text/event-stream; charset=utf-8"

BAD_REQUEST_LINE = (
    "the request line must be a method, a target without invalid characters, and the version HTTP/1.1 or HTTP/1.0"
)
"""Answer to a request line without a version, with another version, or with a target that the parser rejects.

These cases have one answer, because the parser reports a missing version as an invalid target if the bytes after the line
arrive together with it.
"""

HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
"""Grammar of the Host field (RFC 9110, 7.2): a name or an address, and an optional port. Two fields, joined by a comma
and a space, do not match."""

_ABSOLUTE = re.compile(rb"https?://[^/]*", re.IGNORECASE)


def head_problem(version: str, target: bytes, headers: Mapping[bytes, bytes]) -> str | None:
    """Return what is wrong with the version, the target or the Host field of a request (RFC 9112, 3.2); None if all are valid.

    A target with a fragment is refused: servers behind this one would leave the fragment out, and so serve another path than the one
    that was checked. `headers` has names in lower case, and the values of equal names joined.
    """
    if version not in ("1.0", "1.1") or b"#" in target:
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


NO_RETRY = ("x-should-retry", "false")
"""Header that tells the clients of OpenAI and Anthropic not to retry. Without it they retry after some statuses, such as all from 500 on."""


class MalformedRequest(Struct, frozen=True):
    """The error with which a malformed request, or the request on a refused connection, is answered."""

    status: HTTPStatus
    message: str
    retry_after_seconds: int = 0
    """The time after which the client may try again; 0 omits the hint."""

    request_id: str = ""
    """The request id that the answer states; empty: it states none."""

    is_anthropic: bool = False
    """True if the answer has the form of Anthropic's API (`is_anthropic`)."""

    def answer(self, content: bytes) -> bytes:
        """Return the complete answer with a body that explains the error."""
        headers = list(id_headers(self.request_id, is_anthropic=self.is_anthropic)) if self.request_id else []
        if self.retry_after_seconds:
            headers.append(("retry-after", str(self.retry_after_seconds)))
        if self.status is HTTPStatus.NOT_IMPLEMENTED:
            headers.append(NO_RETRY)  # a retry would need the same missing function
        return response_head(self.status, "application/json", len(content), close=True, headers=headers) + content


def rate_limit_headers(allowance: RateLimitStatus | None) -> tuple[tuple[str, str], ...]:
    """Return the rate limit headers of an answer; empty for a tenant without limits."""
    headers: list[tuple[str, str]] = []
    for name in () if allowance is None else ("requests", "tokens"):
        bucket: RemainingLimit | None = getattr(allowance, name)
        if bucket is not None:
            headers += [
                (f"x-ratelimit-limit-{name}", str(bucket.limit)),
                (f"x-ratelimit-remaining-{name}", str(bucket.remaining)),
                (f"x-ratelimit-reset-{name}", f"{bucket.full_in_seconds:.3f}s"),
            ]
    return tuple(headers)


def is_anthropic(path: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request belongs to Anthropic's API by its path, or comes from one of Anthropic's clients by its headers."""
    return path.startswith(ANTHROPIC_PATHS) or ANTHROPIC_VERSION in headers


def id_headers(request_id: str, *, is_anthropic: bool) -> tuple[tuple[str, str], ...]:
    """Return the headers with the id of a request. Anthropic's clients read `request-id`, all others `x-request-id`."""
    named = (("x-request-id", request_id),)
    return (*named, ("request-id", request_id)) if is_anthropic else named


def answer_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the id for the answer to a request that has got no id from the router.

    It is the id that the client sent, if that is usable, or else a random one.
    """
    if REQUEST_ID_HEADER in headers and REQUEST_ID.fullmatch(sent := headers[REQUEST_ID_HEADER].decode("latin-1")):
        return sent
    return uuid.uuid4().hex


class ClientDisconnected(Exception):
    """Raised if the connection is closed, so no answer can be sent: by the client, or because the client reads too slowly."""


def response_head(
    status: HTTPStatus | int,
    content_type: str,
    content_length: int | None,
    *,
    close: bool,
    chunked: bool = False,
    headers: Sequence[tuple[str, str]] = (),
) -> bytes:
    """Return the status line and the headers of an answer. Status 204 has no content, so its head does not describe any (RFC 9110)."""
    lines = [f"HTTP/1.1 {int(status)} {_PHRASES[status]}", _date(int(unix_seconds()))]
    if status != HTTPStatus.NO_CONTENT:
        lines.append(f"content-type: {content_type}")
        if content_length is not None:
            lines.append(f"content-length: {content_length}")
    if chunked:
        lines.append("transfer-encoding: chunked")
    if close:
        lines.append("connection: close")
    lines += [f"{name}: {value}" for name, value in headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@lru_cache(maxsize=1)
def _date(seconds: int) -> str:
    """Return the header with the date of an answer (RFC 9110, 6.6.1). Answers within one second share it."""
    return f"date: {formatdate(seconds, usegmt=True)}"


def sse_event(content: bytes) -> bytes:
    """Return one server-sent event."""
    return b"data: " + content + b"\n\n"


class ExchangeTask(Protocol):
    """Port to the code that serves one request; an `asyncio.Task` implements it."""

    def cancel(self) -> object:
        """Stop serving the request, because its client has disconnected."""
        ...


class RelaySource(Protocol):
    """The connection from which a relay reads; an `asyncio.Transport` implements it."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


StartExchange = Callable[["Exchange"], ExchangeTask]
"""A function that starts to serve a request. It calls `Exchange.finish` once at the end, possibly before it returns."""


class ExchangeConnection(Protocol):
    """The part of a connection that an exchange needs; `HttpConnection` implements it."""

    @property
    def is_expired(self) -> bool:
        """Return whether the connection is so old that its client should use a new one for the next request."""
        ...

    def relay(self, source: RelaySource) -> asyncio.Transport:
        """Return the transport that takes the bytes of `source`; `source` is paused while the client does not read.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        ...

    def write(self, pieces: Sequence[bytes]) -> None:
        """Write all pieces together.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        ...

    async def drained(self) -> None:
        """Wait while the client does not read.

        Raises:
            ClientDisconnected: The client did not read for too long, or closed the connection.
        """
        ...

    def finished(self, *, keep_alive: bool) -> None:
        """Handle the end of the exchange. Without `keep_alive`, as after an incomplete answer, close the connection."""
        ...


class Exchange:
    def __init__(self, connection: ExchangeConnection, request: HttpRequest) -> None:
        self._connection = connection
        self.request = request
        self._keep_alive = request.head.keep_alive and not connection.is_expired
        self._began = False
        self._complete = False
        # Headers that are added to the answer, unless it is relayed or passed on.
        self.more_headers: tuple[tuple[str, str], ...] = ()

    @property
    def keeps_alive(self) -> bool:
        """Return whether the connection stays open after a complete answer, so that the client may send another request."""
        return self._keep_alive

    @property
    def began(self) -> bool:
        """Return whether the head of the answer was sent, so no other answer is possible."""
        return self._began

    def id_headers(self, request_id: str) -> tuple[tuple[str, str], ...]:
        """Return the headers with the id of the request, under the names that this client reads."""
        return id_headers(request_id, is_anthropic=is_anthropic(self.request.path, self.request.headers))

    def respond(
        self,
        status: HTTPStatus | int,
        content: bytes,
        *,
        content_type: str = "application/json",
        headers: Sequence[tuple[str, str]] = (),
        close: bool = False,
    ) -> None:
        """Send the whole answer, without its body to a HEAD request. If `headers` contain no request id, the client's or a new one is added.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        assert not self._began
        if "x-request-id" not in dict(headers):
            headers = (*headers, *self.id_headers(answer_id(self.request.headers)))
        self._keep_alive = self._keep_alive and not close
        if self.more_headers:
            headers = (*headers, *self.more_headers)
        if self._keep_alive and not self.request.head.chunked_answer:
            headers = (*headers, KEPT_ALIVE)
        head = response_head(status, content_type, len(content), close=not self._keep_alive, headers=headers)
        self._began = self._complete = True
        self._connection.write((head, b"" if self.request.method == "HEAD" else content))

    def send(
        self, content: bytes, *, content_type: str, headers: Sequence[tuple[str, str]] = (), last: bool = False
    ) -> None:
        """Send the next chunk of a streamed answer; the head is sent with the first chunk.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        assert not self._complete
        pieces = []
        if not self._began:
            self._keep_alive = self._keep_alive and self.request.head.chunked_answer
            if self.more_headers:
                headers = (*headers, *self.more_headers)
            pieces.append(
                response_head(
                    HTTPStatus.OK,
                    content_type,
                    None,
                    close=not self._keep_alive,
                    chunked=self.request.head.chunked_answer,
                    headers=headers,
                )
            )
            self._began = True
        if not self.request.head.chunked_answer:
            pieces.append(content)
        else:
            if content:
                pieces += (b"%x\r\n" % len(content), content, b"\r\n")
            if last:
                pieces.append(b"0\r\n\r\n")
        self._complete = last
        self._connection.write(pieces)

    def end_events(self, events: bytes, headers: Sequence[tuple[str, str]]) -> None:
        """Send the last server-sent events of an answer.

        If the whole answer has no events, because the client has them all, send status 204 instead. An EventSource connects
        again after the end of each answer, and stops only after this status (HTML standard, "Server-sent events").

        Raises:
            ClientDisconnected: The connection is closed.
        """
        if events or self._began:
            self.send(events, content_type=EVENT_STREAM, headers=headers, last=True)
        else:
            self.respond(HTTPStatus.NO_CONTENT, b"", headers=headers)

    def relay(self, source: RelaySource) -> asyncio.Transport:
        """Return the transport that takes the answer of `source` as raw bytes, from the head of the answer on.

        After the answer, the caller calls `relayed`. If the source fails, the caller may instead send last events with `send`
        and call `finish`.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        assert not self._began
        transport = self._connection.relay(source)
        self._began = True
        return transport

    def relayed(self, *, keep_alive: bool) -> None:
        """End a relayed answer. Without `keep_alive` the end of the connection marks the end of the answer."""
        self._complete = keep_alive
        self.finish()

    def pass_on(self, content: bytes) -> None:
        """Send the next bytes of an answer whose bytes include its head. The caller then awaits `drained`.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        self._began = True
        self._connection.write((content,))

    def passed_on(self, *, keep_alive: bool) -> None:
        """End an answer of `pass_on`. Without `keep_alive` the end of the connection marks the end of the answer."""
        self._complete = keep_alive

    def finish(self) -> None:
        """End the exchange.

        Another exchange may follow on the connection. After an incomplete answer, the connection is closed instead, so that
        the client notices the error.
        """
        self._connection.finished(keep_alive=self._keep_alive and self._complete)

    async def drained(self) -> None:
        """Wait while the client does not read.

        Raises:
            ClientDisconnected: The client did not read for too long, or closed the connection.
        """
        await self._connection.drained()
