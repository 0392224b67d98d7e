"""Circuit breaker: says when to retry a failed operation, so that a dead node costs its callers next to nothing."""

from kvstore.clock import SECOND, Nanos

FIRST_PAUSE = Nanos(SECOND // 10)
LONGEST_PAUSE = Nanos(
    1 * SECOND
)  # after attempts that fail quickly, such as a refused connection; a restarted node is found within this time
COST_FACTOR = 4  # a node that hangs may take at most a fifth of its callers' time


class CircuitBreaker:
    """Closed while calls succeed. A failure opens it for a pause that doubles with each failure; then one caller may try."""

    def __init__(self) -> None:
        self._pause = Nanos(0)
        self._retry_at = Nanos(0)
        self.failures = 0
        """Failures in a row."""

    @property
    def closed(self) -> bool:
        return self._pause == 0

    def would_allow(self, now: Nanos) -> bool:
        """Return whether `allows` would return True, without using up the try of this pause."""
        return self.closed or now >= self._retry_at

    def allows(self, now: Nanos) -> bool:
        """Return whether to try. While the breaker is open, only one caller per pause gets True."""
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
