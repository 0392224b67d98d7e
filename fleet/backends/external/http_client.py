"""Simple questions to a foreign server, each over a connection of its own: whether it is well, what it makes of a text."""

import asyncio
import errno
import ssl
from typing import Self
from urllib.parse import urlsplit

import httptools
from msgspec import Struct

OUT_OF_SOCKETS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""What a process meets that has no socket left."""

MAX_ANSWER_BYTES = 1 << 20
FIRST_FINAL_STATUS = 200  # those before say that an answer will follow
FIRST_SERVER_ERROR = 500


class BackendUnreachable(Exception):
    """A server does not answer; the message says why."""


class OutOfSockets(BackendUnreachable):
    """Not for its own reasons: this process or machine has no socket left."""


class ServerAddress(Struct, frozen=True, kw_only=True):
    """Where a server is, and what every request to it says."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    netloc: bytes
    prefix: bytes
    """Of its paths, before ``/v1``."""

    authorization: bytes
    """Empty: it gets what the client sent."""

    @classmethod
    def of(cls, url: str, api_key: str) -> Self:
        """By its settings, which were checked."""
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
        """The lines that a request begins with."""
        key = b"authorization: %s\r\n" % self.authorization if self.authorization else b""
        return b"%s %s%s HTTP/1.1\r\nhost: %s\r\n%s" % (method, self.prefix, path.encode(), self.netloc, key)


async def http_request(
    server: ServerAddress, method: bytes, path: str, body: bytes = b"", *, within_seconds: float
) -> tuple[int, bytes]:
    """Status and content of the answer.

    Raises:
        Unreachable: There was none in time, or none that is HTTP.
        Starved: Nobody could ask.
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
    """Why a connection failed, in words."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class _Answer:
    """A short answer as a parser hears it."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.content = bytearray()
        self.complete = False
        self._bytes = 0

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:  # is no HttpParserError
            raise httptools.HttpParserError("it goes on in another protocol") from offered
        self._bytes += len(data)
        if self._bytes > MAX_ANSWER_BYTES:
            if self.status < FIRST_FINAL_STATUS:
                raise httptools.HttpParserError("it goes on and on without an answer")
            self.complete = True

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.content += body

    def on_message_complete(self) -> None:
        self.complete = self.status >= FIRST_FINAL_STATUS
