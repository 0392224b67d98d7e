"""Small HTTP client for external backends: health checks and tokenization, each over a connection of its own."""

import asyncio
import errno
import ssl
from typing import Self
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

OUT_OF_SOCKETS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Error numbers of a process without a free socket."""

MAX_ANSWER_BYTES = 1 << 20
FIRST_FINAL_STATUS = 200  # lower ones announce an answer
FIRST_SERVER_ERROR = 500


class BackendUnreachable(Exception):
    """The server does not answer; the message says why."""


class OutOfSockets(BackendUnreachable):
    """No socket is left in this process or machine, so the server is not to blame."""


class ServerAddress(Struct, frozen=True, kw_only=True):
    """Address of a server, and what every request to it contains."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    netloc: bytes
    prefix: bytes
    """Path prefix before ``/v1``."""

    authorization: bytes
    """Empty: the client's header is passed on."""

    @classmethod
    def of(cls, url: str, api_key: str) -> Self:
        """Build the address from validated settings."""
        parts = urlsplit(url)
        tls = ssl.create_default_context() if parts.scheme == "https" else None
        return cls(
            host=parts.hostname or "",
            port=parts.port or (443 if tls else 80),
            tls=tls,
            netloc=parts.netloc.encode(),
            prefix=parts.path.rstrip("/").removesuffix("/v1").encode(),
            authorization=f"Bearer {api_key}".encode() if api_key else b"",
        )

    def opening(self, method: bytes, path: str) -> bytes:
        """Return the first lines of a request."""
        key = b"authorization: %s\r\n" % self.authorization if self.authorization else b""
        return b"%s %s%s HTTP/1.1\r\nhost: %s\r\n%s" % (method, self.prefix, path.encode(), self.netloc, key)


async def http_request(
    server: ServerAddress, method: bytes, path: str, body: bytes = b"", *, within_seconds: float
) -> tuple[int, bytes]:
    """Send a request and return the status and content of the answer.

    Raises:
        BackendUnreachable: No answer came in time, or it is not HTTP.
        OutOfSockets: No socket was left for the request.
    """
    kind = b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body) if body else b""
    question = b"%s%sconnection: close\r\n\r\n%s" % (server.opening(method, path), kind, body)
    answer = _Answer()
    try:
        async with asyncio.timeout(within_seconds):
            reader, writer = await asyncio.open_connection(server.host, server.port, ssl=server.tls)
            try:
                writer.write(question)
                while not answer.complete and (data := await reader.read(1 << 16)):
                    answer.feed(data)
            finally:
                writer.close()
    except (OSError, TimeoutError, httptools.HttpParserError) as error:
        if isinstance(error, OSError) and error.errno in OUT_OF_SOCKETS:
            raise OutOfSockets(connection_failure_cause(error)) from error
        raise BackendUnreachable(connection_failure_cause(error)) from error
    if answer.status < FIRST_FINAL_STATUS:
        raise BackendUnreachable("it closed the connection without an answer")
    return answer.status, bytes(answer.content)


def connection_failure_cause(error: BaseException) -> str:
    """Return in words why a connection failed."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class _Answer:
    """A short answer, filled by the parser."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.content = bytearray()
        self.complete = False
        self._bytes = 0

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:  # not a subclass of HttpParserError
            raise httptools.HttpParserError("it switches to another protocol") from offered
        self._bytes += len(data)
        if self._bytes > MAX_ANSWER_BYTES:
            if self.status < FIRST_FINAL_STATUS:
                raise httptools.HttpParserError("too many bytes without an answer")
            self.complete = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.content += body

    def on_message_complete(self) -> None:
        self.complete = self.status >= FIRST_FINAL_STATUS
