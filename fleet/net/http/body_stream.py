"""Body stream: the bytes of a client that are read while they arrive.

The connection adds the bytes that it receives, and one consumer reads them. When more than `HIGH_WATER_BYTES` wait, the
stream is full, and the connection stops reading from its client until the consumer has read them. Memory is therefore
bounded, however long the body is.

This module is only for bodies that a handler reads while they arrive (`fleet.net.http.server`, rule 7). Other bodies are
complete before their request is served. `HttpSettings.max_body_bytes` (`fleet.net.settings`) limits their size, and
`fleet.net.http.server` applies this limit.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from fleet.core.errors import RequestRejected

HIGH_WATER_BYTES = 64 << 10


class BodyStream:
    """Passes the bytes of one body from its connection to its consumer.

    Implements `fleet.net.http.exchange.ArrivingBody`.
    """

    def __init__(self, read: Callable[[], None]) -> None:
        """Create an empty stream. The function `read` is called when a full stream has been emptied by its consumer."""
        self._read = read
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._ended = False
        self._failure: RequestRejected | None = None
        self._arrival: asyncio.Future[None] | None = None
        self.full = False
        """True from the moment at which more than `HIGH_WATER_BYTES` wait until the consumer has read them all."""

        self.received = 0
        """Number of bytes that were added so far."""

    # Called by the connection

    def add(self, piece: bytes) -> None:
        """Add a piece of the body. The piece is not copied here, so its bytes must not change later."""
        self._pieces.append(piece)
        self.received += len(piece)
        self._waiting_bytes += len(piece)
        self.full = self._waiting_bytes > HIGH_WATER_BYTES
        self._wake()

    def end(self) -> None:
        """Mark the body as complete."""
        self._ended = True
        self._wake()

    def fail(self, refused: RequestRejected) -> None:
        """End the stream before the body is complete; the consumer gets this error after the pieces that have arrived."""
        self._failure = refused
        self.end()

    # Called by the consumer

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._failure is not None:
                raise self._failure
            if self._ended:
                raise StopAsyncIteration
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        pieces = b"".join(self._pieces)
        self._pieces.clear()
        self._waiting_bytes = 0
        if self.full:
            self.full = False
            self._read()
        return pieces

    def _wake(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None and not arrival.done():
            arrival.set_result(None)
