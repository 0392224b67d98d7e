"""Circuit breaker: stops calls to a node that fails, so that a dead node costs its callers little time."""

from kvstore.clock import SECOND, Nanos

FIRST_PAUSE = Nanos(SECOND // 10)
# Longest pause after attempts that fail quickly, such as a refused connection. A restarted node is found within this
# time.
LONGEST_PAUSE = Nanos(1 * SECOND)
# A pause is at least this many times as long as the failed attempt, so a node that hangs takes at most a fifth of its
# callers' time.
COST_FACTOR = 4


class CircuitBreaker:
    """Stops calls after a failure and allows one attempt after a pause.

    The breaker is closed while calls succeed. Each failure opens it and doubles the pause; when the pause has passed,
    `allows` lets one caller try.
    """

    def __init__(self) -> None:
        self._pause = Nanos(0)
        self._retry_at = Nanos(0)
        self.failures = 0
        """Number of failures since the last success."""

    @property
    def closed(self) -> bool:
        return self._pause == 0

    def would_allow(self, now: Nanos) -> bool:
        """Return whether `allows` would return True, but do not use up the one attempt of this pause."""
        return self.closed or now >= self._retry_at

    def allows(self, now: Nanos) -> bool:
        """Return whether the caller may make a call. While the breaker is open, only one caller per pause gets True."""
        if not self.would_allow(now):
            return False
        if not self.closed:
            self._retry_at = Nanos(now + self._pause)
        return True

    def succeeded(self) -> None:
        self._pause = Nanos(0)
        self.failures = 0

    def failed(self, started: Nanos, now: Nanos) -> None:
        """Record the failure of an attempt that began at `started`."""
        self.failures += 1
        doubled = min(max(FIRST_PAUSE, 2 * self._pause), LONGEST_PAUSE)
        self._pause = Nanos(max(doubled, COST_FACTOR * (now - started)))
        self._retry_at = Nanos(now + self._pause)
