"""What the gRPC fronts of a router have in common: when they take requests, and until when a client waits."""

from fleet.adapters.grpc_calls import Context
from fleet.clock import MILLISECOND, SECOND, Clock, Nanos
from fleet.errors import shutting_down
from fleet.router.generation import Generation


class Door:
    """Open until `drain`."""

    def __init__(self, generation: Generation, clock: Clock) -> None:
        self._generation = generation
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
            raise shutting_down()

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
