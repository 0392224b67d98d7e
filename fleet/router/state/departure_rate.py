"""Departure rate: how fast a queue empties while something waits in it."""

from math import exp

from fleet.core.clock import SECOND, Nanos

# Seconds after which the weight of a measured departure has fallen to 1/e; only time in which something waits counts. This is longer than a
# burst of requests, and short enough to notice a change of load.
RATE_MEMORY_SECONDS = 10.0
EVIDENCE = 8  # number of departures that are needed before `per_second` returns a rate


class DepartureRate:
    """Measures how much leaves a queue per second while something waits in it. Recent departures count more."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._departures = 0
        self._since: Nanos | None = None  # instant up to which time is counted in `_seconds`; None: nothing waits

    def busy(self, now: Nanos) -> None:
        """Record that something waits from now on."""
        if self._since is None:
            self._since = now

    def idle(self) -> None:
        """Record that nothing waits any longer."""
        self._since = None

    def departed(self, amount: int, now: Nanos) -> None:
        """Record that `amount` (requests or tokens) has left the queue. It counts only while something waits."""
        if self._since is None:
            return
        departed, seconds = self._faded(now)
        self._amount, self._seconds = departed + amount, seconds
        self._departures += 1
        self._since = now

    def per_second(self, now: Nanos) -> float | None:
        """Return how much leaves the queue per second while something waits; None if too little was measured."""
        amount, seconds = self._faded(now)
        return None if self._departures < EVIDENCE or seconds <= 0 else amount / seconds

    def _faded(self, now: Nanos) -> tuple[float, float]:
        """Return the measured amount and seconds with their present weights. If something waits, the time since `_since` is included."""
        if self._since is None:
            return self._amount, self._seconds
        seconds = max(0, now - self._since) / SECOND
        keep = exp(-seconds / RATE_MEMORY_SECONDS)
        return self._amount * keep, self._seconds * keep + seconds
