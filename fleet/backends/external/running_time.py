"""Running time: a clock that stands still while the router's process does not run.

A suspended machine, a stopped process or a busy core can keep the router from running for seconds. In this time it
could receive nothing, so the time must not count when the router measures how long a server has sent nothing.
"""

from fleet.core.clock import SECOND, Nanos

GRACE = SECOND // 5
"""Maximum time between two ticks that counts in full, in nanoseconds: twice the usual time between ticks.

If the time between two ticks is longer, only `GRACE` of it counts. The value must be well below the shortest silence
that makes a server suspect. Otherwise a pause of the router could make a server suspect.
"""


class RunningTime:
    """Measures time without the pauses in which this process did not run. The caller has to call `tick` regularly."""

    def __init__(self) -> None:
        self.lost = 0
        """The sum of all pauses so far, in nanoseconds; running time is the system's time minus this."""

        self._latest: Nanos | None = None

    def tick(self, now: Nanos) -> Nanos:
        """Note the system's time, and return the running time for it."""
        own = self.of(now)
        self.lost = now - own
        self._latest = now
        return own

    def of(self, now: Nanos) -> Nanos:
        """Return the running time for a system time, without noting it."""
        late = 0 if self._latest is None else max(0, now - self._latest - GRACE)
        return Nanos(now - self.lost - late)
