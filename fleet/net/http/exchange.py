"""One HTTP request and its answer.

An answer is given as a whole (`Exchange.respond`), in chunks (`Exchange.send`), relayed as bytes from another
connection (`Exchange.relay`), or passed on piece by piece (`Exchange.pass_on`). In each case `Exchange.finish` is called once.
"""

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol

from fleet.net.http.messages import HttpRequest, response_head


class ExchangeTask(Protocol):
    """The work for one request; an `asyncio.Task` is one."""

    def cancel(self) -> object:
        """Stop, because the client no longer waits."""
        ...


class RelaySource(Protocol):
    """The reading side of a relay; a transport is one."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


StartExchange = Callable[["Exchange"], ExchangeTask]
"""Starts to serve a request. `Exchange.finish` is called once after it is served, possibly before this returns."""


class ExchangeConnection(Protocol):
    """The connection of an exchange, as far as the exchange needs it (`HttpConnection`)."""

    @property
    def is_expired(self) -> bool:
        """Return whether the client should open another connection."""
        ...

    def relay(self, source: RelaySource) -> asyncio.Transport:
        """Return the transport that takes the bytes of `source`, which pauses while the client does not read.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        ...

    def write(self, pieces: Sequence[bytes]) -> None:
        """Write all pieces at once.

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
        """Note that the request has been served, whether its answer is complete or not."""
        ...


class Exchange:
    def __init__(self, connection: ExchangeConnection, request: HttpRequest) -> None:
        self._connection = connection
        self.request = request
        self._keep_alive = request.head.keep_alive and not connection.is_expired
        self._began = False
        self._complete = False
        self.more_headers: tuple[tuple[str, str], ...] = ()  # of any answer that is not relayed

    @property
    def keeps_alive(self) -> bool:
        """Return whether the client may send another request after this one."""
        return self._keep_alive

    @property
    def began(self) -> bool:
        """Return whether the head of the answer was sent, so no other answer is possible."""
        return self._began

    def respond(
        self,
        status: HTTPStatus | int,
        content: bytes,
        *,
        content_type: str = "application/json",
        headers: Sequence[tuple[str, str]] = (),
        close: bool = False,
    ) -> None:
        """Send the whole answer.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        assert not self._began
        self._keep_alive = self._keep_alive and not close
        if self.more_headers:
            headers = (*headers, *self.more_headers)
        head = response_head(status, content_type, len(content), close=not self._keep_alive, headers=headers)
        self._began = self._complete = True
        self._connection.write((head, b"" if self.request.method == "HEAD" else content))

    def send(
        self, content: bytes, *, content_type: str, headers: Sequence[tuple[str, str]] = (), last: bool = False
    ) -> None:
        """Send the next chunk of a streamed answer; the head goes out with the first chunk.

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

    def relay(self, source: RelaySource) -> asyncio.Transport:
        """Return the transport that takes the answer of `source` as raw bytes, from the head of the answer on.

        The caller then calls `relayed`. If the source fails, it may instead send last events with `send` and call
        `finish`.

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
        """Send the next bytes of an answer that comes with its own head. The caller then awaits `drained`.

        Raises:
            ClientDisconnected: The connection is closed.
        """
        self._began = True
        self._connection.write((content,))

    def passed_on(self, *, keep_alive: bool) -> None:
        """Note that such an answer is complete. Without `keep_alive` the end of the connection marks its end."""
        self._complete = keep_alive

    def finish(self) -> None:
        """End the exchange.

        Another one may follow on the connection, but not after an incomplete answer, so that the client notices.
        """
        self._connection.finished(keep_alive=self._keep_alive and self._complete)

    async def drained(self) -> None:
        """Wait while the client does not read.

        Raises:
            ClientDisconnected: The client did not read for too long, or closed the connection.
        """
        await self._connection.drained()
