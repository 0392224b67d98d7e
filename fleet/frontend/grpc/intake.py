"""Request intake of the gRPC frontends: draining, memory for messages, and deadlines."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.errors import draining_rejection
from fleet.frontend.generation import Generation
from fleet.net.grpc.calls import Context
from fleet.net.grpc.errors import long_message_rejection
from fleet.net.settings import ORDINARY_BODY_BYTES


class MessageMemory(Protocol):
    """The memory counters of `fleet.net.grpc.http2.Http2Server`."""

    held_bytes: int
    max_held_bytes: int


class RequestIntake:
    """Admits requests until `drain`."""

    def __init__(self, generation: Generation, clock: Clock, server: MessageMemory) -> None:
        """Create an open intake.

        Args:
            generation: Serves the requests.
            clock: For deadlines.
            server: Counts the bytes of messages that arrive or are being served.
        """
        self._generation = generation
        self._server = server
        self._clock = clock
        self._draining = False

    def drain(self) -> None:
        """Admit no more requests; running ones continue."""
        self._draining = True

    def ready(self) -> bool:
        """Return whether a request would find a worker now."""
        return bool(self._generation.models()) and not self._draining

    def check(self) -> None:
        """Check that requests are admitted.

        Raises:
            RequestRejected: DRAINING.
        """
        if self._draining:
            raise draining_rejection()

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count a message as held while its request runs.

        Args:
            size: The size of the message in bytes.

        Raises:
            RequestRejected: QUEUE_FULL, because the message is a long one and the memory for messages is full.
        """
        server = self._server
        if size > ORDINARY_BODY_BYTES and server.held_bytes + size > server.max_held_bytes:
            raise long_message_rejection()
        server.held_bytes += size
        try:
            yield
        finally:
            server.held_bytes -= size

    def now(self) -> Nanos:
        return self._clock.now()

    def deadline(self, context: Context, timeout_ms: int = 0) -> Nanos | None:
        """Return the instant after which nobody waits: the earlier one of the call's and the message's deadline.

        Args:
            context: The call.
            timeout_ms: The timeout in the message; 0 means none.
        """
        remaining = context.time_remaining()
        spans = [] if remaining is None else [int(remaining * SECOND)]
        if timeout_ms:
            spans.append(timeout_ms * MILLISECOND)
        return Nanos(self._clock.now() + min(spans)) if spans else None
