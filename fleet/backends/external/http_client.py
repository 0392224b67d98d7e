"""HTTP client for the router's own requests to external backends.

Health checks, trial requests and tokenizations use aiohttp, each on a connection of its own. The requests of clients are
sent by `fleet.backends.external.upstream`, which passes their bytes on (ADR 38).
"""

import asyncio
import errno
import ssl
from typing import Self
from urllib.parse import urlsplit

import aiohttp
from msgspec import Struct
from yarl import URL

OUT_OF_SOCKETS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""Error numbers of a system call that failed because no socket was left in the process or the machine."""

MAX_ANSWER_BYTES = 1 << 20
# Lower statuses (1xx) only announce that an answer follows, except 101, after which the protocol changes and no answer follows.
FIRST_FINAL_STATUS = 200
FIRST_SERVER_ERROR = 500


class BackendUnreachable(Exception):
    """Error: the server does not answer. The message states the reason."""


class OutOfSockets(BackendUnreachable):
    """No socket is left in this process or machine, so the server is not to blame."""


class ServerAddress(Struct, frozen=True, kw_only=True):
    """Address of a server, and the parts that every request to the server contains."""

    host: str
    port: int
    tls: ssl.SSLContext | None
    netloc: bytes
    prefix: bytes
    """Path of the server's URL, without ``/v1`` at its end; it is put before the path of each request."""

    authorization: bytes
    """Value of the header ``authorization`` for the server; empty: the client's header is passed on, unless the settings forbid it."""

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

    def url(self, path: str) -> URL:
        """Return the URL of a path below the prefix; `path` is used without further encoding."""
        scheme = "http" if self.tls is None else "https"
        return URL(f"{scheme}://{self.netloc.decode()}{self.prefix.decode()}{path}", encoded=True)

    def opening(self, method: bytes, target: bytes) -> bytes:
        """Return the first lines of a request.

        They contain the key from the settings, if there is one. For the Messages API, they contain it also under
        Anthropic's header name.
        """
        key = b"authorization: %s\r\n" % self.authorization if self.authorization else b""
        if key and target.startswith(b"/v1/messages"):
            key += b"x-api-key: %s\r\n" % self.authorization.removeprefix(b"Bearer ")
        return b"%s %s%s HTTP/1.1\r\nhost: %s\r\n%s" % (method, self.prefix, target, self.netloc, key)


async def http_request(
    server: ServerAddress, method: str, path: str, body: bytes = b"", *, within_seconds: float
) -> tuple[int, bytes]:
    """Send a request over a new connection, and return the status and the content of the answer.

    Content beyond `MAX_ANSWER_BYTES` is cut off, at the end of the read that exceeds this limit.

    Raises:
        BackendUnreachable: The server cannot be reached, no answer came in time, or the answer is not HTTP or switches protocols.
        OutOfSockets: No socket was left for the request.
    """
    headers = {"Host": server.netloc.decode()}
    if body:
        headers["Content-Type"] = "application/json"
    if server.authorization:
        headers["Authorization"] = server.authorization.decode()
    try:
        async with (
            asyncio.timeout(within_seconds),
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, use_dns_cache=False),
                timeout=aiohttp.ClientTimeout(total=None),
            ) as session,
            session.request(
                method,
                server.url(path),
                data=body or None,
                headers=headers,
                ssl=server.tls or True,
                allow_redirects=False,
            ) as answer,
        ):
            if answer.status < FIRST_FINAL_STATUS:
                raise BackendUnreachable("it switches to another protocol")
            return answer.status, await _content(answer)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in OUT_OF_SOCKETS:
            raise OutOfSockets(connection_failure_cause(error)) from error
        raise BackendUnreachable(connection_failure_cause(error)) from error


async def _content(answer: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for part in answer.content.iter_any():
        content += part
        if len(content) > MAX_ANSWER_BYTES:
            break
    return bytes(content)


def connection_failure_cause(error: BaseException) -> str:
    """Return in words why a connection failed, for messages."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
