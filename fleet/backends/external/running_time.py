"""Running time: a clock that stands still while the router's process does not run.

A suspended machine, a stopped process, or a core that other processes kept for seconds: afterwards time has passed in which the router
could receive nothing. A judgement about the silence of others has to leave that time out.
"""

from fleet.core.clock import SECOND, Nanos

GRACE = SECOND // 5
"""The allowed pause between two ticks, twice the usual one.

Only the excess is left out, so a sleep counts for this long. It has to be well below the shortest silence that is suspicious.
"""


class RunningTime:
    """A clock that leaves out the time in which this process did not run; call `tick` regularly."""

    def __init__(self) -> None:
        self.lost = 0
        """Nanoseconds that were left out so far."""

        self._latest: Nanos | None = None

    def tick(self, now: Nanos) -> Nanos:
        """Note the system's time; return the running time."""
        own = self.of(now)
        self.lost = now - own
        self._latest = now
        return own

    def of(self, now: Nanos) -> Nanos:
        """Return the running time at a system time."""
        late = 0 if self._latest is None else max(0, now - self._latest - GRACE)
        return Nanos(now - self.lost - late)
