"""A request of one connection and the answer to it: what servers are given to answer by.

An answer is given whole (`Exchange.respond`), piece by piece (`Exchange.send`), or passed on from elsewhere as bytes
(`Exchange.relay`). Whichever it is, `Exchange.over` is called once.
"""

import asyncio
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Protocol

from fleet.net.http.messages import HttpRequest, response_head


class ExchangeTask(Protocol):
    """Work for a request; an `asyncio.Task` is one."""

    def cancel(self) -> object:
        """Nobody waits for it any more."""
        ...


class RelaySource(Protocol):
    """Where bytes come from that are relayed; a transport is one."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


StartExchange = Callable[["Exchange"], ExchangeTask]
"""Begins to serve; `Exchange.over` is called once it is done with, possibly before this returns."""


class ExchangeConnection(Protocol):
    """What is needed of `fleet.net.http.connection.HttpConnection`."""

    @property
    def old(self) -> bool:
        """Whether the client is to make another connection."""
        ...

    def relay(self, source: RelaySource) -> asyncio.Transport:
        """Where the bytes of `source` go, which is not read while the client does not."""
        ...

    def write(self, pieces: Sequence[bytes]) -> None:
        """Write all of it at once."""
        ...

    async def drained(self) -> None:
        """Wait while the client does not read."""
        ...

    def finished(self, *, keep_alive: bool) -> None:
        """The served request is over, whether its answer is complete or not."""
        ...


class Exchange:
    """A request and the answer to it."""

    def __init__(self, connection: ExchangeConnection, request: HttpRequest) -> None:
        self._connection = connection
        self.request = request
        self._keep_alive = request.head.keep_alive and not connection.old
        self._began = False
        self._complete = False

    @property
    def keeps_alive(self) -> bool:
        """Whether the client may send another request after this one."""
        return self._keep_alive

    @property
    def began(self) -> bool:
        """Whether the answer's head is out, so that no other answer can be given."""
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
        """Give the whole answer.

        Raises:
            ClientGone: The connection is closed.
        """
        assert not self._began
        self._keep_alive = self._keep_alive and not close
        head = response_head(status, content_type, len(content), close=not self._keep_alive, headers=headers)
        self._began = self._complete = True
        self._connection.write((head, b"" if self.request.method == "HEAD" else content))

    def send(
        self, content: bytes, *, content_type: str, headers: Sequence[tuple[str, str]] = (), last: bool = False
    ) -> None:
        """Give the next piece of a streamed answer; its head goes out together with the first.

        Raises:
            ClientGone: The connection is closed.
        """
        assert not self._complete
        pieces = []
        if not self._began:
            self._keep_alive = self._keep_alive and self.request.head.chunked_answer
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
        """Where the bytes of `source` go as they are, from the head of the answer on; then `relayed` is called.

        Or, instead of what is missing, the last events are sent by `send`, and then `over` is called.

        Raises:
            ClientGone: The connection is closed.
        """
        assert not self._began
        transport = self._connection.relay(source)
        self._began = True
        return transport

    def relayed(self, *, keep_alive: bool) -> None:
        """All that will come is written; it is over. Without `keep_alive` the end of the connection is the answer's."""
        self._complete = keep_alive
        self.over()

    def over(self) -> None:
        """Nothing more is done for this request.

        Another one may follow on the connection; not after an answer that was cut off, so that the client can tell.
        """
        self._connection.finished(keep_alive=self._keep_alive and self._complete)

    async def drained(self) -> None:
        """Wait while the client does not read.

        Raises:
            ClientGone: It did not read for too long, or closed.
        """
        await self._connection.drained()
