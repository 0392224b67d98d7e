"""What the gRPC fronts of a router have in common: when they take requests, how much of them, and until when a client waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from fleet.core.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.core.errors import Reason, RequestRejected, draining_rejection
from fleet.frontend.generation import Generation
from fleet.net.grpc.calls import Context
from fleet.net.settings import ORDINARY_BODY_BYTES

RETRY_AFTER_MS = 1000


def long_message_rejection() -> RequestRejected:
    """Return the refusal of a message for which there is no room."""
    return RequestRejected(
        Reason.QUEUE_FULL, "too many long requests are being taken in; retry later", retry_after_ms=RETRY_AFTER_MS
    )


class MessageMemory(Protocol):
    """The part of `fleet.net.grpc.http2.Http2Server` that counts messages while they arrive."""

    held_bytes: int
    max_held_bytes: int


class RequestIntake:
    """Open until `drain`."""

    def __init__(self, generation: Generation, clock: Clock, server: MessageMemory) -> None:
        """Nothing runs yet.

        Args:
            generation: Serves the requests.
            clock: For deadlines.
            server: Counts the messages of everything that arrives or runs.
        """
        self._generation = generation
        self._server = server
        self._clock = clock
        self._draining = False

    def drain(self) -> None:
        """Take no more requests; running ones go on."""
        self._draining = True

    def ready(self) -> bool:
        """Whether a request sent now would find a worker."""
        return bool(self._generation.models()) and not self._draining

    def check(self) -> None:
        """Let a request in.

        Raises:
            Refused: DRAINING.
        """
        if self._draining:
            raise draining_rejection()

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """While a request runs whose message stays in memory; what is in it that nobody asked for does as well.

        Args:
            size: Of the message, in bytes.

        Raises:
            Refused: QUEUE_FULL; it is a long one, and those that run take as much as they may.
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
        """The instant after which nobody waits: of the call, or of a message that comes with it, whichever is earlier.

        Args:
            context: The call.
            timeout_ms: What the message says; 0: nothing.
        """
        remaining = context.time_remaining()
        spans = [] if remaining is None else [int(remaining * SECOND)]
        if timeout_ms:
            spans.append(timeout_ms * MILLISECOND)
        return Nanos(self._clock.now() + min(spans)) if spans else None
