"""A router's own time: a clock that stands still while the router's process does not run.

A machine that was suspended, a process that was stopped, or a core that others took for seconds: the router then finds that time has
passed in which it could hear nobody. Whoever judges others by their silence has to leave that out.
"""

from fleet.core.clock import SECOND, Nanos

GRACE = (
    SECOND // 2
)  # between two ticks; on a busy machine a tick comes late, and what it is late is left out from there on


class RunningTime:
    """Told of the time regularly, by `tick`."""

    def __init__(self) -> None:
        self.lost = 0
        """Nanoseconds that were left out so far."""

        self._latest: Nanos | None = None

    def tick(self, now: Nanos) -> Nanos:
        """Take in that it is `now` by the system's clock; return the own time."""
        own = self.of(now)
        self.lost = now - own
        self._latest = now
        return own

    def of(self, now: Nanos) -> Nanos:
        """Return the own time, as of now by the system's clock."""
        late = 0 if self._latest is None else max(0, now - self._latest - GRACE)
        return Nanos(now - self.lost - late)
